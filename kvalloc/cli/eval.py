"""``kvalloc eval``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from kvalloc.cli.options import EngineOptions, FittedOptions, ModelArgument, takes, typed_options
from kvalloc.cli.output import ProgressBar, note, print_result
from kvalloc.errors import InputError, several
from kvalloc.files import check_writable
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.shipped_profiles import load_profile
from kvalloc.online.conflicts import check_conflicts, given_names
from kvalloc.prompts.cases import LONG_ANSWER_TOKENS, Case
from kvalloc.prompts.tasks import Task, find_tasks
from kvalloc.prompts.tasks.longbench import file_task, read_records
from kvalloc.report.terminal import table_text
from kvalloc.report.wording import evaluation_tables, score_notes
from kvalloc.shape import ModelShape
from kvalloc.units import Option, parse_numbers, parse_share, share_text, size

if TYPE_CHECKING:
    from kvalloc.evaluate.methods import Method
    from kvalloc.interop.kvpress import PeerName

CACHES, PROMPTS, RESULTS = "What is compared", "On which prompts", "Results"


@dataclass(frozen=True, kw_only=True)
class EvalOptions(FittedOptions, EngineOptions, ModelArgument):
    """Caches to compare, and prompts."""

    profile: Annotated[Sequence[str], Option("P.json", CACHES)] = ()
    """A budget profile, or a shipped one's name."""

    budget: Annotated[str | None, Option("SHARE", CACHES)] = None
    """Also what 'kvalloc generate' does with this share of the bytes of a cache at 16 bits; several
    with commas, and where answers can be right, a note says down to which they stay so."""

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
    """Also everything kept at fewer bits: 8, 5, 4, 3, 2 or several with commas."""

    peer: Annotated[Sequence[str], Option("kvpress:NAME", CACHES)] = ()
    """A press of kvpress on the same prompts, at the profiles' share of entries or at a named one:
    kvpress:TOVA, kvpress:AdaKV(SnapKV), kvpress:KVzip@20%, also rounded as kvalloc stores entries:
    kvpress:KVzip@71%@4bits. Needs an environment with kvpress: 'make peers'."""

    tasks: Annotated[str | None, Option("NAMES", PROMPTS)] = None
    """Several with commas: needle, needle-keys, facts, pairs, qa, own, code, kl, niah_single,
    niah_multikey, niah_multivalue, niah_multiquery, vt, cwe, fwe, kv_retrieval, dfs, tools;
    needle,kl by default."""

    prompts: Annotated[Path | None, Option("FILE.jsonl", PROMPTS)] = None
    """A file of prompts, as one more task: LongBench's fields, or 'prompt' with 'answer' or
    'answers'."""

    metric: Annotated[str | None, Option("NAME", PROMPTS)] = None
    """Metric of `prompts`; the dataset's by default: contains, all, exact, f1, rouge-l,
    classification, edit, retrieval, count, call."""

    question_at: Annotated[Literal["inside", "after", "second-turn"], Option("", PROMPTS)] = (
        "inside"
    )
    """Whether the question is part of the prompt that is reduced, comes after it, or only when
    another one has been answered."""

    turns: Annotated[int, Option("N", PROMPTS, minimum=1)] = 1
    """Questions about each prompt."""

    answer_tokens: Annotated[int, Option("N", PROMPTS, minimum=1)] = LONG_ANSWER_TOKENS
    """Longest answer in the model's own words, and tokens of running text that follow a prompt."""

    split: Annotated[Literal["development", "held-out"], Option("", PROMPTS)] = "development"
    """Which texts and words; held-out ones are for final results only."""

    samples: Annotated[int, Option("N", PROMPTS, minimum=1)] = 6
    """Prompts of each task."""

    context: Annotated[int | None, Option("N", PROMPTS, minimum=1)] = None
    """Longest prompt, tokens; 1024 by default, and `prompts` as long as they are."""

    seed: Annotated[int, Option("N", PROMPTS, minimum=0)] = 0
    """Seed of the prompts."""

    output: Annotated[Path | None, Option("OUT.json", RESULTS)] = None
    """Also write rows and every answer to a file."""


DEFAULT_CONTEXT = 1024
APPLIED = ("budget", "memory", "fitted", "scorer", "solver", "level")
"""Options of the `kvalloc.apply` that is compared."""
SETTINGS = (
    *("dtype", "question_at", "turns", "split", "answer_tokens", "samples", "seed", "metric"),
    *("budget", "memory", "scorer", "solver", "level", "plain_bits"),
)
"""Options that the evaluation's record holds, where they were given."""


