"""``kvalloc eval``: what reduced caches do to a model's answers."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvalloc.cli.models import Device, Dtype, ModelName
from kvalloc.cli.output import Json, Quiet, note, print_json, print_table, size
from kvalloc.cli.peers import peer_methods, read_peers
from kvalloc.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Callable

    from kvalloc.budget_profile import BudgetProfile
    from kvalloc.evaluate.methods import Method
    from kvalloc.evaluate.scoring import Score
    from kvalloc.models import LoadedModel

EXAMPLES = """\
  kvalloc eval demo --profile p.json --profile q.json --tasks needle,kl
  kvalloc eval demo --profile p.json --tasks pairs --samples 12 --context 2048 --json
  kvalloc eval ./my-model --profile p.json --prompts questions.jsonl
  kvalloc eval demo --profile p.json --peer kvpress:SnapKV --peer 'kvpress:AdaKV(SnapKV)'
"""


def eval(
    model: ModelName,
    profile: Annotated[
        list[str] | None,
        typer.Option(
            metavar="P.json",
            help="A budget profile, or the name of a shipped one; can be repeated.",
        ),
    ] = None,
    peer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="kvpress:NAME",
            help="A press of kvpress on the same prompts, at the profiles' share of entries or at "
            "one of its own: kvpress:TOVA, kvpress:AdaKV(SnapKV), kvpress:KVzip@20%; can be "
            "repeated. Needs an environment with kvpress: 'make peers'.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="needle, pairs, kl, perplexity; several with commas. needle,kl by default.",
        ),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE.jsonl",
            help="Your own prompts with their 'answer' or 'answers', as a task of its own.",
        ),
    ] = None,
    samples: Annotated[int, typer.Option(metavar="N", min=1, help="Prompts of each task.")] = 6,
    context: Annotated[
        int, typer.Option(metavar="N", min=1, help="Longest prompt, tokens.")
    ] = 1024,
    seed: Annotated[int, typer.Option(metavar="N", min=0, help="Of the prompts.")] = 0,
    allow_other_model: Annotated[
        bool,
        typer.Option("--allow-other-model", help="Accept profiles of a model of the same sizes."),
    ] = False,
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
    from kvalloc.cli.progress import ProgressBar, slow
    from kvalloc.evaluate.methods import CacheMethod
    from kvalloc.evaluate.tasks import TASKS
    from kvalloc.models import load_model, require_run_packages

    require_run_packages()
    profiles = _profiles(profile or [], peer or [])
    peers = read_peers(peer or [], profiles.values())
    wanted = _wanted(tasks, prompts)
    with slow(f"loading {model}", quiet=quiet):
        loaded = load_model(
            model, dtype=dtype, device=device, notify=lambda line: note(line, quiet=quiet)
        )
    methods: dict[str, Method] = {}
    for name, budgets in profiles.items():
        make = partial(budgets.cache, loaded.model, allow_other_model=allow_other_model)
        make()  # refuses the profile of another model before anything runs
        methods[name] = CacheMethod(make_cache=make)
    methods |= peer_methods(peers, loaded.tokenizer)
    if any(task.name in TASKS for task, _ in wanted):
        _check_context(loaded, context)
    cases = [(task, make(loaded.tokenizer, samples, context, seed)) for task, make in wanted]
    _check_lengths(loaded, cases)
    for name, budgets in profiles.items():
        note(f"{name}: {_describe(budgets)}", quiet=quiet or json)
    total = sum(len(some) for _, some in cases) * (1 + len(methods))
    with ProgressBar("evaluating", unit="prompts", quiet=quiet) as progress:
        finished = 0

        def done() -> None:
            nonlocal finished
            finished += 1
            progress(finished, total)

        rows = [score.row() for score in _scores(loaded, methods, cases, context, done)]
    if json:
        print_json(rows)
    else:
        _print_rows(rows)


def _profiles(names: list[str], peers: list[str]) -> dict[str, BudgetProfile]:
    from kvalloc.library import load_profile

    if not names and not peers:
        raise InputError("there is nothing to evaluate; give at least one --profile")
    profiles: dict[str, BudgetProfile] = {}
    for name in names:
        short = Path(name).stem
        if short in profiles:
            raise InputError(f"two profiles are called {short}; rename one of the files")
        profiles[short] = load_profile(name)
    return profiles


def _wanted(names: str | None, prompts: Path | None) -> list[tuple[Any, Callable[..., Any]]]:
    from kvalloc.evaluate.tasks import Task, check_answers, find_tasks, prompt_cases

    if names is None:
        names = "" if prompts is not None else "needle,kl"
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen and prompts is None:
        raise InputError("--tasks names no task; give some such as needle,kl")
    wanted: list[tuple[Any, Callable[..., Any]]] = [
        (task, task.make) for task in find_tasks(chosen)
    ]
    if prompts is not None:
        from kvalloc.measure import read_prompts

        own = read_prompts(prompts)
        check_answers(own)

        def make(tokenizer: Any, n_cases: int, n_tokens: int, seed: int) -> Any:
            return prompt_cases(tokenizer, own[:n_cases])

        task = Task(name=prompts.name, summary="your prompts", make=make)
        wanted.append((task, make))
    return wanted


def _check_context(loaded: LoadedModel, context: int) -> None:
    limit = _limit(loaded)
    if limit is not None and context > limit:
        raise InputError(
            f"--context {context} is beyond the {limit} tokens of {loaded.model_id}; ask for less"
        )


def _check_lengths(loaded: LoadedModel, cases: list[tuple[Any, Any]]) -> None:
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
    from kvalloc.models import shape_of

    return shape_of(loaded.model, model_id=loaded.model_id).max_context_tokens


def _scores(
    loaded: LoadedModel,
    methods: dict[str, Method],
    cases: list[tuple[Any, Any]],
    context: int,
    done: Callable[[], None],
) -> list[Score]:
    from kvalloc.evaluate.scoring import evaluate

    return list(
        evaluate(loaded.model, loaded.tokenizer, cases, methods, context=context, done=done)
    )


def _describe(budgets: BudgetProfile) -> str:
    share = budgets.retained_bytes / budgets.full_bytes
    return f"{budgets.solver}, {budgets.level} level, {share:.1%} of the bytes"


def _print_rows(rows: list[dict[str, Any]]) -> None:
    headings = ("task", "cache", "bytes", "share", "KL", "95% of KL", "agree", "right", "ppl", "n")
    print_table(headings, [_cells(row) for row in rows])


def _cells(row: dict[str, Any]) -> list[str]:
    def shown(value: float | None, form: str) -> str:
        return "-" if value is None else format(value, form)

    ci = row["ci95"]
    return [
        row["task"],
        row["name"],
        size(row["retained_bytes"]),
        f"{row['retained_bytes'] / row['full_bytes']:.1%}",
        shown(row["kl"], ".4f"),
        "-" if ci is None else f"{ci[0]:.4f}..{ci[1]:.4f}",
        shown(row["top1_agreement"], ".0%"),
        shown(row["exact_match"], ".0%"),
        shown(row["perplexity"], ".2f"),
        str(row["n"]),
    ]
