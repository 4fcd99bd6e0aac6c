"""``kvalloc demo``: profile, solve and apply on a real model, as measured."""

from __future__ import annotations

import os
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvalloc.cli.options import takes
from kvalloc.cli.output import duration, json_text, wants_json
from kvalloc.cli.progress import ProgressBar, load, slow
from kvalloc.cli.values import check_time_limit, make_folder
from kvalloc.errors import SolverError
from kvalloc.units import Option, size

if TYPE_CHECKING:
    from kvalloc.allocation.decision import Attempt
    from kvalloc.evaluate.showcase import Asked, Experiment, Ladder, Questions, Rule
    from kvalloc.formats.score_profile import ScoreProfile
    from kvalloc.models.loading import LoadedModel

EXAMPLES = """\
  kvalloc demo
  kvalloc demo --quick
  kvalloc demo --questions 5 --seed 7 --output-dir seven
"""

TARGET_RETENTION = 0.9
SCORES, LOSSES = "scores.safetensors", "losses.safetensors"
RESULTS, PICTURE = "results.json", "demo.png"

_COLUMNS = 4
_ASK_UNTIL = 0.5
"""Share of the time after which no retention-based solver is asked any more."""

_LOSSES_UNTIL = 2.0
"""The same for the losses: they are what the demo is to show, so they may take as long again."""


@takes()
def demo(
    output_dir: Path = Path("demo-output"),
    questions: Annotated[int | None, Option("N", least=1)] = None,
    seed: Annotated[int, Option("N")] = 0,
    time_limit: float = 230.0,
    quick: bool = False,
) -> None:
    """Profile a real model, solve with every solver, and ask through the smaller caches.

    The model is SmolLM2-135M-Instruct. The questions are drawn by rule, and what is printed is
    what was measured, whether it flatters kvalloc or not.

    Parameters
    ----------
    output_dir : Path
        Folder for profiles, picture and results; made if missing.
    questions : int
        Needle questions; 3 by default, 1 with --quick.
    seed : int
        Draws the questions; none is picked by hand.
    time_limit : float
        Seconds for everything; what does not fit is skipped, and said.
    quick : bool
        One short sample and question, to try it out.
    """
    begun = time.monotonic()
    check_time_limit(time_limit)
    # Before torch is loaded: threads that spin while they wait make everything several times
    # slower on a machine that is not idle, and a demo seldom has a machine to itself.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    make_folder(output_dir)
    much = _QUICK if quick else _FULL
    run = _Demo(
        much=much,
        n_questions=questions or much.n_questions,
        seed=seed,
        begun=begun,
        time_limit=time_limit,
        folder=output_dir,
    )
    record = run.all_steps()
    run.text(f"All of it took {duration(time.monotonic() - begun)}.")
    if wants_json():
        print(record)


@dataclass(frozen=True, kw_only=True)
class _Amount:
    """How much is measured."""

    samples: int = 4
    context_tokens: int = 1500
    n_questions: int = 3
    shares: tuple[float, ...] = (0.125, 0.2, 0.3, 0.4, 0.6, 0.8)
    loss_prompts: int = 4
    loss_context_tokens: int = 1024
    loss_plan: dict[str, Any] = field(default_factory=dict)


_FULL = _Amount()
_QUICK = _Amount(
    samples=1,
    context_tokens=240,
    n_questions=1,
    shares=(0.3, 0.8),
    loss_prompts=2,
    loss_context_tokens=128,
    loss_plan={"shares": (0.0, 0.15, 0.4), "continuation_tokens": 8},
)


