"""``kvalloc eval``: what reduced caches do to a model's answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from kvalloc.cli.options import EngineOptions, FittedOptions, ModelArgument, takes
from kvalloc.cli.output import note, print_result, print_table
from kvalloc.cli.progress import ProgressBar, running
from kvalloc.errors import InputError, several
from kvalloc.online.conflicts import check_conflicts, given_names
from kvalloc.prompts.cases import LONG_ANSWER_TOKENS
from kvalloc.report.wording import evaluation_tables
from kvalloc.units import Option, parse_numbers, share_text, size

if TYPE_CHECKING:
    from kvalloc.evaluate.methods import Method
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.interop.kvpress import PeerName
    from kvalloc.prompts.cases import Case
    from kvalloc.prompts.tasks import Task
    from kvalloc.shape import ModelShape

CACHES, PROMPTS, RESULTS = "What is compared", "On which prompts", "Results"


@dataclass(frozen=True, kw_only=True)
class EvalOptions(FittedOptions, EngineOptions, ModelArgument):
    """What ``kvalloc eval`` compares, and on which prompts."""

    profile: Annotated[Sequence[str], Option("P.json", CACHES)] = ()
    """A budget profile, or a shipped one's name."""

    budget: Annotated[str | None, Option("SHARE", CACHES)] = None
    """Also what 'kvalloc generate' does with this share of the bytes of a cache at 16 bits."""

    memory: Annotated[str | None, Option("SIZE", CACHES)] = None
    """Also what it does within these bytes at its peak, alone or beside `budget`."""

    scorer: Annotated[str | None, Option("NAME", CACHES)] = None
    """With `budget`: keep the entries that score best by this scorer, and decide the budgets from
    each prompt's scores."""

    solver: Annotated[str | None, Option("NAME", CACHES)] = None
    """With `budget`: the solver; auto by default, uniform for equal budgets in all layers."""

    level: Annotated[Literal["layer", "head"] | None, Option("", CACHES)] = None
    """With `budget`: whether layers or heads get budgets; layer by default."""

    plain_bits: Annotated[str | None, Option("8,4", CACHES)] = None
    """Also everything kept at fewer bits: 8, 5, 4, 3 or several with commas."""

    peer: Annotated[Sequence[str], Option("kvpress:NAME", CACHES)] = ()
    """A press of kvpress on the same prompts, at the profiles' share of entries or at a named one:
    kvpress:TOVA, kvpress:AdaKV(SnapKV), kvpress:KVzip@20%, also rounded as kvalloc stores entries:
    kvpress:KVzip@71%@4bits. Needs an environment with kvpress: 'make peers'."""

    tasks: Annotated[str | None, Option("NAMES", PROMPTS)] = None
    """Several with commas: needle, needle-keys, facts, pairs, qa, own, code, kl; needle,kl by
    default."""

    prompts: Annotated[Path | None, Option("FILE.jsonl", PROMPTS)] = None
    """A file of prompts, as one more task: LongBench's fields, or 'prompt' with 'answer' or
    'answers'."""

    metric: Annotated[str | None, Option("NAME", PROMPTS)] = None
    """Metric of `prompts`; the dataset's by default: contains, all, exact, f1, rouge-l,
    classification, edit, retrieval, count."""

    question_at: Annotated[Literal["inside", "after", "second-turn"], Option("", PROMPTS)] = (
        "inside"
    )
    """Whether the question is part of the prompt that is reduced, comes after it, or only when
    another one has been answered."""

    turns: Annotated[int, Option("N", PROMPTS, least=1)] = 1
    """Questions about each prompt."""

    answer_tokens: Annotated[int, Option("N", PROMPTS, least=1)] = LONG_ANSWER_TOKENS
    """Longest answer in the model's own words, and tokens of running text that follow a prompt."""

    split: Annotated[Literal["development", "held-out"], Option("", PROMPTS)] = "development"
    """Which texts and words; held-out ones are for final results only."""

    samples: Annotated[int, Option("N", PROMPTS, least=1)] = 6
    """Prompts of each task."""

    context: Annotated[int | None, Option("N", PROMPTS, least=1)] = None
    """Longest prompt, tokens; 1024 by default, and `prompts` as long as they are."""

    seed: Annotated[int, Option("N", PROMPTS, least=0)] = 0
    """Seed of the prompts."""

    output: Annotated[Path | None, Option("OUT.json", RESULTS)] = None
    """Also write rows and every answer to a file."""


