"""``kvalloc eval``: what reduced caches do to a model's answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalloc.cli import eval_options as options
from kvalloc.cli.eval_methods import cache_methods, check_adapts, read_target
from kvalloc.cli.options import Device, Dtype, Json, ModelName, Quiet
from kvalloc.cli.output import SLID_OUT, note, print_json, print_table, size
from kvalloc.cli.peers import peer_methods, read_peers
from kvalloc.cli.progress import load
from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.evaluate.methods import Method
    from kvalloc.evaluate.scoring import Score
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.models.loading import LoadedModel
    from kvalloc.prompts.cases import Case
    from kvalloc.prompts.tasks import Task

EXAMPLES = """\
  kvalloc eval demo --profile p.json --profile q.json --tasks needle,kl
  kvalloc eval demo --profile p.json --tasks pairs --samples 12 --context 2048 --json
  kvalloc eval ./my-model --profile p.json --prompts questions.jsonl
  kvalloc eval demo --profile p.json --adapt 0.25 --target-retention 0.9
  kvalloc eval demo --profile p.json --peer kvpress:SnapKV --peer 'kvpress:AdaKV(SnapKV)'
"""


DEFAULT_CONTEXT = 1024


def eval(
    model: ModelName,
    profile: options.Profile = None,
    peer: options.Peer = None,
    adapt: options.Adapt = None,
    target_retention: options.TargetRetention = None,
    tasks: options.Tasks = None,
    prompts: options.Prompts = None,
    metric: options.Metric = None,
    question: options.Question = "inside",
    turns: options.Turns = 1,
    split: options.Split = "development",
    samples: options.Samples = 6,
    context: options.Context = None,
    seed: options.Seed = 0,
    output: options.Output = None,
    into_profile: options.IntoProfile = False,
    allow_other_model: options.AllowOtherModel = False,
    dtype: Dtype = "float32",
    device: Device = None,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what budget profiles do to a model's answers, the full cache beside them.

    All caches get the same prompts, made by rule from texts that no shipped profile was measured
    on. KL is that of the next-token distribution to the full cache's, nats per token, with its
    95% bootstrap interval over the prompts.
    """
    from kvalloc.evaluate.pairing import rows as paired_rows
    from kvalloc.evaluate.result_file import evaluation_record
    from kvalloc.files import check_writable
    from kvalloc.models.loading import require_run_packages

    given = dict(locals())
    require_run_packages()
    if output is not None:
        check_writable(output)
    target = read_target(target_retention)
    profiles = _profiles(profile or [], others=bool(peer) or target is not None)
    check_adapts(profiles, adapt)
    files = _files(profile or []) if into_profile else {}
    peers = read_peers(peer or [], profiles.values())
    standing = _standing(question, split, turns)
    wanted = _wanted(tasks, prompts, metric, cut=context is not None)
    loaded = load(model, dtype=dtype, device=device, quiet=quiet)
    methods = cache_methods(
        loaded, profiles, adapt=adapt, target=target, allow_other_model=allow_other_model
    )
    methods |= peer_methods(peers, loaded.tokenizer)
    longest = context or DEFAULT_CONTEXT
    if context is not None or tasks is not None or prompts is None:
        _check_context(loaded, longest)
    cases = [
        (task, task.make(loaded.tokenizer, samples, longest, seed, **standing)) for task in wanted
    ]
    _check_lengths(loaded, cases)
    for name, budgets in profiles.items():
        note(f"{name}: {_describe(budgets)}", quiet=quiet or json)
    scores = _scores(loaded, methods, cases, longest, quiet=quiet)
    rows = paired_rows(scores)
    record = evaluation_record(
        model_id=loaded.model_id,
        settings=_settings(given, [task.name for task in wanted], longest),
        profiles=profiles,
        rows=rows,
        scores=scores,
        cases={task.name: some for task, some in cases},
    )
    _save(record, output, {file: profiles[name] for name, file in files.items()})
    _note_slid_out(rows[0], quiet=quiet)
    if json:
        print_json(rows)
    else:
        _print_rows(rows)


def _settings(given: Mapping[str, Any], tasks: list[str], context: int) -> dict[str, Any]:
    """What the evaluation's record tells of how it was asked for."""
    names = ("split", "question", "turns", "samples", "seed", "metric", "dtype")
    optional = ("adapt", "target_retention")
    return {
        "tasks": tasks,
        "context": context,
        **{name: given[name] for name in names},
        **{name: given[name] for name in optional if given[name] is not None},
    }


def _profiles(names: list[str], *, others: bool) -> dict[str, BudgetProfile]:
    from kvalloc.formats.shipped_profiles import load_profile

    if not names and not others:
        raise InputError("there is nothing to evaluate; give at least one --profile")
    profiles: dict[str, BudgetProfile] = {}
    for name in names:
        short = Path(name).stem
        if short in profiles:
            raise InputError(f"two profiles are called {short}; rename one of the files")
        profiles[short] = load_profile(name)
    return profiles


def _files(names: list[str]) -> dict[str, Path]:
    """Where to write evaluations into; refused for shipped profiles, before anything runs."""
    from kvalloc.files import check_writable

    for name in names:
        if not Path(name).is_file():
            raise InputError(
                f"--into-profile writes files, and {name} ships with kvalloc; give a copy of it"
            )
        check_writable(name)
    return {Path(name).stem: Path(name) for name in names}


def _standing(question: str, split: str, turns: int) -> dict[str, Any]:
    from kvalloc.prompts.splits import check_split

    if question not in ("inside", "after"):
        raise InputError(f"--question {question} is neither inside nor after; choose one of them")
    if split not in ("development", "held-out"):
        raise InputError(f"--split {split} is neither development nor held-out; choose one of them")
    return {"after": question == "after", "split": check_split(split), "turns": turns}


