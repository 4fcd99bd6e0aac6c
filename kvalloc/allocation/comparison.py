"""The difference between two budget profiles of one model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.allocation.request import Request
from kvalloc.errors import InputError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.policy import counted
from kvalloc.formats.shipped_profiles import load_profile


@dataclass(frozen=True, kw_only=True)
class ProfileDifference:
    """What changed from a first budget profile to a second.

    Attributes
    ----------
    difference : ndarray of int64, (n_layers, n_kv_heads)
        Budgets of the second less those of the first, at the first one's context, entries.
    moved_entries : int
        Entries that the second keeps and the first does not, or the other way, whichever is more.
    retained_bytes : tuple of int
        Of the first and the second, at that context, one row.
    retention : tuple of float or None
        Predicted, as each profile states it.
    fields : dict of tuple of str
        Other things that differ: solver, level, scorer, policies, target, bits.
    """

    difference: IntArray
    moved_entries: int
    retained_bytes: tuple[int, int]
    retention: tuple[float | None, float | None]
    fields: dict[str, tuple[str, str]]

    @property
    def same(self) -> bool:
        """Whether the budgets agree everywhere."""
        return not self.difference.any()


def compare_profiles(
    first: BudgetProfile | str | Path, second: BudgetProfile | str | Path
) -> ProfileDifference:
    """Compare two budget profiles at the first one's context.

    Parameters
    ----------
    first, second : BudgetProfile, str or Path
        Or their files, or the names of shipped ones.

    Returns
    -------
    ProfileDifference

    Raises
    ------
    ModelMismatchError
        If they are for models of different sizes or names.
    InputError
        If the second one's model cannot have the first one's context.
    """
    first, second = load_profile(first), load_profile(second)
    first.shape.require_same_model(second.shape)
    context = first.context_tokens
    limit = second.shape.max_context_tokens
    if limit is not None and context > limit:
        raise InputError(f"the second profile's model ends at {limit} tokens, below {context}")
    difference = second.budgets_for(context) - first.budgets
    gained = int(difference[difference > 0].sum())
    lost = int(-difference[difference < 0].sum())
    named = {
        "solver": (first.solver, second.solver),
        "level": (first.level, second.level),
        "scorer": (first.policy.scorer, second.policy.scorer),
        **_policies(first, second),
        "context": (str(context), str(second.context_tokens)),
        "target": (_target(first), _target(second)),
        "bits": (_bits(first), _bits(second)),
    }
    return ProfileDifference(
        difference=difference,
        moved_entries=max(gained, lost),
        retained_bytes=(first.retained_bytes_at(context), second.retained_bytes_at(context)),
        retention=(first.retention, second.retention),
        fields={name: pair for name, pair in named.items() if pair[0] != pair[1]},
    )


def _bits(profile: BudgetProfile) -> str:
    if profile.bits is None:
        return "16 everywhere"
    widths, counts = np.unique(profile.bits, return_counts=True)
    heads = zip(widths[::-1].tolist(), counts[::-1].tolist(), strict=True)
    return ", ".join(f"{width} in {count} heads" for width, count in heads)


def _policies(first: BudgetProfile, second: BudgetProfile) -> dict[str, tuple[str, str]]:
    """Return how many heads have which policy, if any head differs between the profiles."""
    titles = [profile.policy_titles for profile in (first, second)]
    changed = int((titles[0] != titles[1]).sum())
    if not changed or (first.unit_policies is None and second.unit_policies is None):
        return {}  # with one policy each, the scorers tell
    full = list(first.shape.full_layers)
    before, after = (counted(table[full]) for table in titles)
    return {"policies": (before, f"{after} heads; {changed} have another")}


def _target(profile: BudgetProfile) -> str:
    if (request := Request.stated(profile)) is None:
        return "not recorded"
    by_loss = request.objective == "loss"
    return request.target.describe("predicted loss" if by_loss else "retention")