DEFAULT_CONTEXT = 1024
BUDGET_BY = ("scorer", "solver", "level")
"""How a budget is decided; by `kvalloc.online.default` without any of them."""
SETTINGS = (
    *("dtype", "question_at", "turns", "split", "answer_tokens", "samples", "seed", "metric"),
    *("budget", "memory", *BUDGET_BY, "plain_bits"),
)
"""Options that the evaluation's record holds, where they were given."""


@takes()
def eval(options: EvalOptions) -> None:
    """Measure what reduced caches do to a model's answers.

    The full cache stands beside them. All get the same prompts, made by rule from texts that no
    shipped profile was measured on. KL is that of the next-token distribution to the full cache's,
    nats per token, with its 95% bootstrap interval over the prompts, over the answer's tokens that
    were predicted after the eviction: those before it are the full cache's own, and are counted as
    exact.

    Examples
    --------
    kvalloc eval demo --profile p.json --profile q.json --tasks needle,kl
    kvalloc eval demo --profile p.json --tasks pairs --samples 12 --context 2048 --json
    kvalloc eval ./my-model --profile p.json --prompts questions.jsonl
    kvalloc eval demo --profile p.json --peer kvpress:SnapKV --peer 'kvpress:AdaKV(SnapKV)'
    kvalloc eval demo --budget 20% --scorer snapkv --solver uniform
    kvalloc eval demo --memory 4MiB --tasks kl --json
    kvalloc eval demo --budget 20% --engine ray --workers 2 --threads 1
    kvalloc eval demo --budget 20% --plain-bits 8,4 --tasks kl,own,facts --question-at after
    """
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    from kvalloc.engine.contract import engine_of
    from kvalloc.evaluate.result_file import evaluation_of
    from kvalloc.evaluate.scoring import CaseWork, evaluate
    from kvalloc.files import check_writable
    from kvalloc.interop.kvpress import read_peers

    if options.output is not None:
        check_writable(options.output, stream=True)
    profiles = _profiles(options)
    peers = read_peers(options.peer, profiles.values())
    tasks = _tasks(options)
    context = options.context or DEFAULT_CONTEXT
    with running(options.model, options) as loaded:
        engine = engine_of(loaded.model)
        shape = engine.facts(loaded.model_id).shape
        make = partial(_methods, profiles, options, peers, loaded.tokenizer)
        work = CaseWork(loaded.tokenizer, make)
        work.names(engine)  # what cannot be made is refused before anything runs
        cases = _cases(loaded.tokenizer, shape, tasks, options)
        with ProgressBar("evaluating", unit="answers") as progress:
            scores = evaluate(
                engine, loaded.tokenizer, cases, work, context=context, progress=progress
            )
    for name, budgets in profiles.items():
        share = share_text(budgets.retained_bytes, budgets.full_bytes, budgets.target_text)
        note(f"{name}: {budgets.solver}, {budgets.level} level, {share}", beside_json=False)
    settings = {"tasks": [task.name for task in tasks], "context": context, "dtype": "float32"}
    typed = {name: getattr(options, name) for name in SETTINGS}
    settings |= {name: value for name, value in typed.items() if value is not None}
    result = evaluation_of(
        shape,
        scores,
        settings=settings,
        profiles=profiles,
        cases={task.name: some for task, some in cases},
    )
    if options.output is not None:
        result.save(options.output)
    _note_slid_out(result.rows[0])
    print_result(result.rows, lambda: print_evaluation(result.rows), always=True)


def _profiles(options: EvalOptions) -> dict[str, BudgetProfile]:
    """Load what is compared, by short names; refuse what no prompt could be read with."""
    from kvalloc.formats.shipped_profiles import load_profile
    from kvalloc.online.application import cache_maker
    from kvalloc.runtime.options import CacheOptions

    widths = parse_numbers(() if options.plain_bits is None else options.plain_bits, "plain_bits")
    if applied := _applied(options):
        check_conflicts(applied)
        cache_maker(None, CacheOptions(), **applied)
    if not (applied or options.profile or options.peer or widths):
        raise InputError(
            "there is nothing to evaluate; give --budget 20%, --memory 2MiB or a --profile"
        )
    profiles: dict[str, BudgetProfile] = {}
    for name in options.profile:
        short = Path(name).stem
        if short in profiles:
            raise InputError(f"two profiles are called {short}; rename one of the files")
        profiles[short] = load_profile(name)
    return profiles