def _wanted(
    names: str | None, prompts: Path | None, metric: str | None, *, cut: bool
) -> list[Task]:
    from kvalloc.prompts.tasks import find_tasks
    from kvalloc.prompts.tasks.longbench import file_task, read_records

    if names is None:
        names = "" if prompts is not None else "needle,kl"
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen and prompts is None:
        raise InputError("--tasks names no task; give some such as needle,kl")
    wanted = find_tasks(chosen)
    if prompts is not None:
        wanted.append(file_task(prompts, read_records(prompts, metric=metric), cut=cut))
    elif metric is not None:
        raise InputError("--metric is for --prompts; every task has a metric of its own")
    return wanted


def _check_context(loaded: LoadedModel, context: int) -> None:
    limit = _limit(loaded)
    if limit is not None and context > limit:
        raise InputError(
            f"--context {context} is beyond the {limit} tokens of {loaded.model_id}; ask for less"
        )


def _check_lengths(loaded: LoadedModel, cases: list[tuple[Task, list[Case]]]) -> None:
    """Refuse a prompt that leaves no room for its answer, before anything runs."""
    limit = _limit(loaded)
    for task, some in cases:
        for case in some:
            if limit is not None and case.longest_tokens > limit:
                raise InputError(
                    f"{case.source or task.name}: a prompt of {case.n_tokens} tokens and its "
                    f"answer go beyond the {limit} tokens of {loaded.model_id}; "
                    "give a shorter prompt, or ask for a shorter --context"
                )


def _limit(loaded: LoadedModel) -> int | None:
    from kvalloc.models.loading import shape_of

    return shape_of(loaded.model, model_id=loaded.model_id).max_context_tokens


def _scores(
    loaded: LoadedModel,
    methods: dict[str, Method],
    cases: list[tuple[Task, list[Case]]],
    context: int,
    *,
    quiet: bool,
) -> list[Score]:
    from kvalloc.cli.progress import ProgressBar
    from kvalloc.evaluate.scoring import evaluate

    total = sum(len(some) for _, some in cases) * (1 + len(methods))
    with ProgressBar("evaluating", unit="prompts", quiet=quiet) as progress:
        finished = 0

        def done() -> None:
            nonlocal finished
            finished += 1
            progress(finished, total)

        return list(
            evaluate(loaded.model, loaded.tokenizer, cases, methods, context=context, done=done)
        )


def _save(record: dict[str, Any], output: Path | None, files: dict[Path, BudgetProfile]) -> None:
    """Write the whole record, and into each profile's file what is about it."""
    from kvalloc.evaluate.result_file import evaluation_of, save_evaluation

    if output is not None:
        save_evaluation(record, output)
    for file, profile in files.items():
        replace(profile, evaluation=evaluation_of(record, file.stem)).save(file)


def _note_slid_out(full: dict[str, Any], *, quiet: bool) -> None:
    """Say where the full cache's shares are not of what it stores."""
    if full["retained_bytes"] > full["full_bytes"]:
        note(
            f"{full['name']}: {size(full['full_bytes'])} are needed, which shares are of; "
            f"transformers stores {size(full['retained_bytes'])}, since {SLID_OUT}",
            quiet=quiet,
        )


def _describe(budgets: BudgetProfile) -> str:
    share = budgets.retained_bytes / budgets.full_bytes
    return f"{budgets.solver}, {budgets.level} level, {share:.1%} of the bytes"


def _print_rows(rows: list[dict[str, Any]]) -> None:
    headings = ("task", "cache", "bytes", "share", "KL", "95% of KL", "agree", "score", "ppl", "n")
    print_table(headings, [_cells(row) for row in rows])
    paired = [(row, one) for row in rows for one in row["paired"] if _tells(one)]
    if paired:
        against = ("against", "KL by KL", "95%", "KL - KL", "95%", "score", "95%")
        print_table(("task", "cache", *against), [_paired_cells(row, one) for row, one in paired])


def _tells(paired: dict[str, Any]) -> bool:
    """Whether a comparison says more than the rows: KL to the full cache is a comparison itself."""
    return paired["kl_ratio"] is not None or paired["score_difference"] is not None


def _cells(row: dict[str, Any]) -> list[str]:
    return [
        row["task"],
        row["name"],
        size(row["retained_bytes"]),
        f"{row['retained_bytes'] / row['full_bytes']:.1%}",
        _shown(row["kl"], ".4f"),
        _interval(row["ci95"], ".4f"),
        _shown(row["top1_agreement"], ".0%"),
        _shown(row["score"], ".0%"),
        _shown(row["perplexity"], ".2f"),
        str(row["n"]),
    ]


def _paired_cells(row: dict[str, Any], paired: dict[str, Any]) -> list[str]:
    to_full = paired["kl_ratio"] is None
    return [
        row["task"],
        row["name"],
        paired["against"],
        _shown(paired["kl_ratio"], ".3f"),
        _interval(paired["kl_ratio_ci95"], ".3f"),
        "-" if to_full else _shown(paired["kl_difference"], "+.4f"),
        "-" if to_full else _interval(paired["kl_difference_ci95"], "+.4f"),
        _shown(paired["score_difference"], "+.0%"),
        _interval(paired["score_difference_ci95"], "+.0%"),
    ]


def _shown(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _interval(ends: list[float] | None, form: str) -> str:
    return "-" if ends is None else "..".join(format(end, form) for end in ends)
