"""The options that ``solve`` and ``compare`` share: what to reach, and within which limits."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, get_args, get_type_hints

import typer

from kvalloc.errors import InputError, ProfileFileError, nearest

if TYPE_CHECKING:
    from collections.abc import Mapping

    from kvalloc.allocation.request import Request
    from kvalloc.formats.score_profile import ScoreProfile

Scores = Annotated[
    Path, typer.Argument(metavar="SCORES", help="A score profile that 'kvalloc profile' wrote.")
]


def share_number(text: str) -> float:
    """A share as people write it, ``0.9`` or ``90%``; whoever uses it says which are in range.

    Examples
    --------
    >>> share_number("0.9"), share_number("90%")
    (0.9, 0.9)
    """
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        return float(number) / 100 if percent else float(number)
    except ValueError:
        raise typer.BadParameter(f"{text!r} is not a share; write 0.9 or 90%") from None


TargetRetention = Annotated[
    float | None,
    typer.Option(
        parser=share_number,
        metavar="SHARE",
        help="Fewest bytes that keep this mean share of the score mass, such as 0.9.",
    ),
]
TargetLoss = Annotated[
    float | None,
    typer.Option(
        metavar="NATS",
        help="Fewest bytes whose predicted loss is at most this, nats per token, such as 0.02.",
    ),
]
Objective = Annotated[
    str,
    typer.Option(
        metavar="mean|worst|loss",
        help="Most retention as the mean over layers, or of the worst unit, or least predicted "
        "loss.",
    ),
]
DefaultObjective = Annotated[
    str | None,
    typer.Option(
        metavar="mean|worst|loss",
        help="Most retention as the mean over layers, or of the worst unit, or least predicted "
        "loss; by default the loss where a size is asked for and loss curves were measured.",
    ),
]
Weights = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE.json",
        help="How much each layer counts: a JSON list of one number a layer, or of one list of "
        "numbers a layer, one a KV head.",
    ),
]
Bits = Annotated[
    str | None,
    typer.Option(
        metavar="16,8,4",
        help="Bit widths to choose from beside the budgets; 16 is the model's own dtype.",
    ),
]
Cost = Annotated[
    str,
    typer.Option(
        metavar="bytes|decode-bytes|communication",
        help="What an option costs: bytes stored, bytes read for each generated token, or bytes "
        "communicated for each in private inference.",
    ),
]
Budget = Annotated[
    str | None,
    typer.Option(metavar="SHARE", help="At most this share of all entries, such as 20%."),
]
BudgetTokens = Annotated[
    int | None, typer.Option(metavar="N", help="At most N entries per KV head on average.")
]
Memory = Annotated[
    str | None,
    typer.Option(metavar="SIZE", help="At most this much for the whole cache, such as 512MiB."),
]
Context = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        min=1,
        help="Prompt length that the target holds for, tokens; that of the score profile by "
        "default.",
    ),
]
Batch = Annotated[int, typer.Option(metavar="N", min=1, help="Prompts that share the memory.")]
Level = Annotated[
    str,
    typer.Option(metavar="layer|head", help="What gets a budget: a layer, or each KV head."),
]
MinTokens = Annotated[
    int | None,
    typer.Option(metavar="N", help="Least budget, tokens; sinks and window are kept in any case."),
]
MaxTokens = Annotated[int | None, typer.Option(metavar="N", help="Largest budget, tokens.")]
Page = Annotated[int, typer.Option(metavar="N", min=1, help="Budgets are whole pages of N tokens.")]
Cap = Annotated[
    list[str] | None,
    typer.Option(
        metavar="LAYERS=SIZE",
        help="At most this much for some layers, such as 0-15=256MiB; can be repeated, may nest.",
    ),
]
MaxDistinct = Annotated[
    int | None, typer.Option(metavar="N", help="At most N different budgets in the whole model.")
]
Ranks = Annotated[
    int | None,
    typer.Option(metavar="N", help="Place KV heads on N tensor-parallel ranks (--level head)."),
]
RankTolerance = Annotated[
    float | None,
    typer.Option(
        metavar="SHARE",
        help="How far the largest rank may be above the mean one; 0.02 by default.",
    ),
]
EqualHeads = Annotated[
    bool,
    typer.Option(
        "--equal-heads",
        help="One budget for all heads of a layer, at --level head.",
    ),
]
Average = Annotated[
    str,
    typer.Option(
        metavar="curves|allocations",
        help="Solve once on the mean curves, or solve every sample and average the budgets.",
    ),
]
Workloads = Annotated[
    str,
    typer.Option(
        metavar="mean|worst|cvar",
        help="What counts of the samples: their mean, the worst one, or the mean of the worst "
        "share --tail of them.",
    ),
]
ShareGroups = Annotated[
    str | None,
    typer.Option(
        metavar="GROUPS|N",
        help="Adjacent layers that keep the same entries, such as 2-3,4-5; or at most N groups of "
        "layers, chosen for the target. Needs 'kvalloc profile --share-length'.",
    ),
]
LossPolicies = Annotated[
    str | None,
    typer.Option(
        metavar="NAME,NAME",
        help="With --objective loss or --target-loss: the policies that each unit chooses from; "
        "all whose losses the score profile holds by default.",
    ),
]
Tail = Annotated[
    float | None,
    typer.Option(metavar="SHARE", help="With --workloads cvar: that share, such as 0.25."),
]
TimeLimit = Annotated[
    float | None,
    typer.Option(metavar="SECONDS", help="Stop a solver after so long with the best it has."),
]


def request(given: Mapping[str, Any]) -> Request:
    """The request that a command's options make.

    Parameters
    ----------
    given : mapping
        The command's options by name, and any others, as ``locals()`` holds them at its start.

    Raises
    ------
    InputError
        If one of them cannot be; before anything but a file of weights is read.
    """
    from kvalloc.allocation.request import Request, request_options
    from kvalloc.allocation.weights import read_weights

    options = request_options(given)
    if options["objective"] is None:
        del options["objective"]  # the request's own default
    options["bits"] = bit_widths(options["bits"])
    if options["weights"] is not None:
        options["weights"] = read_weights(options["weights"])
    return Request.of(**options)


def load_scores(path: Path) -> ScoreProfile:
    """The score profile in a file.

    Raises
    ------
    ProfileFileError
        If the file is not a sound score profile; says so where it is a budget profile instead.
    """
    from kvalloc.formats.score_profile import ScoreProfile

    if path.is_file() and os.access(path, os.R_OK):
        with open(path, "rb") as handle:
            if handle.read(64).lstrip()[:1] == b"{":  # safetensors begin with eight bytes of length
                raise ProfileFileError(
                    path,
                    field="file",
                    found="JSON, as a budget profile is",
                    expected="a score profile written by 'kvalloc profile'",
                    way_out="name the *.safetensors file that the budgets were decided from",
                )
    return ScoreProfile.load(path)


def bit_widths(text: str | None) -> tuple[int, ...] | None:
    """Bit widths from a text such as ``16,8,4``.

    Raises
    ------
    InputError
        If they are no whole numbers; which ones there are, the request knows.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(f"--bits is {text!r}, expected numbers such as 16,8,4") from None


