"""The demo's results as text: tables of at most 80 columns, and what they show."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Sequence

from kvalloc.evaluate.caches import CacheRow, Reference
from kvalloc.evaluate.showcase import NO_TIME, Asked, Decision, Experiment, Ladder
from kvalloc.report.figure import HarmPoint
from kvalloc.report.terminal import table_lines

MIB = 1024**2
WIDTH = 80
ANSWER_WIDTH = 20
"""Longer answers are cut in the table; the file of results holds them whole."""


def decision_table(decisions: Sequence[Decision]) -> list[str]:
    """Lay out what every solver made of the same target.

    Parameters
    ----------
    decisions : sequence of Decision
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
        if decision.reason:
            notes += textwrap.wrap(f"* {name}: {decision.reason}", WIDTH, subsequent_indent="  ")
            name += " *"
        if profile is None:
            rows.append((name, "-", *[""] * 7))
            continue
        rows.append(
            (
                name,
                profile.level,
                _number(profile.retention, 4),
                f"{profile.retained_tokens:,}",
                f"{profile.retained_bytes / profile.full_bytes:.1%}",
                f"{profile.retained_bytes / MIB:.2f}",
                "?" if profile.bound is None else f"{profile.bound / MIB:.2f}",
                "?" if profile.gap is None else f"{profile.gap:.1%}",
                f"{decision.seconds:.2f}",
            )
        )
    return [*table_lines(headings, rows), *notes]


