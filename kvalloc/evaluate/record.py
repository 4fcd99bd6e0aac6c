"""The demo's results as plain values, for a file and for ``--json``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from kvalloc.evaluate.showcase import Asked, Decision, Experiment
from kvalloc.prompts.needle import NeedleCase


def demo_record(decisions: Iterable[Decision], experiment: Experiment) -> dict[str, Any]:
    """Put everything that was decided and measured into one document.

    Parameters
    ----------
    decisions : iterable of Decision
        At the target retention.
    experiment : Experiment
        What was asked.

    Returns
    -------
    dict
        Of plain values; unknown is None.
    """
    ladder = experiment.ladder
    return {
        "decisions": [_decision(decision) for decision in decisions],
        "capacity_bytes": experiment.capacity_bytes,
        "at_capacity": [_decision(decision) for decision in experiment.decisions],
        "full_cache": [
            {
                **_case(reference.case),
                "answer": reference.answer,
                "found": reference.found,
                "answer_tokens": len(reference.answer_ids),
                "full_bytes": reference.full_bytes,
                "prefill_seconds": reference.prefill_seconds,
                "decode_seconds": reference.decode_seconds,
            }
            for reference in experiment.references
        ],
        "asked": [_asked(asked) for asked in experiment.asked],
        "by_loss": [_asked(asked) for asked in experiment.by_loss],
        "ladder": [_asked(asked) for asked in ladder.asked.values()],
        "ladder_skipped": [{"solver": name, "share": share} for name, share in ladder.skipped],
    }


def _decision(decision: Decision) -> dict[str, Any]:
    profile = decision.profile
    record: dict[str, Any] = {
        "solver": decision.solver,
        "level": None,
        "reason": decision.reason or None,
        "seconds": decision.seconds,
    }
    if profile is None:
        return record
    return {
        **record,
        "level": profile.level,
        "retention": profile.retention,
        "retained_tokens": profile.retained_tokens,
        "retained_bytes": profile.retained_bytes,
        "full_bytes": profile.full_bytes,
        "objective": profile.objective,
        "bound": profile.bound,
        "gap": profile.gap,
        "termination": profile.termination,
    }


def _asked(asked: Asked) -> dict[str, Any]:
    return {
        "solver": asked.solver,
        "share": asked.share,
        "retention": asked.profile.retention,
        "same_as": asked.same_as,
        "found": asked.n_found,
        "kl": asked.kl,
        "rows": [
            {
                **_case(row.case),
                "answer": row.answer,
                "found": row.found,
                "kl": row.kl,
                "top1_agreement": row.top1_agreement,
                "retained_bytes": row.retained_bytes,
                "full_bytes": row.full_bytes,
                "prefill_seconds": row.prefill_seconds,
                "decode_seconds": row.decode_seconds,
            }
            for row in asked.rows
        ],
    }


def _case(case: NeedleCase) -> dict[str, Any]:
    return {
        "source": case.source,
        "key": case.key,
        "number": case.number,
        "depth": case.depth,
        "prompt_tokens": case.n_tokens,
    }
