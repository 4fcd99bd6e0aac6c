"""The options that only ``kvalloc generate`` has, in the order of its help."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from kvalloc.units import parse_fraction

Profile = Annotated[
    str | None,
    typer.Option(metavar="P.json", help="A budget profile, or the name of a shipped one."),
]
Level = Annotated[
    str | None,
    typer.Option(metavar="layer|head", help="With a target: what gets a budget."),
]
Solver = Annotated[str | None, typer.Option(metavar="NAME", help="With a target: who decides.")]
Adapt = Annotated[
    float | None,
    typer.Option(
        parser=parse_fraction,
        metavar="SHARE",
        help="Let the prompt move the profile's budgets by at most this share, such as 0.25, "
        "at the same total.",
    ),
]
MeasuredTokens = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="With --adapt or a target: measure only N tokens of a longer prompt, from both "
        "of its ends.",
    ),
]
Hold = Annotated[
    bool,
    typer.Option(
        "--hold",
        help="With --adapt or a target: hold the prompt's full cache and decide from it, "
        "instead of reading the prompt twice.",
    ),
]
Prompt = Annotated[str | None, typer.Option(metavar="TEXT", help="The prompt.")]
PromptFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="A file with the prompt; stdin without either."),
]
Question = Annotated[
    list[str] | None,
    typer.Option(
        metavar="TEXT",
        help="A question about the prompt, which is then a document; may be repeated. Each "
        "one follows the document alone.",
    ),
]
Ask = Annotated[
    bool, typer.Option("--ask", help="Ask for questions; without a terminal, a line each.")
]
KeepTurns = Annotated[
    bool,
    typer.Option("--keep-turns", help="A conversation: each question follows the answers."),
]
SaveCache = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Save the cache with the document, for --cache."),
]
Cache = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Take the document from a cache that was saved."),
]
MaxNewTokens = Annotated[
    int, typer.Option(metavar="N", min=1, help="Length of an answer at most, tokens.")
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--no-chat",
        help="Put the prompt into the model's chat form, or not. Where the model has one by "
        "default.",
        show_default=False,
    ),
]
Full = Annotated[bool, typer.Option("--full", help="Use the full cache, to compare with.")]
Policy = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="Pick the entries in another way within the same budgets: a policy, or a scorer "
        "whose best stay; see 'kvalloc policies'.",
    ),
]
PolicyOption = Annotated[
    list[str] | None,
    typer.Option(metavar="KEY=VALUE", help="A parameter of --policy; may be repeated."),
]
DecodeEvery = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Keep the budget while answering, too: go back to it every N tokens. By default "
        "the answer is never evicted.",
    ),
]
AllowOtherModel = Annotated[
    bool,
    typer.Option("--allow-other-model", help="Accept a profile of a model of the same sizes."),
]
OwnDtype = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        metavar="NAME",
        help="Of weights and cache: float32, bfloat16 or float16. float32 by default, and with "
        "--cache what it was saved in.",
    ),
]
Memory = Annotated[
    str | None,
    typer.Option(
        metavar="SIZE",
        help="At most this much for the prompt's cache, such as 512MiB; the answer comes on top.",
    ),
]
