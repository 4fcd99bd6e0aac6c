"""``kvalloc demo``: profile, solve and apply on a real model, as measured."""

from __future__ import annotations

import os
import textwrap
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvalloc.cli.options import Json, Quiet
from kvalloc.cli.output import duration, note, print_json, size, terminal_width
from kvalloc.cli.picture import can_print_bars
from kvalloc.errors import InputError, SolverError

if TYPE_CHECKING:
    from kvalloc.evaluate.showcase import Asked, Decision, Experiment, Ladder
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.formats.score_profile import ScoreProfile
    from kvalloc.models.loading import LoadedModel

EXAMPLES = """\
  kvalloc demo
  kvalloc demo --quick
  kvalloc demo --questions 5 --seed 7 --output-dir seven
"""

TARGET_RETENTION = 0.9
_COLUMNS = 4
_HARM_SHARE = 0.5
"""Share of the time that asking the retention-based solvers leaves for all that follows."""
SCORES, LOSSES = "scores.safetensors", "losses.safetensors"
RESULTS, PICTURE = "results.json", "demo.png"


@dataclass(frozen=True, kw_only=True)
class _Plan:
    """How much is measured."""

    samples: int
    context_tokens: int
    n_questions: int
    shares: tuple[float, ...]
    loss_prompts: int
    loss_context_tokens: int


_FULL = _Plan(
    samples=4,
    context_tokens=1500,
    n_questions=3,
    shares=(0.125, 0.2, 0.3, 0.4, 0.6, 0.8),
    loss_prompts=4,
    loss_context_tokens=1024,
)
_QUICK = _Plan(
    samples=1,
    context_tokens=400,
    n_questions=1,
    shares=(0.3, 0.8),
    loss_prompts=2,
    loss_context_tokens=300,
)


