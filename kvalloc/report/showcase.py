"""The demo's results as text: tables of at most 80 columns, and what they show."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

from kvalloc.allocation.decision import Attempt
from kvalloc.errors import one_line
from kvalloc.evaluate.scoring import Outcome, known
from kvalloc.evaluate.showcase import NO_TIME, Asked, Experiment, Ladder, Questions
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.report.figure import save_budget_figure
from kvalloc.report.terminal import number_text, table_lines

MIB = 1024**2
_number = partial(number_text, unknown="?")
WIDTH = 80
ANSWER_WIDTH = 20
"""Longer answers are cut in the table; the file of results holds them whole."""

OWN_MODEL = (
    "On your own model and prompts: 'kvalloc profile MODEL --prompts FILE --scorer tova --loss', "
    "then 'kvalloc solve --budget 40%'; for single heads, '--loss fast --loss-level head', then "
    "'--level head'."
)


def decision_table(decisions: Sequence[Attempt]) -> list[str]:
    """Lay out what every solver made of the same target.

    Parameters
    ----------
    decisions : sequence of Attempt
        For a target retention: objective and bound are bytes.

    Returns
    -------
    list of str
        The table, and one line for each solver that needs a reason.
    """
    headings = ("solver", "level", "retention", "entries", "share", "MiB", "bound", "gap", "s")
    rows, notes = [], []
    for decision in decisions:
        profile, name = decision.profile, decision.solver
        if profile is None:
            notes += textwrap.wrap(f"* {name}: {decision.reason}", WIDTH, subsequent_indent="  ")
            rows.append((f"{name} *", "-", *[""] * 7))
            continue
        share, mib = profile.retained_bytes / profile.full_bytes, profile.retained_bytes / MIB
        bound = None if profile.bound is None else profile.bound / MIB
        kept = (_number(profile.retention, ".4f"), f"{profile.retained_tokens:,}", f"{share:.1%}")
        proof = (f"{mib:.2f}", _number(bound, ".2f"), _number(profile.gap, ".1%"))
        rows.append((name, profile.level, *kept, *proof, f"{decision.seconds:.2f}"))
    return [*table_lines(headings, rows, rule=True), *notes]


def question_tables(questions: Questions, asked: Sequence[Asked]) -> list[str]:
    """Lay out the answers of the full cache and of every reduced cache, question by question.

    Parameters
    ----------
    questions : Questions
        With the full cache's answers.
    asked : sequence of Asked
        One a solver, all at the same bytes. Those with the same budgets as an earlier one were
        measured once and share its row.

    Returns
    -------
    list of str
        A table a question.
    """
    lines: list[str] = []
    headings = ("cache", "answer", "found", "KL", "agree", "MiB", "read s", "write s")
    for index, (case, full) in enumerate(zip(questions.cases, questions.full, strict=True)):
        title = f"Question {index + 1} of {len(questions.cases)}: {case.n_tokens:,} tokens of "
        lines += ["", f"{title}{case.source}, needle at {case.depth:.0%}"]
        rows = [("right", case.number, *[""] * 6), _answer_cells("full", full, of_full=True)]
        rows += [_answer_cells(one.solver, one.outcomes[index]) for one in _own(asked)]
        lines += table_lines(headings, rows, left=(0, 1), rule=True)
    return lines


def summary_table(asked: Sequence[Asked]) -> list[str]:
    """Lay out retention, needles found and harm over all questions, for every solver.

    Parameters
    ----------
    asked : sequence of Asked
        One a solver, all at the same bytes.

    Returns
    -------
    list of str
        The table, and which solvers share a row.
    """
    rows = []
    for entry in _own(asked):
        agree = known(outcome.top1_agreement for outcome in entry.outcomes)
        found = f"{entry.n_found} of {len(entry.outcomes)}"
        harm = (_number(entry.kl, ".3f"), f"{sum(agree) / len(agree):.0%}" if agree else "-")
        mib = f"{entry.profile.retained_bytes / MIB:.2f}"
        rows.append((entry.solver, _number(entry.profile.retention, ".4f"), found, *harm, mib))
    headings = ("all questions", "retention", "found", "KL", "agree", "MiB")
    twins = [(entry.solver, entry.same_as) for entry in asked if entry.same_as is not None]
    shared = _grouped(twins, "the same budgets as {}, measured once")
    return [*table_lines(headings, rows, rule=True), *shared]


def ladder_table(ladder: Ladder, solvers: Sequence[str]) -> list[str]:
    """Lay out needles found and mean KL for every solver at every share of the entries.

    Parameters
    ----------
    ladder : Ladder
        What was asked and what was not.
    solvers : sequence of str
        Rows.

    Returns
    -------
    list of str
        An empty cell was not asked for lack of time, and a line says how many there are.
    """
    if not ladder.asked:
        return [f"Nothing was asked: {NO_TIME}."]
    twins = _twins(ladder.asked.values())
    own = [solver for solver in solvers if solver not in twins]

    def cell(solver: str, share: float) -> str:
        asked = ladder.asked.get((solver, share))
        if asked is None:
            return ""
        return f"{asked.n_found}/{len(asked.outcomes)} {_number(asked.kl, '.2f')}"

    rows = [
        (name, *(cell(name, share) for share in ladder.shares), _first_share(ladder, name))
        for name in own
    ]
    headings = ("kept", *map(_percent, ladder.shares), "all from")
    lines = table_lines(headings, rows, rule=True)
    lines += _grouped(twins.items(), "the same budgets as {} wherever asked")
    missing, cells = sum(name in own for name, _ in ladder.skipped), len(own) * len(ladder.shares)
    if missing:
        lines.append(f"{missing} of {cells} cells were not asked: {NO_TIME}")
    return lines


def harm_at_bytes(experiment: Experiment) -> dict[str, Asked]:
    """Collect measured harm at the same bytes for the picture, solvers of equal budgets once.

    Parameters
    ----------
    experiment : Experiment

    Returns
    -------
    dict of Asked
        By solver; those whose budgets are another solver's share its row, under both names.
    """
    everything = [*experiment.asked, *experiment.by_loss]
    labels = {asked.solver: asked.solver for asked in everything}
    for name, twin in _twins(everything).items():
        if twin in labels:
            labels[twin] += f" = {name}"
            del labels[name]
    found = {asked.solver: asked for asked in everything}
    return {label: found[name] for name, label in labels.items()}


def save_picture(
    path: Path, scores: ScoreProfile, decisions: Sequence[Attempt], experiment: Experiment
) -> None:
    """Draw all budgets, the curves that they come from, and what was measured.

    Parameters
    ----------
    path : Path
        The PNG to write.
    scores : ScoreProfile
    decisions : sequence of Attempt
        All for the same target.
    experiment : Experiment
    """
    decided = {d.solver: d.profile for d in decisions if d.profile is not None}
    decided |= {asked.solver: asked.profile for asked in experiment.by_loss}
    target = next(iter(decided.values())).requested["value"]
    model = scores.shape.model_id.rsplit("/", 1)[-1]
    title = f"{model}: budgets for a retention of {target:g}, and by loss"
    save_budget_figure(path, scores, decided, harm=harm_at_bytes(experiment), title=title)


def lessons(experiment: Experiment) -> tuple[str, ...]:
    """Say in a few lines what the measurement at equal bytes shows, whatever it shows.

    Parameters
    ----------
    experiment : Experiment
        At least one solver was asked.

    Returns
    -------
    tuple of str
        What was found, how retention and harm went together, and what deciding by loss gave.
    """
    full, asked = experiment.full, experiment.asked
    total = len(full)
    counts = ", ".join(f"{entry.solver} {entry.n_found}" for entry in _own(asked))
    first = (
        f"Of {total} needle{'s' if total > 1 else ''} the full cache found "
        f"{sum(bool(outcome.found) for outcome in full)}; with {asked[0].share:.0%} of the "
        f"entries: {counts}."
    )
    top = max(asked, key=lambda entry: entry.profile.retention or 0.0)
    best = min(asked, key=_kl_or_infinity)
    kept, kl = _number(top.profile.retention, ".3f"), _number(top.kl, ".2f")
    if _kl_or_infinity(top) > _kl_or_infinity(best):
        other = f"{_number(best.profile.retention, '.3f')}, KL {_number(best.kl, '.2f')}"
        seen = f"({kept}, KL {kl}), {best.solver} does least harm ({other})"
    else:
        seen = f"({kept}) and here also does least harm (KL {kl})"
    second = (
        f"{top.solver} retains most of the attention {seen}: retained attention is a weak guide "
        "to harm."
    )
    return (first, second, *_loss_lessons(experiment, best), OWN_MODEL)


def _loss_lessons(experiment: Experiment, best: Asked) -> list[str]:
    """What budgets by measured loss gave beside the best of the others, share by share."""
    if not experiment.by_loss:
        return []
    total, (loss, *same_ranking) = len(experiment.full), experiment.by_loss
    others = ", ".join(
        f"{entry.solver} {entry.n_found} (KL {_number(entry.kl, '.3f')})"
        for entry in (best, *same_ranking)
    )
    lines = [
        f"Budgets of {loss.solver} at the same bytes find {loss.n_found} of {total} "
        f"(KL {_number(loss.kl, '.3f')}); {others}."
    ]
    cells = experiment.ladder.asked
    for share in experiment.ladder.shares:
        cell = cells.get((loss.solver, share))
        rest = [one for (name, at), one in cells.items() if at == share and name != loss.solver]
        near = min(rest, key=_kl_or_infinity, default=None)
        if cell is not None and near is not None and near.kl is not None:
            lines.append(
                f"At {_percent(share)}: {loss.solver} {cell.n_found} of {total} (KL "
                f"{_number(cell.kl, '.3f')}), the best other {near.solver} {near.n_found} (KL "
                f"{near.kl:.3f})."
            )
    return lines


def _own(asked: Sequence[Asked]) -> list[Asked]:
    """Those whose budgets are no other one's."""
    return [entry for entry in asked if entry.same_as is None]