@takes()
def eval(options: EvalOptions) -> None:
    """Measure what reduced caches do to a model's answers.

    All caches, the full one too, get the same prompts, made by rule from texts that no shipped
    profile was measured on. KL compares the next-token distribution to the full cache's, in nats
    per token, with a 95% bootstrap interval over the prompts. Tokens of an answer that were
    predicted before the eviction are left out and counted as exact.

    Examples
    --------
    kvalloc eval demo --profile p.json --profile q.json --tasks needle,kl
    kvalloc eval demo --profile p.json --tasks pairs --samples 12 --context 2048 --json
    kvalloc eval ./my-model --profile p.json --prompts questions.jsonl
    kvalloc eval demo --profile p.json --peer kvpress:SnapKV --peer 'kvpress:AdaKV(SnapKV)'
    kvalloc eval demo --budget 20% --scorer snapkv --solver uniform
    kvalloc eval demo --budget 20% --engine ray --workers 2 --threads 1
    kvalloc eval demo --budget 20% --plain-bits 8,4 --tasks kl,own,facts --question-at after
    kvalloc eval demo --budget 50%,20%,10% --tasks facts --question-at after
    """
    from kvalloc.engine.contract import engine_of
    from kvalloc.evaluate.result_file import evaluation_of
    from kvalloc.evaluate.scoring import CaseWork, evaluate
    from kvalloc.interop.kvpress import read_peers

    if options.output is not None:
        check_writable(options.output, stream=True)
    profiles = _profiles(options)
    peers = read_peers(options.peer, profiles.values())
    tasks = _tasks(options)
    context = options.context or DEFAULT_CONTEXT
    with options.running(options.model) as loaded:
        engine, tokenizer = engine_of(loaded.model), loaded.tokenizer
        shape = engine.facts(loaded.model_id).shape
        work = CaseWork(tokenizer, partial(_methods, profiles, options, peers, tokenizer))
        work.names(engine)  # refuses before anything runs
        cases = _cases(tokenizer, shape, tasks, options)
        with ProgressBar("evaluating", unit="answers") as progress:
            scores = evaluate(engine, tokenizer, cases, work, context=context, progress=progress)
    settings = {"tasks": [task.name for task in tasks], "context": context, "dtype": "float32"}
    settings |= typed_options(options, SETTINGS)
    by_task = {task.name: prompts for task, prompts in cases}
    result = evaluation_of(shape, scores, settings=settings, profiles=profiles, cases=by_task)
    if options.output is not None:
        result.save(options.output)
    full = result.rows[0]
    if full["retained_bytes"] > full["full_bytes"]:
        note(
            f"{full['name']}: {size(full['full_bytes'])} are needed; transformers stores "
            f"{size(full['retained_bytes'])}, since layers with a sliding window keep the whole "
            "prompt until the next token; shares are of full attention at 16 bits"
        )
    notes: list[str] = []
    for name, budgets in profiles.items():
        share = share_text(budgets.retained_bytes, budgets.full_bytes, budgets.target_text)
        notes.append(f"{name}: {budgets.solver}, {budgets.level} level, {share}")
    notes += score_notes(result.rows)
    lines = [table_text(*table, keys=2) for table in evaluation_tables(result.rows)]
    print_result(result.rows, lines=lines, notes=notes, always=True)


def _profiles(options: EvalOptions) -> dict[str, BudgetProfile]:
    from kvalloc.online.application import decision_of
    from kvalloc.runtime.options import CacheOptions

    widths = parse_numbers(options.plain_bits or (), "plain_bits")
    for how in (applied := _applied(options)):
        check_conflicts(how)
        decision_of(None, CacheOptions(), **how)
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


def _applied(options: EvalOptions) -> list[dict[str, Any]]:
    """Return the options of each `kvalloc.apply` that is compared, one a share."""
    options_of_all = typed_options(options, APPLIED)
    if options.budget is None:
        return [options_of_all] if options_of_all else []
    shares = [one.strip() for one in options.budget.split(",") if one.strip()]
    different = {parse_share(one): one for one in reversed(shares)}
    return [{**options_of_all, "budget": one} for one in [*different.values()][::-1]]


def _tasks(options: EvalOptions) -> list[Task]:
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
    from kvalloc.evaluate.methods import AppliedMethod, CacheMethod, rounded_cache
    from kvalloc.extensions.making import make_cache
    from kvalloc.interop.kvpress import peer_methods
    from kvalloc.online.application import apply

    methods: dict[str, Method] = {}
    for name, budgets in profiles.items():
        make = partial(make_cache, model, budgets, allow_other_model=options.allow_other_model)
        make()  # refuses a profile of another model before anything runs
        methods[name] = CacheMethod(make_cache=make)
    for applied in _applied(options):
        how = dict(applied)
        if options.fitted is not None:  # without a file it is about profiles alone
            how["allow_other_model"] = options.allow_other_model
        with apply(model, **how):
            methods[several(**applied)] = AppliedMethod(options=how)
    for bits in parse_numbers(options.plain_bits or ()):
        methods[f"{bits} bits"] = rounded_cache(model, bits)
    return methods | peer_methods(peers, tokenizer)


def _cases(
    tokenizer: Any, shape: ModelShape, tasks: Sequence[Task], options: EvalOptions
) -> list[tuple[Task, list[Case]]]:
    context = options.context or DEFAULT_CONTEXT
    limit = shape.max_context_tokens or float("inf")
    how = {
        **typed_options(options, ("split", "turns", "answer_tokens")),
        "after": options.question_at == "after",
        "opened": options.question_at == "second-turn",
    }
    cases = [
        (task, task.make(tokenizer, options.samples, context, options.seed, **how))
        for task in tasks
    ]
    for task, prompts in cases:
        for case in prompts:
            if case.longest_tokens > limit:
                raise InputError(
                    f"{case.source or task.name}: a prompt of {case.n_tokens} tokens and its "
                    f"answer go beyond the {limit} tokens of {shape.model_id}; "
                    "give a shorter prompt, or ask for a shorter --context"
                )
    return cases
