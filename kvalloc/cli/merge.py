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
    accept_missing: bool = False,
) -> None:
    """Put the parts together that 'profile' made with --shard.

    The file is the one that the same command without --shard writes, byte for byte, whatever the
    order of the parts.

    Parameters
    ----------
    parts : list of Path
        What shards wrote, or was merged of some of them.
    output : Path
        The score profile to write.
    accept_missing : bool
        Merge what there is; the missing shards can be added later by another merge.

    Examples
    --------
    kvalloc profile demo --samples 4 --shard 1/2 -o part1.safetensors
    kvalloc profile demo --samples 4 --shard 2/2 -o part2.safetensors
    kvalloc merge part1.safetensors part2.safetensors -o s.safetensors
    """
    from kvalloc.formats.merging import merge as merged_parts

    merged = merged_parts(parts, output, accept_missing=accept_missing)
    facts = {**vars(merged), "parts": len(parts), "file_bytes": output.stat().st_size}
    many = "1 part" if len(parts) == 1 else f"{len(parts)} parts"
    shown = {
        "merged": f"{merged.samples:,} samples of {many}",
        "missing": merged.missing,
        "written": f"{output} ({size(facts['file_bytes'])})",
    }
    print_result(facts, shown)
