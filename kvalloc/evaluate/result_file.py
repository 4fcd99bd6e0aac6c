"""Results of an evaluation as a file: rows, every prompt's values, and how they were made."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvalloc.evaluate.scoring import Score
from kvalloc.files import atomic_write, provenance
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.prompts.cases import Case

KIND = "kvalloc.evaluation"
SCHEMA_VERSION = 2


def evaluation_record(
    *,
    model_id: str,
    settings: Mapping[str, Any],
    profiles: Mapping[str, BudgetProfile],
    rows: Sequence[Mapping[str, Any]],
    scores: Sequence[Score],
    cases: Mapping[str, Sequence[Case]],
) -> dict[str, Any]:
    """Put an evaluation into one document.

    Parameters
    ----------
    model_id : str
    settings : mapping
        What was asked: tasks, split, question, turns, samples, context, seed, dtype.
    profiles : mapping of str to BudgetProfile
        By the name of their rows; the record holds their digests.
    rows : sequence of mapping
        See `kvalloc.evaluate.pairing.rows`.
    scores : sequence of Score
        For every prompt's values.
    cases : mapping of str to sequence of Case
        By task.

    Returns
    -------
    dict
        Of plain values; unknown is None.
    """
    return {
        "kind": KIND,
        "schema_version": SCHEMA_VERSION,
        **provenance(),
        "model": model_id,
        "settings": dict(settings),
        # Without an evaluation from before: the digest is that of what was evaluated.
        "profiles": {
            name: profile.replace(evaluation=None).digest for name, profile in profiles.items()
        },
        "rows": [dict(row) for row in rows],
        "prompts": [
            {
                "task": score.task,
                "name": score.name,
                "source": case.source,
                "prompt_tokens": case.n_tokens,
                "kl": outcome.kl,
                "kls": [list(turn) for turn in outcome.kls],
                "top1_agreement": outcome.top1_agreement,
                "score": outcome.score,
                "answers": list(outcome.answers),
                "right": [list(turn.answers) for turn in case.turns],
            }
            for score in scores
            for case, outcome in zip(cases[score.task], score.outcomes, strict=True)
        ],
    }


def evaluation_of(record: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The part of an evaluation that is about one method, small enough for a budget profile.

    Parameters
    ----------
    record : mapping
        From `evaluation_record`.
    name : str
        The method.

    Returns
    -------
    dict
        Settings and rows, without wall times, which are the machine's, and without prompts.
    """
    timed = ("prefill_seconds", "decode_tokens_per_second")
    kept = {key: record[key] for key in ("created", "versions", "model", "settings")}
    return {
        **kept,
        "rows": [
            {key: value for key, value in row.items() if key not in timed}
            for row in record["rows"]
            if row["name"] == name
        ],
    }


def save_evaluation(record: Mapping[str, Any], path: str | Path) -> None:
    """Write an evaluation as JSON.

    Raises
    ------
    InputError
        If the file cannot be written.
    """
    with atomic_write(path) as temporary:
        temporary.write_text(json.dumps(record, indent=1, allow_nan=False) + "\n", "utf-8")
