"""``kvalloc merge``."""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

from kvalloc.cli.options import takes
from kvalloc.cli.output import print_result
from kvalloc.formats.merging import merge as merged_parts
from kvalloc.units import Option, size


@dataclass(frozen=True)
class MergeOptions:
    """The parts, and the whole."""

    parts: Annotated[list[Path], Option()]
    """Files of the shards."""

    _: KW_ONLY

    output: Annotated[Path, Option("OUT.safetensors")]
    """The score profile to write."""


@takes()
def merge(options: MergeOptions) -> None:
    """Merge the parts that 'profile' made with --shard.

    The file equals the result of the same command without --shard, byte for byte, in any order
    of parts.

    Examples
    --------
    kvalloc profile demo --samples 4 --shard 1/2 -o part1.safetensors
    kvalloc profile demo --samples 4 --shard 2/2 -o part2.safetensors
    kvalloc merge part1.safetensors part2.safetensors -o s.safetensors
    """
    parts, output = options.parts, options.output
    merged = merged_parts(parts, output)
    facts = {
        "output": output,
        "samples": merged.n_samples,
        "digest": merged.digest,
        "parts": len(parts),
        "file_bytes": (n_bytes := output.stat().st_size),
    }
    count = "1 part" if len(parts) == 1 else f"{len(parts)} parts"
    shown = {
        "merged": f"{merged.samples_text} of {count}",
        "written": f"{output} ({size(n_bytes)})",
    }
    print_result(facts, shown)
