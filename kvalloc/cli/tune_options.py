"""The options that only ``kvalloc tune`` has, in the order of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Output = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="OUT.json",
        help="Where the budget profile goes; of several budgets each gets its own, such as "
        "OUT-20.json.",
    ),
]
Budget = Annotated[
    list[str], typer.Option(metavar="20%", help="Share of the entries; can be repeated.")
]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(metavar="FILE.jsonl", help="Prompts of the kinds that are to come."),
]
Text = Annotated[
    list[Path] | None, typer.Option(metavar="FILE|DIR", help="Running text; can be repeated.")
]
Samples = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=2,
        help="How many prompts; all by default, with --tasks four of each.",
    ),
]
ByPrompt = Annotated[
    bool,
    typer.Option(
        "--by-prompt",
        help="Let each prompt hand out its entries among the heads by score; what is tuned is "
        "how much each scorer's scores count in each head.",
    ),
]
Scorer = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Ranks where nothing else is better; xkv, or a draft."),
]
Window = Annotated[
    int | None, typer.Option(metavar="N", help="The scorer's window, never evicted, tokens.")
]
Policies = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="Scorers that each head chooses from beside that one, options after a colon, "
        "such as tova,xkv:window=4:pool=1.",
    ),
]
Combine = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|none",
        help="With --by-prompt: what is done with evicted entries, options after a colon; "
        "attention_matching by default.",
    ),
]
Steps = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Steps of the descent; 60, or 100 with --by-prompt."),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of the choice of prompts.")]
Resume = Annotated[bool, typer.Option("--resume", help="Go on where a killed command stood.")]
