"""``kvalloc solve``."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Unpack

from kvalloc.allocation import decision
from kvalloc.allocation.engine_choice import choose
from kvalloc.allocation.formulation import PosedRequest
from kvalloc.allocation.pool import solve_pool
from kvalloc.allocation.request import Request, RequestOptions
from kvalloc.cli.options import LoadOptions, SolverOptions, takes
from kvalloc.cli.output import ProgressBar, note, print_result, wants_json
from kvalloc.errors import InputError, option
from kvalloc.files import check_writable, make_folder
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.format_losses import FormatLosses
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import load_file, load_scores
from kvalloc.online.conflicts import check_conflicts, given_names
from kvalloc.problem.registry import get_solver
from kvalloc.prompts.texts import read_prompts
from kvalloc.report import wording
from kvalloc.report.engines import KL_NOTE, choice_facts, choice_fields, frontier_lines
from kvalloc.report.terminal import table_text
from kvalloc.units import Option, duration, gap_text, parse_tokens

MEASURING = "Measuring"


@dataclass(frozen=True, kw_only=True)
class MeasureOptions(LoadOptions):
    """Measurement of ``kvalloc solve``; see `kvalloc.solve_measured`."""

    measure: Annotated[str | None, Option("MODEL", MEASURING)] = None
    """Measure the loss of the whole reduced cache on this model; with `target_loss`, decide again
    until the measured loss is within it."""

    measure_prompts: Annotated[Sequence[str] | None, Option("FILE.jsonl", MEASURING)] = None
    """Prompts to measure on. By default four of each kind that 'kvalloc profile --loss' makes."""

    resume: Annotated[bool, Option("", MEASURING)] = False
    """With `measure`: continue from the measurements of a killed command."""


@dataclass(frozen=True)
class SolveOptions:
    """Score profiles, and the file to write."""

    scores: Annotated[list[str], Option()]
    """Score profiles that 'kvalloc profile' wrote, or shipped ones' names."""

    _: KW_ONLY

    fairness: Annotated[Literal["sum", "worst"], Option()] = "sum"
    """For several that share a memory, whether their sum counts, or the worst."""

    engine: Annotated[str | None, Option("NAME")] = None
    """Decide for llama.cpp or another engine, from a file of 'kvalloc profile --formats'."""

    output: Annotated[Path | None, Option("OUT.json")] = None
    """File, or folder for several; not needed with --json."""


@takes()
def solve(
    options: SolveOptions,
    measuring: MeasureOptions,
    solving: SolverOptions,
    **request_options: Unpack[RequestOptions],
) -> None:
    """Decide how many entries each layer and KV head keeps.

    A bound shows how much better the decision could be at most. Exactly one target:
    --target-retention, --target-loss, --budget, --budget-tokens or --memory. Several score profiles
    share one --memory; a target beside it is a floor for each.

    Examples
    --------
    kvalloc solve s.safetensors --target-retention 0.9 -o p.json
    kvalloc solve s.safetensors --memory 64MiB --context 8192 --batch 4 -o p.json
    kvalloc solve a.safetensors b.safetensors --memory 2GiB --fairness worst -o folder
    kvalloc solve s.safetensors --target-loss 0.02 --level head --measure demo -o p.json
    kvalloc solve m.formats.safetensors --engine llama.cpp --memory 3GiB --context 32k
    """
    names = given_names({**vars(measuring), "engine": options.engine})
    names |= {"average"} if solving.average != "curves" else set()
    names |= {"fairness"} if options.fairness != "sum" else set()
    check_conflicts(names | ({"scores"} if options.scores[1:] else set()))
    if options.engine is not None:
        return _solve_engine(options, options.engine, solving, request_options)
    if options.scores[1:]:
        return _solve_pool(options, solving, request_options)
    scores, output = options.scores[0], options.output
    request = Request.parse(**request_options)  # before anything is read
    if (names := given_names(vars(measuring))) and measuring.measure is None:
        raise InputError(f"{option(min(names))} goes with --measure MODEL; name the model")
    _check_named(output, "the budget profile goes with -o OUT.json")
    if output is not None:
        if output.exists() and Path(scores).exists() and output.samefile(scores):
            raise InputError(f"-o {output} would overwrite the score profile; name another file")
        check_writable(output, stream=True)
    how = {**vars(solving), "solver": get_solver(solving.solver), "notify": note}
    profile = load_scores(scores)
    start = time.perf_counter()
    if measuring.measure is not None:
        decided = _measured(profile, request, measuring, output, how)
    else:
        with ProgressBar(f"solving with {solving.solver}"):
            decided = decision.solve(profile, request=request, **how)
        if output is not None:
            decided.save(output)
    seconds = time.perf_counter() - start
    interval = None  # of a predicted loss: how sure it is on such text
    if decided.predicted_loss is not None:
        posed = PosedRequest(scores=profile, request=Request.read(decided))
        interval = posed.predicted_loss_interval(decided)
    facts = {**decision_facts(decided, seconds), "predicted_loss_interval": interval}
    summary = {**_summary(decided, seconds, interval), "written": str(output or "")}
    print_result({**facts, "output": output}, summary, lines=wording.cap_lines(decided))


