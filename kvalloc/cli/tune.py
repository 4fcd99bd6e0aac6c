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
    from kvalloc.tuning.fixed_budgets import Tuned

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
    states = _states(files, resume=resume)
    recipe = read_recipe(tasks, question, lengths, context=context, given=bool(text or prompts))
    texts = [] if recipe else _texts(text or [], prompts or [])
    choose = _mixing_options if by_prompt else _options
    wanted = choose(scorer, window, policies, steps) | _combining(combine, by_prompt=by_prompt)
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
    wanted |= {"state_files": states, "resume": resume}
    rows = _tuned(loaded, texts, files, wanted, by_prompt=by_prompt, quiet=quiet)
    for state in states:
        state.unlink(missing_ok=True)
    if json:
        print_json(rows)
    elif not quiet:
        _print(rows)


def _files(output: Path, shares: list[float]) -> list[Path]:
    if len(shares) == 1:
        return [output]
    return [output.with_name(f"{output.stem}-{share * 100:g}{output.suffix}") for share in shares]


def _states(files: list[Path], *, resume: bool) -> list[Path]:
    """Where each descent's state is kept; refused before anything is loaded."""
    from kvalloc.files import check_writable
    from kvalloc.measure.checkpoint import checkpoint_folder

    states = [checkpoint_folder(file) for file in files]
    for file, state in zip(files, states, strict=True):
        check_writable(file)
        if not resume and state.exists():
            raise InputError(
                f"{state} holds an unfinished descent; go on with --resume, or delete the file to "
                "start over"
            )
    return states


def _tuned(
    loaded: LoadedModel,
    texts: list[Any],
    files: list[Path],
    options: dict[str, Any],
    *,
    by_prompt: bool,
    quiet: bool,
) -> list[dict[str, Any]]:
    """Decide one budget after the other, each written as soon as it is decided."""
    from kvalloc.cli.progress import ProgressBar
    from kvalloc.tuning.fixed_budgets import tune_shares
    from kvalloc.tuning.per_prompt import tune_by_prompt

    rows = []
    try:
        with ProgressBar("tuning", unit="steps", quiet=quiet) as progress:
            found = (tune_by_prompt if by_prompt else tune_shares)(
                loaded.model,
                loaded.tokenizer,
                texts,
                model_id=loaded.model_id,
                progress=progress,
                **options,
            )
            for file, tuned in zip(files, found, strict=True):
                tuned.profile.save(file)
                rows.append(_row(file, tuned))
    except KeyboardInterrupt:
        if not any(state.exists() for state in options["state_files"]):
            raise
        raise KeyboardInterrupt(
            "interrupted; the steps so far are kept: go on with the same command and --resume"
        ) from None
    return rows


def _texts(text: list[Path], prompts: list[Path]) -> list[Any]:
    from kvalloc.measure import read_prompts, read_texts

    found: list[Any] = [*read_texts(text)]
    for file in prompts:
        found += read_prompts(file)
    if not found:
        raise InputError("there is nothing to tune on; give --tasks, --prompts or --text")
    return found


def _options(
    scorer: str | None, window: int | None, policies: str | None, steps: int | None
) -> dict[str, Any]:
    from kvalloc.measure.loss_policies import read_scorer
    from kvalloc.tuning.descent import Descent

    options: dict[str, Any] = {"scorer": read_scorer(_with_window(scorer or "xkv", window))}
    if steps is not None:
        options["descent"] = Descent(steps=steps)
    return options | _named(policies)


def _mixing_options(
    scorer: str | None, window: int | None, policies: str | None, steps: int | None
) -> dict[str, Any]:
    from kvalloc.tuning.per_prompt import DEFAULT_SCORER
    from kvalloc.tuning.score_mixing import Weighing

    options: dict[str, Any] = {"scorer": _with_window(scorer or DEFAULT_SCORER, window)}
    if steps is not None:
        options["weighing"] = Weighing(steps=steps)
    return options | _named(policies)


def _combining(combine: str | None, *, by_prompt: bool) -> dict[str, Any]:
    if combine is not None and not by_prompt:
        raise InputError("--combine goes with --by-prompt: other profiles have one policy a head")
    return {} if combine is None else {"combine": combine}


def _with_window(scorer: str, window: int | None) -> str:
    return scorer if window is None else f"{scorer}:window={window}"


def _named(policies: str | None) -> dict[str, Any]:
    if policies is None:
        return {}
    return {"policies": [name.strip() for name in policies.split(",") if name.strip()]}


def _row(file: Path, tuned: Tuned) -> dict[str, Any]:
    profile = tuned.profile
    return {
        "output": str(file),
        "retained_bytes": profile.retained_bytes,
        "full_bytes": profile.full_bytes,
        "held_out_loss": float(tuned.held_out_losses.mean()),
        "uniform_loss": float(tuned.uniform_losses.mean()),
        "held_out_interval": profile.requested["predicted_interval"],
        "held_out_prompts": int(tuned.held_out_losses.size),
        "stages": [{"step": step, "held_out_loss": loss} for step, loss in tuned.stages],
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
