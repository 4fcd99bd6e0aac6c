"""The options that only ``kvalloc profile`` has, in the order of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="OUT.safetensors", help="The score profile to write."),
]
Text = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE|DIR",
        help="Running text, cut into samples; can be repeated. Public-domain texts that ship "
        "with kvalloc by default.",
    ),
]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Prompts, one JSON object a line with 'prompt', 'text', 'messages', or 'context' "
        "and 'input'; can be repeated.",
    ),
]
Samples = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Samples to measure; see --sampling-ratio. With --tasks two of each by default.",
    ),
]
SamplingRatio = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Without --samples: share of all samples there are; 0.1 by default.",
    ),
]
Scorer = Annotated[
    str, typer.Option(metavar="NAME", help="What is measured; see 'kvalloc scorers'.")
]
Window = Annotated[
    int | None,
    typer.Option(metavar="N", help="The scorer's window, tokens; its own by default."),
]
Pool = Annotated[
    int | None,
    typer.Option(metavar="N", help="The scorer's pooling width, tokens; its own by default."),
]
GroupReduce = Annotated[
    str | None,
    typer.Option(metavar="mean|max", help="How query heads that share a KV head are reduced."),
]
Sinks = Annotated[
    int | None,
    typer.Option(metavar="N", help="First tokens that are never evicted; 4 by default."),
]
CountSinks = Annotated[
    bool, typer.Option("--count-sinks", help="Count the sinks as evictable, as XKV does.")
]
Bits = Annotated[
    str | None,
    typer.Option(
        metavar="16,8,4",
        help="Measure what these bit widths do to the attention output too, for "
        "'kvalloc solve --bits'.",
    ),
]
ShareLength = Annotated[
    int,
    typer.Option(
        metavar="N",
        help="Also measure what runs of 2 to N adjacent layers keep when they share the kept "
        "entries, for 'kvalloc solve --share-groups'; 4 at most, 1 measures nothing.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of the choice of samples.")]
Loss = Annotated[
    str | None,
    typer.Option(
        metavar="[measured|fast]",
        help="Also measure what reducing each unit alone does to the next-token distribution: "
        "a forward for every unit and level, or a second-order estimate at the price of a few "
        "prefills.",
    ),
]
LossLevel = Annotated[
    str, typer.Option(metavar="layer|head", help="What is reduced alone for --loss.")
]
Probes = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --loss measured: estimate everything first, then measure only the N figures "
        "a sample whose measurement may change the solution; all by default.",
    ),
]
LossPolicies = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="Policies or scorers whose losses are measured beside the scorer's, so that "
        "'kvalloc solve' chooses one for each unit with its budget; options after a colon, "
        "such as tova,critical,snapkv:window=4:pool=1; 'usual' for a set that does well.",
    ),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with what a killed command had finished.")
]
