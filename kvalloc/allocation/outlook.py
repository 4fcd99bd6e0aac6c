"""What budgets by retention are predicted to lose, and what their bytes could reach."""

from __future__ import annotations

from kvalloc.accounting.costs import WIDTHS
from kvalloc.allocation.decision import decide
from kvalloc.allocation.formulation import PosedRequest
from kvalloc.allocation.request import Request
from kvalloc.errors import KVAllocError, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.shipped_profiles import find_fitted, load_fitted, while_unchanged
from kvalloc.problem.registry import get_solver


def loss_outlook(profile: BudgetProfile) -> str:
    """Return one line on the loss of budgets that were decided by retention.

    The fitted file of the model predicts it: the sum of single losses at these budgets, times the
    model error. Beside it stands the least that is predicted for the same bytes.

    Parameters
    ----------
    profile : BudgetProfile

    Returns
    -------
    str
        Without a fitted file, the command that finds it out; empty if the profile states a loss or
        was not decided by retention.
    """
    if profile.retention is None or profile.predicted_loss is not None:
        return ""
    unknown = "retention does not tell what answers lose"
    if (file := find_fitted(profile.shape)) is None:
        return f"{unknown}: run 'kvalloc fit {profile.shape.model_id}' once to know"
    share = min(profile.share, 1.0)
    try:
        lost, best = _predicted_losses(file, profile, share)
    except KVAllocError as error:  # a length or a share that its curves do not cover
        return f"{unknown}, nor does {file}: {error}"
    if lost is None or best is None:
        return f"{unknown}, and these budgets are below the curves of {file}"
    return (
        f"predicted to lose {lost:.2g} nats a token; {option('budget', f'{share:.1%}')} could lose "
        f"{best:.2g} in the same bytes (curves of {file})"
    )


@while_unchanged(maxsize=16)
def _predicted_losses(
    file: str, profile: BudgetProfile, share: float
) -> tuple[float | None, float | None]:
    """Return the predicted loss of budgets, and of the best ones in their bytes."""
    scores, widths = load_fitted(file).scores, sorted({*WIDTHS} - {16})
    request = Request.parse(
        budget=share, context=profile.context_tokens, level="head", objective="loss", bits=widths
    )
    posed = PosedRequest(scores=scores, request=request)
    lost = posed.predicted_loss(profile.budgets, profile.bits)
    best = decide(posed, get_solver("lagrangian"), priced=False)
    if lost is not None:
        lost *= scores.error_at(share) or 1.0
    return lost, best.expected_loss