@dataclass(frozen=True, kw_only=True)
class _Demo:
    """The steps of the demo; each prints what it found as soon as it is known."""

    much: _Amount
    n_questions: int
    seed: int
    begun: float
    time_limit: float
    folder: Path

    def all_steps(self) -> str:
        """One after the other; returns the document of results."""
        from kvalloc.evaluate.showcase import Experiment

        loaded = load("demo", {})
        scores = self.measure(loaded)
        decisions = self.decide(scores)
        capacity = _greedy_bytes(decisions)
        questions, granted, asked = self.ask(loaded, scores, capacity)
        by_loss, rules = self.harm(loaded, questions, asked[0].share)
        experiment = Experiment(
            cases=questions.cases,
            full=questions.full,
            capacity_bytes=capacity,
            decisions=tuple(granted),
            asked=tuple(asked),
            by_loss=tuple(by_loss),
            ladder=self.search(questions, scores, asked, rules),
        )
        return self.save(scores, decisions, experiment)

    def measure(self, loaded: LoadedModel) -> ScoreProfile:
        from kvalloc.measure import default_texts, profile

        self.lines("", f"1. Measure: where {loaded.model_id} looks")
        start, amount = time.perf_counter(), self.much
        model, tokenizer, texts = loaded.model, loaded.tokenizer, default_texts()
        samples, context = amount.samples, amount.context_tokens
        with ProgressBar("profiling", unit="layers") as bar:
            scores = profile(
                model, tokenizer, texts, samples=samples, context=context, progress=bar
            )
        seconds = time.perf_counter() - start
        scores.save(self.folder / SCORES)
        self.text(f"{scores.text_description}.")
        settings = f"Scorer {scores.scorer}, {scores.sinks} sinks, window {scores.window}"
        self.text(f"{settings}; {duration(seconds)}.")
        return scores

    def decide(self, scores: ScoreProfile) -> list[Attempt]:
        from kvalloc.evaluate.showcase import decide
        from kvalloc.report.showcase import decision_table
        from kvalloc.report.terminal import budget_columns, merged_names

        wanted = f"the fewest bytes that retain {TARGET_RETENTION:g} of the attention"
        self.lines("", f"2. Decide: {wanted}")
        decisions = decide(scores, target_retention=TARGET_RETENTION)
        self.lines(*decision_table(decisions))
        decided = {d.solver: d.profile for d in decisions if d.profile is not None}
        for name, profile in decided.items():
            profile.save(self.folder / f"{name}.json")
        # The first few different ones per layer: more columns would be too narrow to read.
        by_layer = merged_names({name: p for name, p in decided.items() if p.level == "layer"})
        drawn = dict(list(by_layer.items())[:_COLUMNS])
        self.lines("", "Entries that each layer keeps, in % of the prompt:")
        self.lines(*budget_columns(drawn, width=_width()))
        if len(drawn) < len(decided):
            self.text(f"{PICTURE} and the files of budgets have the others.")
        return decisions

    def ask(
        self, loaded: LoadedModel, scores: ScoreProfile, capacity: int
    ) -> tuple[Questions, list[Attempt], list[Asked]]:
        from kvalloc.evaluate.showcase import Questions, ask_each, decide
        from kvalloc.prompts.needle import make_needle_cases
        from kvalloc.report.showcase import question_tables, summary_table

        full = scores.shape.full_bytes(scores.context_tokens)
        self.lines("", f"3. Apply: the same {size(capacity)} of {size(full)} for every solver")
        context, tokenizer = self.much.context_tokens, loaded.tokenizer
        cases = make_needle_cases(tokenizer, self.n_questions, context, seed=self.seed)
        with slow("asking the full cache"):
            questions = Questions(loaded.model, tokenizer, cases)
        granted, share = decide(scores, memory=capacity), capacity / full
        with ProgressBar("asking", unit="solvers") as bar:
            asked, missing = ask_each(
                granted, share, questions, deadline=self.until(_ASK_UNTIL), progress=bar
            )
        self.lines(*question_tables(questions, asked), "", *summary_table(asked))
        for name, reason in missing.items():
            self.text(f"{name}: not asked: {reason.removeprefix(f'{name} ')}")
        return questions, granted, asked

    def harm(
        self, loaded: LoadedModel, questions: Questions, share: float
    ) -> tuple[list[Asked], dict[str, Rule]]:
        from kvalloc.evaluate.showcase import LOSS, NO_TIME, loss_rules, profile_losses
        from kvalloc.files import delete_file
        from kvalloc.online.default import Default
        from kvalloc.report.showcase import summary_table

        self.lines("", "4. Harm: decide by what the answers lose, at the same bytes")
        start, until = time.perf_counter(), self.until(_LOSSES_UNTIL)
        with ProgressBar("measuring losses", unit="steps") as bar:
            losses = profile_losses(
                loaded,
                self.much.loss_prompts,
                self.much.loss_context_tokens,
                deadline=until,
                progress=bar,
                **self.much.loss_plan,
            )
        if losses is None:
            delete_file(self.folder / LOSSES)  # of an earlier run
            self.text(f"Losses are not measured: {NO_TIME}; see --time-limit.")
            return [], {}
        losses.save(self.folder / LOSSES)
        assert losses.loss_tokens is not None  # measured just now
        self.text(
            f"Each layer alone reduced to {losses.loss_tokens.size - 1} sizes, its harm measured "
            f"('kvalloc profile --loss'), on {losses.n_samples} prompts of up to "
            f"{losses.context_tokens:,} tokens: needles of other names in other texts, and "
            f"running text. Scorer {losses.scorer}, window {losses.window}; "
            f"{duration(time.perf_counter() - start)}."
        )
        rules = loss_rules(losses, self.much.context_tokens)
        rules[LOSS](share).save(self.folder / "least_loss.json")
        with slow("asking"):
            asked = [questions.ask(name, share, rule(share)) for name, rule in rules.items()]
            default = Default(share=share).cache(loaded.model, self.much.context_tokens).profile
            asked.append(questions.ask("default", share, default))
        self.lines("", *summary_table(asked))
        self.text(
            f"The default is kvalloc.apply(model, budget='{share:.0%}'): nothing is measured, and "
            "the share is of a cache at 16 bits, half of this one's."
        )
        return asked, rules

    def search(
        self,
        questions: Questions,
        scores: ScoreProfile,
        asked: list[Asked],
        rules: dict[str, Rule],
    ) -> Ladder:
        from kvalloc.evaluate.showcase import NO_TIME, climb, rules_of
        from kvalloc.report.showcase import ladder_table

        self.lines("", "5. Search: needles found and mean KL at other shares of the entries")
        rules = rules | rules_of(scores, {one.solver: one.profile.level for one in asked})
        shares, until = self.much.shares, self.until(1.0)
        with ProgressBar("searching", unit="seconds at most") as bar:
            ladder = climb(rules, questions, shares=shares, deadline=until, progress=bar)
        if len(ladder.asked) < len(rules):  # a table of gaps says nothing
            self.text(f"Left out: {NO_TIME}; --time-limit 600 leaves enough.")
        else:
            self.lines(*ladder_table(ladder, list(rules)))
        return ladder

    def save(self, scores: ScoreProfile, decisions: list[Attempt], experiment: Experiment) -> str:
        from kvalloc.files import atomic_write
        from kvalloc.report.showcase import lessons, save_picture

        record = json_text(experiment.record(decisions))
        with atomic_write(self.folder / RESULTS, stream=True) as temporary:
            temporary.write_text(record + "\n", "utf-8")
        save_picture(self.folder / PICTURE, scores, decisions, experiment)
        self.lines("", "6. What this shows")
        for lesson in lessons(experiment):
            self.text(lesson)
        losses = f"{LOSSES}, " if experiment.by_loss else ""
        files = f"{SCORES}, {losses}a budget profile for each solver (*.json), {RESULTS}"
        self.lines("")
        self.text(f"In {self.folder}: {files}, {PICTURE}")
        return record

    def until(self, share: float) -> float:
        """When this share of the time has gone by, as a reading of ``time.monotonic()``."""
        return self.begun + share * self.time_limit

    def text(self, text: str) -> None:
        """A paragraph."""
        self.lines(*textwrap.wrap(text, _width()))

    def lines(self, *lines: str) -> None:
        """Lines as they are; nothing where JSON is wanted."""
        if not wants_json():
            print("\n".join(lines), flush=True)


def _width() -> int:
    from kvalloc.report.terminal import terminal_width

    return min(terminal_width(), 100)


def _greedy_bytes(decisions: list[Attempt]) -> int:
    """What the optimum at layer level needs: every solver gets as much."""
    found = {one.solver: one for one in decisions}.get("greedy")
    if found is None or found.profile is None:
        reason = "it is not registered" if found is None else found.reason
        raise SolverError(f"the demo needs the solver greedy: {reason}")
    return found.profile.retained_bytes
