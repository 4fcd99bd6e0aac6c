"""The demo's second half: what reducing each layer does to the answers, and budgets from that."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from kvalloc.allocation.decision import solve
from kvalloc.evaluate.showcase import Rule
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.prompts.calibration import calibration_prompts

if TYPE_CHECKING:
    from kvalloc.models.loading import LoadedModel

LOSS = "least loss"
UNIFORM = "uniform, tova"
"""The same ranking with the same budget everywhere: tells the budgets' share in what is seen."""

SCORER = "tova"
"""All heads of a layer then keep much the same tokens, so that no needle is lost between them."""
KINDS = ("needle", "kl")
"""Questions that a text answers, and running text."""


def profile_losses(
    loaded: LoadedModel,
    *,
    n_prompts: int,
    context_tokens: int,
    progress: Callable[[int, int], None] | None = None,
) -> ScoreProfile:
    """Measure what reducing each layer alone does, on prompts that no question shares a word with.

    Parameters
    ----------
    loaded : LoadedModel
    n_prompts : int
        Half of them needles, half running text.
    context_tokens : int
        Reference context; no prompt is longer.
    progress : callable, optional
        As in `kvalloc.profile`.

    Returns
    -------
    ScoreProfile
        With loss curves of layers.
    """
    from kvalloc.measure import profile

    prompts = calibration_prompts(loaded.tokenizer, n_prompts, context_tokens, kinds=KINDS)
    return profile(
        loaded.model,
        loaded.tokenizer,
        prompts,
        samples=len(prompts),
        context=context_tokens,
        scorer=SCORER,
        loss="measured",
        loss_level="layer",
        progress=progress,
        model_id=loaded.model_id,
    )


def harm_rules(losses: ScoreProfile, context_tokens: int) -> dict[str, Rule]:
    """Budgets of least loss, and equal budgets over the same ranking.

    Parameters
    ----------
    losses : ScoreProfile
        From `profile_losses`.
    context_tokens : int
        Prompt length that the budgets are for.

    Returns
    -------
    dict of callable
        By the name to show; each gives budgets at a share of all entries.
    """
    return {
        LOSS: partial(_least_loss, losses, context_tokens),
        UNIFORM: partial(_uniform, losses, context_tokens),
    }


def _least_loss(losses: ScoreProfile, context_tokens: int, share: float) -> BudgetProfile:
    return solve(losses, budget=share, context=context_tokens, objective="loss")


def _uniform(losses: ScoreProfile, context_tokens: int, share: float) -> BudgetProfile:
    return solve(losses, budget=share, context=context_tokens, objective="mean", solver="uniform")
