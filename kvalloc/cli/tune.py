"""``kvalloc tune``: budgets and policies of single heads, by descent on the whole cache's loss."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalloc.cli import tune_options as options
from kvalloc.cli.calibrating import read_recipe
from kvalloc.cli.options import (
    Device,
    Dtype,
    Json,
    Lengths,
    ModelName,
    Question,
    Quiet,
    ReferenceContext,
    TaskNames,
)
from kvalloc.cli.output import print_json, print_table, size
from kvalloc.cli.progress import load
from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.models.loading import LoadedModel
    from kvalloc.tuning.tuned_profile import Tuned

EXAMPLES = """\
  kvalloc tune demo --prompts calibration.jsonl --budget 20% -o p.json
  kvalloc tune demo --tasks needle,pairs,kl,code --question both --budget 20% -o p.json
  kvalloc tune demo --text docs/ --samples 12 --budget 50% --budget 20% -o p.json
  kvalloc tune demo --prompts calibration.jsonl --by-prompt --budget 20% -o p.json
"""

EACH_TASK = 4
"""Prompts of each kind that are made."""


def tune(
    model: ModelName,
    output: options.Output,
    budget: options.Budget,
    prompts: options.Prompts = None,
    text: options.Text = None,
    tasks: TaskNames = None,
    question: Question = None,
    lengths: Lengths = None,
    samples: options.Samples = None,
    context: ReferenceContext = 1024,
    by_prompt: options.ByPrompt = False,
    scorer: options.Scorer = None,
    window: options.Window = None,
    policies: options.Policies = None,
    combine: options.Combine = None,
    steps: options.Steps = None,
    seed: options.Seed = 0,
    dtype: Dtype = "float32",
    device: Device = None,
    resume: options.Resume = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Decide budgets and policies of all heads together, on what the reduced cache really does.

    Needs no score profile: the gradient of the whole cache's loss, on the model's own
    continuations of the prompts, moves entries from heads that can spare them to heads that
    need them. A fifth of the prompts is held out and chooses among the stages of the descent.
    """
    from kvalloc.models.loading import require_run_packages
    from kvalloc.units import parse_share

    require_run_packages()
    shares = list(dict.fromkeys(parse_share(one) for one in budget))
    files = _files(output, shares)
    _check_outputs(files, resume=resume)
    recipe = read_recipe(tasks, question, lengths, context=context, given=bool(text or prompts))
    texts = [] if recipe else _texts(text or [], prompts or [])
    if combine is not None and not by_prompt:
        raise InputError("--combine goes with --by-prompt: other profiles have one policy a head")
    wanted = _options(
        by_prompt=by_prompt,
        scorer=scorer,
        window=window,
        policies=policies,
        combine=combine,
        steps=steps,
    )
    loaded = load(model, dtype=dtype, device=device, quiet=quiet)
    if recipe:
        texts = [
            *recipe.make(
                loaded.tokenizer,
                samples=samples,
                each=EACH_TASK,
                context=context,
                seed=seed,
                begun_every=2 if by_prompt else 0,  # a draft begins in another place then
            )
        ]
        samples = len(texts)
    wanted |= {"shares": shares, "context": context, "samples": samples, "seed": seed}
    rows = _tuned(loaded, texts, files, wanted | {"resume": resume}, quiet=quiet)
    if json:
        print_json(rows)
    elif not quiet:
        _print(rows)


def _files(output: Path, shares: list[float]) -> list[Path]:
    if len(shares) == 1:
        return [output]
    return [output.with_name(f"{output.stem}-{share * 100:g}{output.suffix}") for share in shares]


def _check_outputs(files: list[Path], *, resume: bool) -> None:
    """Refused before anything is loaded."""
    from kvalloc.files import check_writable
    from kvalloc.measure.checkpoint import check_unfinished, checkpoint_folder

    for file in files:
        check_writable(file)
        check_unfinished(checkpoint_folder(file), resume=resume)


def _tuned(
    loaded: LoadedModel,
    texts: list[Any],
    files: list[Path],
    options: dict[str, Any],
    *,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Decide one budget after the other, each written as soon as it is decided."""
    from kvalloc.cli.progress import ProgressBar
    from kvalloc.tuning import tune_each

    with ProgressBar("tuning", unit="steps", quiet=quiet) as progress:
        found = tune_each(
            loaded.model,
            loaded.tokenizer,
            texts,
            outputs=files,
            model_id=loaded.model_id,
            progress=progress,
            **options,
        )
        return [_row(file, tuned) for file, tuned in zip(files, found, strict=True)]


def _texts(text: list[Path], prompts: list[Path]) -> list[Any]:
    from kvalloc.measure import read_prompts, read_texts

    found: list[Any] = [*read_texts(text)]
    for file in prompts:
        found += read_prompts(file)
    if not found:
        raise InputError("there is nothing to tune on; give --tasks, --prompts or --text")
    return found


def _options(
    *,
    by_prompt: bool,
    scorer: str | None,
    window: int | None,
    policies: str | None,
    combine: str | None,
    steps: int | None,
) -> dict[str, Any]:
    from dataclasses import replace

    from kvalloc.tuning.fixed_budgets import FixedBudgets
    from kvalloc.tuning.score_mixing import MixedScores

    moves = MixedScores if by_prompt else FixedBudgets
    options: dict[str, Any] = {"by_prompt": by_prompt}
    if scorer is not None or window is not None:
        name = scorer or moves.own_scorer
        options["scorer"] = name if window is None else f"{name}:window={window}"
    if combine is not None:
        options["combine"] = combine
    if steps is not None:
        options["descent"] = replace(moves.settings, steps=steps)
    return options | _named(policies)


def _named(policies: str | None) -> dict[str, Any]:
    if policies is None:
        return {}
    return {"policies": [name.strip() for name in policies.split(",") if name.strip()]}


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