def check_time_limit(seconds: float | None) -> None:
    """Refuse a limit that is not a positive number.

    Raises
    ------
    InputError
    """
    if seconds is not None and not 0 < seconds < float("inf"):
        raise InputError(f"--time-limit is {seconds:g} s, expected a number above 0")


def solver_options(name: str, pairs: list[str]) -> dict[str, Any]:
    """The options of a solver from ``KEY=VALUE`` texts, each of the type that the solver takes.

    Parameters
    ----------
    name : str
        A registered solver.
    pairs : list of str
        As typed.

    Returns
    -------
    dict

    Raises
    ------
    InputError
        If there is no such solver or option, a text is not ``KEY=VALUE``, or its value is not of
        the option's type.
    SolverError
        If the solver cannot be loaded.
    """
    from kvalloc.problem.registry import SOLVERS, load

    known = plugin_options(load(SOLVERS, name))
    return typed_options("solver", name, known, pairs, example="beta=10")


def typed_options(
    kind: str, name: str, known: dict[str, inspect.Parameter], pairs: list[str], *, example: str
) -> dict[str, Any]:
    """The options of a plug-in from ``KEY=VALUE`` texts, each of the type that it takes.

    Parameters
    ----------
    kind, name : str
        What the plug-in is and how it is called; ``--KIND-option`` is named in errors.
    known : dict of inspect.Parameter
        Its options, see `plugin_options`.
    pairs : list of str
        As typed.
    example : str
        Of a pair.

    Returns
    -------
    dict

    Raises
    ------
    InputError
        If there is no such option, a text is not ``KEY=VALUE``, or its value is not of the
        option's type.
    """
    flag = f"--{kind}-option"
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or not key:
            raise InputError(f"{flag} {pair!r} is not KEY=VALUE, such as {example}")
        if key not in known:
            choices = ", ".join(known) or "it has none"
            near = nearest(key, known)
            raise InputError(f"{kind} {name} has no option {key!r}; {near}choose from: {choices}")
        if key in options:
            raise InputError(f"{flag} {key} is given twice; give it once")
        options[key] = _value(flag, name, key, text.strip(), known[key])
    return options


def plugin_options(cls: type[Any]) -> dict[str, inspect.Parameter]:
    """The options that a solver or scorer is made with, by name.

    Returns
    -------
    dict of inspect.Parameter
        Their annotations resolved where that is possible.
    """
    if cls.__init__ is object.__init__:
        return {}
    try:
        hints = get_type_hints(cls.__init__)
    except Exception:  # a plug-in's annotations may name what only a type checker sees
        hints = {}
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    named = (p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD))
    return {p.name: p.replace(annotation=hints.get(p.name, p.annotation)) for p in named}


def _value(flag: str, name: str, key: str, text: str, option: inspect.Parameter) -> Any:
    kind = option.annotation
    # "float | None" takes a number, too
    kind = next((part for part in get_args(kind) if part in (bool, int, float, str)), kind)
    if kind not in (bool, int, float, str) and option.default is not inspect.Parameter.empty:
        kind = type(option.default)
    try:
        if kind is bool:
            return {"true": True, "yes": True, "false": False, "no": False}[text.lower()]
        if kind in (int, float, str):
            return kind(text)
    except (KeyError, ValueError):
        expected = {bool: "true or false", int: "a whole number", float: "a number"}[kind]
        raise InputError(f"{flag} {key} of {name} is {text!r}, expected {expected}") from None
    return text
