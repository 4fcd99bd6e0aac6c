"""What decides the numbers of a descent, for its state file, and what its profile tells of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalloc.accounting import FloatArray
from kvalloc.files import utc_date, versions
from kvalloc.measure.fingerprint import fingerprint
from kvalloc.measure.job import MEASURED_WITH
from kvalloc.prompts.intervals import interval
from kvalloc.tuning.descent_settings import DescentSettings
from kvalloc.tuning.descent_state import StateFile

if TYPE_CHECKING:
    from kvalloc.formats.policy import Policy
    from kvalloc.measure.sampling import SampleSet
    from kvalloc.shape import ModelShape


def descent_record(
    model: Any,
    shape: ModelShape,
    context: int,
    policies: Sequence[Policy],
    found: SampleSet,
    settings: DescentSettings,
    seed: int,
) -> dict[str, Any]:
    """Everything that decides the numbers of a descent, but for the budget."""
    return {
        "model": shape.to_dict(),
        "weights": fingerprint(model),
        "dtype": str(model.dtype),
        "device": model.get_input_embeddings().weight.device.type,
        "context_tokens": context,
        "policies": [{**policy.record(), "label": policy.label} for policy in policies],
        "descent": asdict(settings),
        "seed": seed,
        "text_digest": found.digest(),
        "answers": found.answers_digest(),
        "versions": versions(*MEASURED_WITH),
    }


def descent_states(
    files: Sequence[Path] | None, shares: Sequence[float], record: dict[str, Any], *, resume: bool
) -> list[StateFile | None]:
    """For each share, where its descent's state is kept, if anywhere.

    Raises
    ------
    InputError
        If a file holds another descent, or any without `resume`.
    """
    if files is None:
        return [None] * len(shares)
    return [
        StateFile(file, {**record, "budget": share}, resume=resume)
        for file, share in zip(files, shares, strict=True)
    ]


def provenance(
    share: float,
    settings: DescentSettings,
    policies: Sequence[Policy],
    found: SampleSet,
    *,
    held_out_losses: FloatArray,
    uniform_losses: FloatArray,
    seed: int,
    detail: str,
) -> dict[str, Any]:
    """What every budget profile of a descent tells of how it was decided.

    Parameters
    ----------
    share : float
        Of all entries, that was asked for.
    settings : DescentSettings
    policies : sequence of Policy
        On offer.
    found : SampleSet
        What it was decided on.
    held_out_losses, uniform_losses : ndarray of float64, (n_held_out,)
        Of the whole reduced cache on each held-out prompt, as decided and with equal budgets, nats
        per token.
    seed : int
    detail : str
        One sentence on what came of it.

    Returns
    -------
    dict
        Fields of `kvalloc.BudgetProfile`.
    """
    reached = float(held_out_losses.mean())
    return {
        "solver": "descent",
        "solver_options": {
            "steps": settings.steps,
            "batch": settings.batch,
            "continuation_tokens": settings.continuation_tokens,
            "learning_rate": settings.learning_rate,
            "seed": seed,
            "policies": [policy.title for policy in policies],
        },
        "decided_by": "descent",
        "detail": detail,
        "objective": -reached,
        "predicted_loss": reached,
        "termination": "heuristic",
        "requested": {
            "target": "budget",
            "value": share,
            "budget": share,
            "objective": "loss",
            "text": found.description,
            "text_digest": found.digest(),
            "predicted_on_prompts": int(held_out_losses.size),
            "predicted_interval": interval([held_out_losses], seed=seed),
            "predicted_with_equal_budgets": float(uniform_losses.mean()),
        },
        "versions": versions(*MEASURED_WITH),
        "created": utc_date(),
    }
