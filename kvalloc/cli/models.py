"""The options of every command that runs a model."""

from __future__ import annotations

from typing import Annotated

import typer

ModelName = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A hub id, a local folder, a .gguf file, or 'demo'."),
]
Dtype = Annotated[
    str,
    typer.Option(metavar="NAME", help="Of weights and cache: float32, bfloat16 or float16."),
]
Device = Annotated[
    str | None, typer.Option(metavar="NAME", help="Such as cuda:0; the CPU by default.")
]
