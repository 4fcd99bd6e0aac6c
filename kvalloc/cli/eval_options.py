"""The options that only ``kvalloc eval`` has, in the order of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Profile = Annotated[
    list[str] | None,
    typer.Option(
        metavar="P.json",
        help="A budget profile, or the name of a shipped one; can be repeated.",
    ),
]
Peer = Annotated[
    list[str] | None,
    typer.Option(
        metavar="kvpress:NAME",
        help="A press of kvpress on the same prompts, at the profiles' share of entries or at "
        "one of its own: kvpress:TOVA, kvpress:AdaKV(SnapKV), kvpress:KVzip@20%; can be "
        "repeated. Needs an environment with kvpress: 'make peers'.",
    ),
]
Adapt = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="Every profile also with budgets that each prompt moves by at most this share, at "
        "the same total.",
    ),
]
TargetRetention = Annotated[
    float | None,
    typer.Option(
        metavar="R",
        help="Also budgets that are decided for each prompt, to retain this share of its "
        "attention mass.",
    ),
]
Tasks = Annotated[
    str | None,
    typer.Option(
        "--tasks",
        "--task",
        metavar="NAMES",
        help="Several with commas; needle,kl by default: needle, needle-keys, pairs, tracking, "
        "common-words, frequent-words, labels, qa, quote, code, kl, perplexity.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.jsonl",
        help="Your own prompts as a task of its own: LongBench's fields, or 'prompt' with "
        "'answer' or 'answers'.",
    ),
]
Metric = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Of --prompts, instead of the dataset's own: contains, all, exact, f1, rouge-l, "
        "classification, edit, retrieval, count.",
    ),
]
Question = Annotated[
    str,
    typer.Option(
        metavar="inside|after",
        help="Whether the question is part of what is compressed, or comes after.",
    ),
]
Turns = Annotated[int, typer.Option(metavar="N", min=1, help="Questions about each prompt.")]
Split = Annotated[
    str,
    typer.Option(
        metavar="development|held-out",
        help="Whose texts and words; held-out ones are for the final word only.",
    ),
]
Samples = Annotated[int, typer.Option(metavar="N", min=1, help="Prompts of each task.")]
Context = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Longest prompt, tokens; 1024 by default, and --prompts as long as they are.",
    ),
]
Seed = Annotated[int, typer.Option(metavar="N", min=0, help="Of the prompts.")]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="OUT.json", help="Also write rows and every answer to a file."
    ),
]
IntoProfile = Annotated[
    bool,
    typer.Option("--into-profile", help="Also write each budget profile's rows into its own file."),
]
AllowOtherModel = Annotated[
    bool,
    typer.Option("--allow-other-model", help="Accept profiles of a model of the same sizes."),
]
