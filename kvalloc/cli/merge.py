"""``kvalloc merge``: from the parts of a measurement to one file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from kvalloc.cli.options import takes
from kvalloc.cli.output import print_result
from kvalloc.units import Option, size


@takes()
def merge(
    parts: list[Path],
    *,
    output: Annotated[Path, Option("OUT.safetensors")],
) -> None:
    """Put the parts together that 'profile' made with --shard.

    The file is the one that the same command without --shard writes, byte for byte, whatever the
    order of the parts.

    Parameters
    ----------
    parts : list of Path
        What the shards wrote.
    output : Path
        The score profile to write.

    Examples
    --------
    kvalloc profile demo --samples 4 --shard 1/2 -o part1.safetensors
    kvalloc profile demo --samples 4 --shard 2/2 -o part2.safetensors
    kvalloc merge part1.safetensors part2.safetensors -o s.safetensors
    """
    from kvalloc.formats.merging import merge as merged_parts

    merged = merged_parts(parts, output)
    facts = {
        "output": output,
        "samples": merged.n_samples,
        "digest": merged.digest,
        "parts": len(parts),
        "file_bytes": (n_bytes := output.stat().st_size),
    }
    many = "1 part" if len(parts) == 1 else f"{len(parts)} parts"
    shown = {
        "merged": f"{merged.samples_text} of {many}",
        "written": f"{output} ({size(n_bytes)})",
    }
    print_result(facts, shown)