def question_tables(references: Sequence[Reference], asked: Sequence[Asked]) -> list[str]:
    """Lay out the answers of the full cache and of every reduced cache, question by question.

    Parameters
    ----------
    references : sequence of Reference
        The full cache's answers.
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
    for index, reference in enumerate(references):
        case = reference.case
        lines += [
            "",
            f"Question {index + 1} of {len(references)}: {case.n_tokens:,} tokens of "
            f"{case.source}, needle at {case.depth:.0%}",
        ]
        full = (
            "full",
            _plain(reference.answer),
            _yes(reference.found),
            "-",
            "-",
            f"{reference.full_bytes / MIB:.2f}",
            f"{reference.prefill_seconds:.2f}",
            f"{reference.decode_seconds:.2f}",
        )
        right = ("right", case.number, *[""] * 6)
        rows = [right, full, *(_answer_cells(entry, entry.rows[index]) for entry in _own(asked))]
        lines += table_lines(headings, rows, left=(0, 1))
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
        agree = [row.top1_agreement for row in entry.rows if row.top1_agreement is not None]
        rows.append(
            (
                entry.solver,
                _number(entry.profile.retention, 4),
                f"{entry.n_found} of {len(entry.rows)}",
                _number(entry.kl, 3),
                f"{sum(agree) / len(agree):.0%}" if agree else "-",
                f"{entry.profile.retained_bytes / MIB:.2f}",
            )
        )
    headings = ("all questions", "retention", "found", "KL", "agree", "MiB")
    twins = [(entry.solver, entry.same_as) for entry in asked if entry.same_as is not None]
    return [*table_lines(headings, rows), *_grouped(twins, "the same budgets as {}, measured once")]


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
    headings = ("kept", *map(_percent, ladder.shares), "all from")
    rows = []
    own = _own_rows(ladder, solvers)
    for solver in own:
        cells = []
        for share in ladder.shares:
            asked = ladder.asked.get((solver, share))
            cells.append(
                "" if asked is None else f"{asked.n_found}/{len(asked.rows)} {_number(asked.kl, 2)}"
            )
        rows.append((solver, *cells, _first_share(ladder, solver)))
    lines = table_lines(headings, rows)
    lines += _grouped(_twins(ladder, solvers), "the same budgets as {} wherever asked")
    missing = sum(name in own for name, _ in ladder.skipped)
    if missing:
        lines.append(
            f"{missing} of {len(own) * len(ladder.shares)} cells were not asked: {NO_TIME}"
        )
    return lines


def harm_points(experiment: Experiment) -> dict[str, list[HarmPoint]]:
    """Collect measured harm by share for the picture, solvers of equal budgets once.

    Parameters
    ----------
    experiment : Experiment

    Returns
    -------
    dict of list of HarmPoint
        By solver; those whose every measurement is another solver's share its line, under both
        names.
    """
    cells: dict[str, list[Asked]] = {}
    for asked in (*experiment.asked, *experiment.by_loss, *experiment.ladder.asked.values()):
        cells.setdefault(asked.solver, []).append(asked)
    labels = {name: name for name in cells}
    for name, entries in cells.items():
        twins = {entry.same_as for entry in entries}
        if len(twins) == 1 and (twin := twins.pop()) in labels:
            labels[twin] += f" = {name}"
            del labels[name]
    return {
        label: [
            HarmPoint(share=a.share, kl=a.kl, all_found=a.n_found == len(a.rows))
            for a in cells[name]
            if a.kl is not None
        ]
        for name, label in labels.items()
    }


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
    references, asked = experiment.references, experiment.asked
    total, full = len(references), sum(reference.found for reference in references)
    counts = ", ".join(f"{entry.solver} {entry.n_found}" for entry in _own(asked))
    first = (
        f"Of {total} needle{'s' if total > 1 else ''} the full cache found {full}; with "
        f"{asked[0].share:.0%} of the entries: {counts}."
    )
    most = max(asked, key=lambda entry: entry.profile.retention or 0.0)
    least = min(asked, key=_kl_or_infinity)
    if _kl_or_infinity(most) > _kl_or_infinity(least):
        seen = (
            f"{most.solver} retains most of the attention ({_number(most.profile.retention, 3)}, "
            f"KL {_number(most.kl, 2)}), {least.solver} does least harm "
            f"({_number(least.profile.retention, 3)}, KL {_number(least.kl, 2)})"
        )
    else:
        seen = (
            f"{most.solver} retains most of the attention "
            f"({_number(most.profile.retention, 3)}) and here also does least harm "
            f"(KL {_number(most.kl, 2)})"
        )
    second = f"{seen}: retained attention is a weak guide to harm."
    return (first, second, *_loss_lessons(experiment, least))


def _loss_lessons(experiment: Experiment, best: Asked) -> list[str]:
    """What budgets by measured loss gave beside the best of the others, share by share."""
    total, lines = len(experiment.references), []
    if experiment.by_loss:
        loss, *same_ranking = experiment.by_loss
        others = ", ".join(
            f"{entry.solver} {entry.n_found} (KL {_number(entry.kl, 3)})"
            for entry in (best, *same_ranking)
        )
        lines.append(
            f"Budgets of {loss.solver} at the same bytes find {loss.n_found} of {total} "
            f"(KL {_number(loss.kl, 3)}); {others}."
        )
        cells = experiment.ladder.asked
        for share in experiment.ladder.shares:
            cell = cells.get((loss.solver, share))
            rest = [
                asked
                for (name, at), asked in cells.items()
                if at == share and name != loss.solver and asked.kl is not None
            ]
            if cell is not None and rest:
                near = min(rest, key=_kl_or_infinity)
                lines.append(
                    f"At {_percent(share)}: {loss.solver} {cell.n_found} of {total} (KL "
                    f"{_number(cell.kl, 3)}), the best other {near.solver} {near.n_found} (KL "
                    f"{_number(near.kl, 3)})."
                )
    lines.append(
        "On your own model and prompts: 'kvalloc profile MODEL --prompts FILE --scorer tova "
        "--loss', then 'kvalloc solve --budget 40%'; for single heads, '--loss fast --loss-level "
        "head', then '--level head'."
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


def _twins(ladder: Ladder, solvers: Sequence[str]) -> list[tuple[str, str]]:
    """Solvers that share every measurement with one other solver, and which one."""
    found = []
    for solver in solvers:
        cells = [cell for (name, _), cell in ladder.asked.items() if name == solver]
        others = {cell.same_as for cell in cells}
        if len(others) == 1 and (other := others.pop()) is not None:
            found.append((solver, other))
    return found


def _own_rows(ladder: Ladder, solvers: Sequence[str]) -> list[str]:
    shared = {name for name, _ in _twins(ladder, solvers)}
    return [solver for solver in solvers if solver not in shared]


def _answer_cells(asked: Asked, row: CacheRow) -> tuple[str, ...]:
    agree = "-" if row.top1_agreement is None else f"{row.top1_agreement:.0%}"
    return (
        asked.solver,
        _plain(row.answer),
        _yes(row.found),
        _number(row.kl, 3),
        agree,
        f"{row.retained_bytes / MIB:.2f}",
        f"{row.prefill_seconds:.2f}",
        f"{row.decode_seconds:.2f}",
    )


def _plain(answer: str) -> str:
    """Show an answer on one line, and control characters as what they are."""
    line = " ".join(answer.split())
    line = "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in line)
    return (line if len(line) <= ANSWER_WIDTH else f"{line[: ANSWER_WIDTH - 2]}..") or "(nothing)"


def _yes(found: bool) -> str:
    return "yes" if found else "no"


def _number(value: float | None, digits: int) -> str:
    return "?" if value is None else f"{value:.{digits}f}"


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