def _applied(options: EvalOptions) -> dict[str, Any]:
    """Return the options of the `kvalloc.apply` that is compared; none where none is."""
    applied = {name: getattr(options, name) for name in ("budget", "memory", "fitted", *BUDGET_BY)}
    return {name: value for name, value in applied.items() if value is not None}


def _tasks(options: EvalOptions) -> list[Task]:
    from kvalloc.prompts.tasks import find_tasks
    from kvalloc.prompts.tasks.longbench import file_task, read_records

    prompts = options.prompts
    check_conflicts({"prompts", "metric"} & given_names(vars(options)))
    names = ("needle,kl" if prompts is None else "") if options.tasks is None else options.tasks
    chosen = [name.strip() for name in names.split(",") if name.strip()]
    if not chosen and prompts is None:
        raise InputError("--tasks names no task; give some such as needle,kl")
    tasks = find_tasks(chosen)
    if prompts is not None:
        records = read_records(prompts, metric=options.metric)
        tasks.append(file_task(prompts, records, cut=options.context is not None))
    return tasks


def _methods(
    profiles: Mapping[str, BudgetProfile],
    options: EvalOptions,
    peers: Sequence[PeerName],
    tokenizer: Any,
    model: Any,
) -> dict[str, Method]:
    """Return stored budgets, what `kvalloc.apply` does, and peers, by the names of their rows.

    Raises
    ------
    KVAllocError
        If a profile is of another model, before anything runs.
    """
    from kvalloc.evaluate.methods import AppliedMethod, CacheMethod, rounded_cache
    from kvalloc.extensions.making import make_cache
    from kvalloc.interop.kvpress import peer_methods
    from kvalloc.online.application import apply

    methods: dict[str, Method] = {}
    for name, budgets in profiles.items():
        make = partial(make_cache, model, budgets, allow_other_model=options.allow_other_model)
        make()  # what cannot work is refused before anything runs
        methods[name] = CacheMethod(make_cache=make)
    if applied := _applied(options):
        with apply(model, **applied):
            methods[several(**applied)] = AppliedMethod(options=applied)
    for bits in parse_numbers(options.plain_bits or ()):
        methods[f"{bits} bits"] = rounded_cache(model, bits)
    return methods | peer_methods(peers, tokenizer)


def _cases(
    tokenizer: Any, shape: ModelShape, tasks: Sequence[Task], options: EvalOptions
) -> list[tuple[Task, list[Case]]]:
    """Make the prompts; refuse one that leaves no room for its answer, before anything runs."""
    context = options.context or DEFAULT_CONTEXT
    limit = shape.max_context_tokens or float("inf")
    standing: dict[str, Any] = {
        name: getattr(options, name) for name in ("split", "turns", "answer_tokens")
    }
    standing["after"] = options.question_at == "after"
    standing["opened"] = options.question_at == "second-turn"
    cases = [
        (task, task.make(tokenizer, options.samples, context, options.seed, **standing))
        for task in tasks
    ]
    for task, some in cases:
        for case in some:
            if case.longest_tokens > limit:
                raise InputError(
                    f"{case.source or task.name}: a prompt of {case.n_tokens} tokens and its "
                    f"answer go beyond the {limit} tokens of {shape.model_id}; "
                    "give a shorter prompt, or ask for a shorter --context"
                )
    return cases


def _note_slid_out(full: Mapping[str, Any]) -> None:
    """Say if the full cache stores more than it needs."""
    if full["retained_bytes"] > full["full_bytes"]:
        note(
            f"{full['name']}: {size(full['full_bytes'])} are needed; transformers stores "
            f"{size(full['retained_bytes'])}, since layers with a sliding window keep the whole "
            "prompt until the next token; shares are of full attention at 16 bits",
        )


def print_evaluation(rows: Sequence[Mapping[str, Any]]) -> None:
    """Print rows of an evaluation, then methods against each other; a dash is unknown."""
    for headings, cells in evaluation_tables(rows):
        print_table(headings, cells, keys=2)