def _solve_engine(
    options: SolveOptions,
    engine: str,
    solving: SolverOptions,
    request: Mapping[str, Any],
) -> None:
    output = options.output
    if output is not None:
        check_writable(output, stream=True)
    losses = load_file(options.scores[0], [FormatLosses])
    how: dict[str, Any] = {**request, "solver": solving.solver, "time_limit": solving.time_limit}
    if "context" in how:
        how["context"] = parse_tokens(how["context"])
    with ProgressBar(f"solving with {solving.solver}"):
        choice = choose(losses, engine, **how)
    if output is not None:
        choice.save(output)
    fields = {**choice_fields(choice), "written": str(output or "")}
    facts = {**choice_facts(choice), "output": output}
    print_result(facts, fields, lines=frontier_lines(choice), notes=[KL_NOTE])


def _solve_pool(options: SolveOptions, solving: SolverOptions, request: RequestOptions) -> None:
    scores, output = options.scores, options.output
    if (memory := request.pop("memory", None)) is None:
        raise InputError(f"several score profiles share a memory; give {option('memory', '2GiB')}")
    files = [f"{Path(one).stem}.json" for one in scores]
    if twice := next((name for name in files if files.count(name) > 1), None):
        raise InputError(f"two of the score profiles would write {twice}; rename one of the files")
    _check_named(output, "the budget profiles go with -o FOLDER")
    start = time.perf_counter()
    with ProgressBar(f"solving with {solving.solver}"):
        pool = solve_pool(
            [(one, request, 1.0) for one in scores],
            memory=memory,
            solver=solving.solver,
            time_limit=solving.time_limit,
            fairness=options.fairness,
        )
    if output is not None:
        make_folder(output)
        for name, profile in zip(files, pool, strict=True):
            profile.save(output / name)
    seconds = time.perf_counter() - start
    facts = [decision_facts(profile, seconds) for profile in pool]
    columns = [wording.decision_cells(profile, seconds) for profile in pool]
    rows = [[name, *column.values()] for name, column in zip(files, columns, strict=True)]
    source = "" if pool.bound_source == "dual" else f" ({pool.bound_source}'s word)"
    lines = [
        table_text(["profile", *columns[0]], rows),
        f"{pool.fairness} {pool.objective:.6g}, gap {gap_text(pool.gap)}: no split of the memory "
        f"reaches more than {pool.bound:.6g}{source}",
    ]
    pooled = facts[0]["requested"]["pool"]
    print_result({"profiles": facts, **pooled, "output": output}, lines=lines)


def _check_named(output: Path | None, where: str) -> None:
    if output is None and not wants_json():
        raise InputError(f"say where {where}, or print the result with --json")


def _measured(
    scores: ScoreProfile,
    request: Request,
    options: MeasureOptions,
    output: Path | None,
    how: Mapping[str, Any],
) -> BudgetProfile:
    """Decide and measure; until the end, ``OUT.json.partial`` has measurements."""
    from kvalloc.measure.checkpoint import check_output
    from kvalloc.online.solving import solve_measured

    # refuses before the model is loaded
    files = options.measure_prompts or ()
    prompts = [prompt for file in files for prompt in read_prompts(file)] or None
    if output is not None:
        check_output(output, resume=options.resume)
    loaded = options.load(options.measure or "")
    with ProgressBar("measuring", unit="prompts") as progress:
        return solve_measured(
            scores,
            loaded.model,
            loaded.tokenizer,
            prompts,
            output=output,
            resume=options.resume,
            progress=progress,
            model_id=loaded.model_id,
            how={**how, "request": request},
        )


def decision_facts(decided: BudgetProfile, seconds: float) -> dict[str, Any]:
    """Return a decision, with its seconds, as plain values."""
    return {
        **decided.record(),
        "predicted_loss_note": None if decided.predicted_loss is None else wording.LOSS_NOTE,
        "requested_bytes": wording.requested_bytes(decided),
        "seconds": seconds,
    }


def _summary(
    decided: BudgetProfile, seconds: float, interval: tuple[float, float] | None
) -> dict[str, str]:
    heads = sum(one.kv_heads for one in decided.shape.by_layer)
    fields = wording.decision_fields(decided)
    fields["solver"] += f", {duration(seconds)}"
    fields["tokens"] = (
        f"{decided.retained_tokens / heads:,.1f} of {decided.full_tokens / heads:,.1f} per KV head "
        f"on average ({decided.retained_tokens:,} entries)"
    )
    fields["note"] = "" if decided.retention is None else wording.RETENTION_NOTE
    if interval is not None:
        low, high = interval
        fields["predicted loss"] += f" (95% interval over samples {low:.4g} to {high:.4g})"
    fields["loss note"] = "" if decided.predicted_loss is None else wording.LOSS_NOTE
    return fields