def _grouped(twins: Iterable[tuple[str, str]], text: str) -> list[str]:
    """One paragraph for each solver whose row others share."""
    groups: dict[str, list[str]] = {}
    for name, first in twins:
        groups.setdefault(first, []).append(name)
    lines = []
    for first, names in groups.items():
        lines += textwrap.wrap(f"{', '.join(names)}: {text.format(first)}", WIDTH)
    return lines


def _twins(everything: Iterable[Asked]) -> dict[str, str]:
    """Solvers that share every measurement with one other solver, and which one."""
    shared: dict[str, set[str | None]] = {}
    for asked in everything:
        shared.setdefault(asked.solver, set()).add(asked.same_as)
    return {
        name: other
        for name, others in shared.items()
        if len(others) == 1 and (other := next(iter(others))) is not None
    }


def _answer_cells(name: str, outcome: Outcome, *, of_full: bool = False) -> tuple[str, ...]:
    harm = ("-", "-")
    if not of_full:
        agree = _number(outcome.top1_agreement, ".0%", unknown="-")
        harm = (_number(outcome.kl, ".3f"), agree)
    stored = outcome.full_bytes if of_full else outcome.retained_bytes
    numbers = (stored / MIB, outcome.prefill_seconds, outcome.decode_seconds)
    found = "yes" if outcome.found else "no"
    answer = one_line(outcome.answers[0].strip() or "(nothing)", ANSWER_WIDTH)
    return (name, answer, found, *harm, *(f"{x:.2f}" for x in numbers))


def _percent(share: float) -> str:
    return f"{share:.1%}".replace(".0%", "%")


def _first_share(ladder: Ladder, solver: str) -> str:
    """Where all needles were first found; "<=" where the next smaller share was not asked."""
    first = ladder.first_share(solver)
    if first is None:
        return "?" if any(name == solver for name, _ in ladder.skipped) else "none"
    below = [share for share in ladder.shares if share < first]
    bracketed = not below or (solver, below[-1]) in ladder.asked
    return ("" if bracketed else "<=") + _percent(first)


def _kl_or_infinity(asked: Asked) -> float:
    return math.inf if asked.kl is None else asked.kl