def demo(
    output_dir: Annotated[
        Path, typer.Option(help="Folder for profiles, picture and results; made if missing.")
    ] = Path("demo-output"),
    questions: Annotated[
        int | None, typer.Option(min=1, help="Needle questions; 3 by default, 1 with --quick.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Draws the questions; none is picked by hand.")] = 0,
    time_limit: Annotated[
        float,
        typer.Option(help="Seconds for everything; what does not fit is skipped, and said."),
    ] = 320.0,
    quick: Annotated[
        bool, typer.Option("--quick", help="One short sample and question, to try it out.")
    ] = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Profile a real model, solve with every solver, and ask through the smaller caches.

    The model is SmolLM2-135M-Instruct. The questions are drawn by rule, and what is printed is
    what was measured, whether it flatters kvalloc or not.
    """
    begun = time.monotonic()
    # Before torch is loaded: threads that spin while they wait make everything several times
    # slower on a machine that is not idle, and a demo seldom has a machine to itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    from kvalloc.evaluate.showcase import Experiment

    if time_limit <= 0:
        raise InputError(f"a time limit of {time_limit:g} s leaves no time; give more")
    plan = _QUICK if quick else _FULL
    asking = _Asking(
        plan=plan,
        n_questions=questions or plan.n_questions,
        seed=seed,
        deadline=begun + time_limit,
        reserved_seconds=time_limit * _HARM_SHARE,
        quiet=quiet,
    )
    _make_folder(output_dir)
    show = _Show(silent=json)
    loaded, scores = _measure(plan, output_dir, show, quiet=quiet)
    decisions = _decide(scores, output_dir, show)
    bench = _Bench(loaded, asking)
    capacity = _greedy_bytes(decisions)
    granted, asked = _ask(bench, scores, capacity, show)
    losses, by_loss = _harm(bench, asked[0].share, output_dir, show)
    ladder = _search(bench, scores, losses, asked, show)
    experiment = Experiment(
        references=bench.questions.references,
        capacity_bytes=capacity,
        decisions=tuple(granted),
        asked=tuple(asked),
        by_loss=tuple(by_loss),
        ladder=ladder,
    )
    record = _save(scores, decisions, experiment, output_dir, show)
    show.text(f"All of it took {duration(time.monotonic() - begun)}.")
    if json:
        print_json(record)


@dataclass(frozen=True, kw_only=True)
class _Asking:
    plan: _Plan
    n_questions: int
    seed: int
    deadline: float
    reserved_seconds: float
    quiet: bool


class _Show:
    """Prints as soon as there is something to see; nothing at all where JSON is wanted."""

    def __init__(self, *, silent: bool) -> None:
        self._silent = silent
        self.width = min(terminal_width(), 100)

    def heading(self, number: int, text: str) -> None:
        """An empty line and a line with a number."""
        self.lines(["", f"{number}. {text}"])

    def text(self, text: str) -> None:
        """A paragraph."""
        self.lines(textwrap.wrap(text, self.width))

    def lines(self, lines: list[str]) -> None:
        """Lines as they are."""
        if not self._silent:
            print("\n".join(lines), flush=True)


def _make_folder(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise InputError(f"{folder} is a file; name a folder with --output-dir") from None
    except OSError as error:
        raise InputError(f"cannot make the folder {folder}: {error.strerror}") from error


def _measure(
    plan: _Plan, folder: Path, show: _Show, *, quiet: bool
) -> tuple[LoadedModel, ScoreProfile]:
    from kvalloc.cli.progress import ProgressBar, slow
    from kvalloc.measure import default_texts, profile
    from kvalloc.models.loading import load_model

    with slow("loading the demo model", quiet=quiet):
        loaded = load_model("demo", notify=lambda line: note(line, quiet=quiet))
    show.heading(1, f"Measure: where {loaded.model_id} looks")
    start = time.perf_counter()
    with ProgressBar("profiling", unit="layers", quiet=quiet) as progress:
        scores = profile(
            loaded.model,
            loaded.tokenizer,
            default_texts(),
            samples=plan.samples,
            context=plan.context_tokens,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    scores.save(folder / SCORES)
    show.text(f"{scores.text_description}.")
    show.text(
        f"Scorer {scores.scorer}, {scores.sinks} sinks, window {scores.window}; "
        f"{duration(seconds)}."
    )
    return loaded, scores


def _decide(scores: ScoreProfile, folder: Path, show: _Show) -> list[Decision]:
    from kvalloc.evaluate.showcase import decide
    from kvalloc.report.showcase import decision_table
    from kvalloc.report.terminal import budget_columns

    show.heading(2, f"Decide: the fewest bytes that retain {TARGET_RETENTION:g} of the attention")
    decisions = decide(scores, {"target_retention": TARGET_RETENTION})
    show.lines(decision_table(decisions))
    decided = {d.solver: d.profile for d in decisions if d.profile is not None}
    for name, profile in decided.items():
        profile.save(folder / f"{name}.json")
    drawn = _worth_drawing(decided)
    show.lines(["", "Entries that each layer keeps, in % of the prompt:"])
    show.lines(budget_columns(drawn, width=show.width, unicode=can_print_bars()))
    if len(drawn) < len(decided):
        show.text(f"{PICTURE} and the files of budgets have the others.")
    return decisions


def _worth_drawing(decided: dict[str, BudgetProfile]) -> dict[str, BudgetProfile]:
    """The first few different budgets per layer: more columns would be too narrow to read."""
    from kvalloc.report.terminal import merged_names

    by_layer = {name: p for name, p in decided.items() if p.level == "layer"}
    return dict(list(merged_names(by_layer).items())[:_COLUMNS])


class _Bench:
    """The questions, already answered with the full cache, and until when more are asked."""

    def __init__(self, loaded: LoadedModel, asking: _Asking) -> None:
        from kvalloc.cli.progress import slow
        from kvalloc.evaluate.caches import measure_references
        from kvalloc.evaluate.showcase import Questions
        from kvalloc.prompts.needle import make_needle_cases

        self.loaded, self.asking = loaded, asking
        cases = make_needle_cases(
            loaded.tokenizer, asking.n_questions, asking.plan.context_tokens, seed=asking.seed
        )
        with slow("asking the full cache", quiet=asking.quiet):
            references = measure_references(loaded.model, loaded.tokenizer, cases)
        self.questions = Questions(loaded.model, loaded.tokenizer, references)


def _ask(
    bench: _Bench, scores: ScoreProfile, capacity: int, show: _Show
) -> tuple[list[Decision], list[Asked]]:
    from kvalloc.cli.progress import ProgressBar
    from kvalloc.evaluate.showcase import ask_each, decide
    from kvalloc.report.showcase import question_tables, summary_table

    full = scores.shape.full_bytes(scores.context_tokens)
    show.heading(3, f"Apply: the same {size(capacity)} of {size(full)} for every solver")
    granted = decide(scores, {"memory": capacity})
    with ProgressBar("asking", unit="solvers", quiet=bench.asking.quiet) as progress:
        asked, missing = ask_each(
            granted,
            capacity / full,
            bench.questions,
            deadline=bench.asking.deadline - bench.asking.reserved_seconds,
            progress=progress,
        )
    references = bench.questions.references
    show.lines([*question_tables(references, asked), "", *summary_table(asked)])
    for name, reason in missing.items():
        show.text(f"{name}: not asked, {reason}")
    return granted, asked


def _harm(
    bench: _Bench, share: float, folder: Path, show: _Show
) -> tuple[ScoreProfile, list[Asked]]:
    from kvalloc.cli.progress import ProgressBar
    from kvalloc.evaluate.harm import LOSS, harm_rules, profile_losses
    from kvalloc.report.showcase import summary_table

    plan, quiet = bench.asking.plan, bench.asking.quiet
    show.heading(4, "Harm: decide by what the answers lose, at the same bytes")
    start = time.perf_counter()
    with ProgressBar("measuring losses", unit="steps", quiet=quiet) as progress:
        losses = profile_losses(
            bench.loaded,
            n_prompts=plan.loss_prompts,
            context_tokens=plan.loss_context_tokens,
            progress=progress,
        )
    seconds = time.perf_counter() - start
    losses.save(folder / LOSSES)
    assert losses.loss_tokens is not None  # asked for
    show.text(
        f"Each layer alone reduced to {losses.loss_tokens.size - 1} sizes, its harm measured "
        f"('kvalloc profile --loss'), on {plan.loss_prompts} prompts of up to "
        f"{losses.context_tokens:,} tokens: needles of other names in other texts, and running "
        f"text. Scorer {losses.scorer}, window {losses.window}; {duration(seconds)}."
    )
    rules = harm_rules(losses, plan.context_tokens)
    rules[LOSS](share).save(folder / "least_loss.json")
    with ProgressBar("asking", unit="caches", quiet=quiet) as progress:
        asked = []
        for done, (name, rule) in enumerate(rules.items(), start=1):
            asked.append(bench.questions.ask(name, share, rule(share)))
            progress(done, len(rules))
    show.lines(["", *summary_table(asked)])
    return losses, asked


def _search(
    bench: _Bench,
    scores: ScoreProfile,
    losses: ScoreProfile,
    asked: list[Asked],
    show: _Show,
) -> Ladder:
    from kvalloc.cli.progress import ProgressBar
    from kvalloc.evaluate.harm import harm_rules
    from kvalloc.evaluate.showcase import climb, rules_of
    from kvalloc.report.showcase import ladder_table

    show.heading(5, "Search: needles found and mean KL at other shares of the entries")
    names = [entry.solver for entry in asked]
    rules = {**harm_rules(losses, bench.asking.plan.context_tokens), **rules_of(scores, names)}
    with ProgressBar("searching", unit="seconds at most", quiet=bench.asking.quiet) as progress:
        ladder = climb(
            rules,
            bench.questions,
            shares=bench.asking.plan.shares,
            deadline=bench.asking.deadline,
            progress=progress,
        )
    show.lines(ladder_table(ladder, list(rules)))
    return ladder


def _greedy_bytes(decisions: list[Decision]) -> int:
    """What the optimum at layer level needs: every solver gets as much."""
    for decision in decisions:
        if decision.solver == "greedy" and decision.profile is not None:
            return decision.profile.retained_bytes
    reasons = "; ".join(d.reason for d in decisions if d.solver == "greedy")
    raise SolverError(f"the demo needs the solver greedy: {reasons or 'it is not registered'}")


def _save(
    scores: ScoreProfile,
    decisions: list[Decision],
    experiment: Experiment,
    folder: Path,
    show: _Show,
) -> dict[str, Any]:
    import json

    from kvalloc.evaluate.record import demo_record
    from kvalloc.files import atomic_write
    from kvalloc.report.figure import save_budget_figure
    from kvalloc.report.showcase import harm_points, lessons

    record = demo_record(decisions, experiment)
    with atomic_write(folder / RESULTS) as temporary:
        temporary.write_text(json.dumps(record, indent=2, allow_nan=False) + "\n", "utf-8")
    model = scores.shape.model_id.rsplit("/", 1)[-1]
    save_budget_figure(
        folder / PICTURE,
        scores,
        {
            **{d.solver: d.profile for d in decisions if d.profile is not None},
            **{asked.solver: asked.profile for asked in experiment.by_loss},
        },
        harm=harm_points(experiment),
        title=f"{model}: budgets for a retention of {TARGET_RETENTION:g}, and by loss",
    )
    show.heading(6, "What this shows")
    for lesson in lessons(experiment):
        show.text(lesson)
    show.lines([""])
    show.text(
        f"In {folder}: {SCORES}, {LOSSES}, a budget profile for each solver (*.json), {RESULTS}, "
        f"{PICTURE}"
    )
    return record
