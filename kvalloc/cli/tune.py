"""``kvalloc tune``: budgets and policies of single heads, by descent on the whole cache's loss."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from kvalloc.cli.calibrating import PromptOptions, read_prompt_options
from kvalloc.cli.options import EngineFlags, ModelFlags, takes
from kvalloc.cli.output import print_result, print_table
from kvalloc.cli.progress import ProgressBar, running
from kvalloc.errors import InputError
from kvalloc.units import Option, size

if TYPE_CHECKING:
    from kvalloc.tuning.tuned_profile import Tuned

EXAMPLES = """\
  kvalloc tune demo --prompts calibration.jsonl --budget 20% -o p.json
  kvalloc tune demo --tasks needle,pairs,kl,code --question both --budget 20% -o p.json
  kvalloc tune demo --text docs/ --samples 12 --budget 50% --budget 20% -o p.json
  kvalloc tune demo --prompts calibration.jsonl --by-prompt --budget 20% -o p.json
"""

EACH_TASK = 4
"""Prompts of each kind that are made."""
DECIDED = "What is decided, and how"


class TuneFlags(TypedDict, total=False):
    """What ``kvalloc tune`` decides; see `kvalloc.tuning.tuned_profile.TuneOptions`.

    Parameters
    ----------
    samples : int
        How many prompts; all by default, with `tasks` four of each.
    by_prompt : bool
        Let each prompt hand out its entries among the heads by score; what is tuned is how much
        each scorer's scores count in each head.
    scorer : str
        Ranks where nothing else is better; xkv, or lookahead.
    window : int
        The scorer's window, never evicted, tokens.
    policies : str
        Scorers that each head chooses from beside that one, options after a colon, such as
        tova,xkv:window=4:pool=1.
    combine : str
        With `by_prompt`: what is done with evicted entries, options after a colon;
        attention_matching by default.
    steps : int
        Steps of the descent; 60, or 100 with `by_prompt`.
    """

    samples: Annotated[int | None, Option("N", DECIDED, least=2)]
    by_prompt: Annotated[bool | None, Option("", DECIDED)]
    scorer: Annotated[str | None, Option("NAME", DECIDED)]
    window: Annotated[int | None, Option("N", DECIDED)]
    policies: Annotated[str | None, Option("NAME,NAME", DECIDED)]
    combine: Annotated[str | None, Option("NAME|none", DECIDED)]
    steps: Annotated[int | None, Option("N", DECIDED, least=1)]


@takes(TuneFlags, PromptOptions, ModelFlags, EngineFlags)
def tune(
    model: str,
    *,
    output: Annotated[Path, Option("OUT.json")],
    budget: Annotated[list[str], Option("20%")],
    resume: bool = False,
    **given: Any,
) -> None:
    """Decide budgets and policies of all heads together, on what the reduced cache really does.

    Needs no score profile: the gradient of the whole cache's loss, on the model's own
    continuations of the prompts, moves entries from heads that can spare them to heads that
    need them. A fifth of the prompts is held out and chooses among the stages of the descent.

    Parameters
    ----------
    output : Path
        Where the budget profile goes; of several budgets each gets its own, such as OUT-20.json.
    budget : list of str
        Share of the entries.
    """
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    from kvalloc.tuning import tune_each
    from kvalloc.units import parse_share

    shares = list(dict.fromkeys(parse_share(one) for one in budget))
    files = _files(output, shares, resume=resume)
    begun = 2 if "by_prompt" in given else 0  # what follows begins in another place then
    prompts, made = read_prompt_options(given, each=EACH_TASK, begun_every=begun)
    if not given.keys() & {"text", "prompts", "tasks"}:
        raise InputError("there is nothing to tune on; give --tasks, --prompts or --text")
    wanted = _wanted(given)
    with running(model, given) as loaded:
        texts = prompts(loaded.tokenizer)
        if made:
            wanted["samples"] = len(texts)
        with ProgressBar("tuning", unit="steps") as progress:
            found = tune_each(
                loaded.model,
                loaded.tokenizer,
                texts,
                shares=shares,
                outputs=files,
                resume=resume,
                progress=progress,
                model_id=loaded.model_id,
                **wanted,
            )
            rows = [_row(file, tuned) for file, tuned in zip(files, found, strict=True)]
    print_result(rows, lambda: _print(rows))


def _files(output: Path, shares: list[float], *, resume: bool) -> list[Path]:
    """One for each share; refuses what cannot be written before anything is loaded."""
    from kvalloc.measure.checkpoint import check_output

    names = [f"{output.stem}-{share * 100:g}{output.suffix}" for share in shares]
    files = [output.with_name(name) for name in names] if len(shares) > 1 else [output]
    for file in files:
        check_output(file, resume=resume)
    return files


def _wanted(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `kvalloc.tuning.tune_each` is asked."""
    from dataclasses import replace

    from kvalloc.tuning.fixed_budgets import FixedBudgets
    from kvalloc.tuning.score_mixing import MixedScores

    moves = MixedScores if "by_prompt" in given else FixedBudgets
    if "combine" in given and "by_prompt" not in given:
        raise InputError("--combine goes with --by-prompt: other profiles have one policy a head")
    same = ("samples", "by_prompt", "scorer", "combine", "context", "seed")
    wanted = {name: given[name] for name in same if name in given}
    if "window" in given:
        wanted["scorer"] = f"{given.get('scorer', moves.own_scorer)}:window={given['window']}"
    if "policies" in given:
        wanted["policies"] = [one.strip() for one in given["policies"].split(",") if one.strip()]
    if "steps" in given:
        wanted["descent"] = replace(moves.settings, steps=given["steps"])
    return wanted


def _row(file: Path, tuned: Tuned) -> dict[str, Any]:
    profile, course = tuned.profile, tuned.course
    return {
        "output": str(file),
        "retained_bytes": profile.retained_bytes,
        "full_bytes": profile.full_bytes,
        "held_out_loss": float(course.held_out_losses.mean()),
        "uniform_loss": float(course.uniform_losses.mean()),
        "held_out_interval": profile.requested["predicted_interval"],
        "held_out_prompts": int(course.held_out_losses.size),
        "stages": [{"step": step, "held_out_loss": loss} for step, loss in course.stages],
        "policies": [policy.title for policy in profile.policies],
    }


def _print(rows: list[dict[str, Any]]) -> None:
    headings = ("written", "bytes", "share", "loss", "equal budgets", "held out")
    print_table(
        headings,
        [
            [
                row["output"],
                size(row["retained_bytes"]),
                f"{row['retained_bytes'] / row['full_bytes']:.1%}",
                f"{row['held_out_loss']:.4f}",
                f"{row['uniform_loss']:.4f}",
                str(row["held_out_prompts"]),
            ]
            for row in rows
        ],
    )
