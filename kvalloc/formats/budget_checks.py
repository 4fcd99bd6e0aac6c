"""What can be wrong with a budget profile, whoever made it."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.stored_bytes import BIT_WIDTHS
from kvalloc.formats.policy import others_fault
from kvalloc.formats.sharing_groups import groups_fault

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile

__all__ = ["BY_SCORE", "budget_fault"]

BY_SCORE = ("score", "attention_matching")
"""Policies that keep the best by score, whatever they do with the rest."""

#: Field, what was found, what is expected.
Fault: TypeAlias = tuple[str, object, str]


def budget_fault(profile: BudgetProfile) -> Fault | None:
    """The first thing that is wrong with a profile: field, what was found, what is expected."""
    shape, budgets = profile.shape, profile.budgets
    expected = (shape.n_layers, shape.n_kv_heads)
    if budgets.shape != expected or budgets.dtype != np.int64:
        return "budgets", f"{budgets.dtype} shaped {budgets.shape}", f"int64 shaped {expected}"
    decided = budgets[list(shape.full_layers)]
    least, most = profile.policy.protected_tokens, profile.context_tokens
    if int(decided.min()) < min(least, most):
        layer = int(np.argmin(decided.min(axis=1)))
        return (
            "budgets",
            f"{int(decided.min())} in full-attention layer {shape.full_layers[layer]}",
            f"at least the {least} tokens of sinks and window",
        )
    if int(decided.max()) > most:
        return "budgets", int(decided.max()), f"at most the context of {most} tokens"
    if profile.level not in ("layer", "head"):
        return "level", profile.level, "'layer' or 'head'"
    if profile.level == "layer" and np.any(decided != decided[:, :1]):
        return "budgets", "different within a layer", "one budget for all KV heads of a layer"
    if profile.length_rule not in ("proportional", "fixed"):
        return "length_rule", profile.length_rule, "'proportional' or 'fixed'"
    if profile.predicted_loss is not None and not math.isfinite(profile.predicted_loss):
        return "predicted_loss", profile.predicted_loss, "finite nats per token, or None"
    if groups := groups_fault(profile.share_groups, shape.full_layers):
        return "share_groups", groups, "runs of adjacent layers from layer 2 on, in order"
    if any(np.any(budgets[list(g)] != budgets[g[0]]) for g in profile.share_groups):
        return "budgets", "different within a group", "one budget for layers that share entries"
    if profile.page_tokens < 1 or profile.batch < 1:
        return "page_tokens, batch", (profile.page_tokens, profile.batch), "numbers >= 1"
    if fault := _policy_fault(profile):
        return fault
    if profile.bits is not None and (fault := _bit_fault(profile, profile.bits)):
        return fault
    return None if profile.ranks is None else _rank_fault(profile, profile.ranks)


def _policy_fault(profile: BudgetProfile) -> Fault | None:
    table, others = profile.unit_policies, profile.other_policies
    if profile.by_prompt and (moving := _by_prompt_fault(profile)) is not None:
        return moving
    if profile.unit_weights is not None:
        return _weights_fault(profile, profile.unit_weights)
    if table is None:
        if not others:
            return None
        return "other_policies", "given", "unit_policies that say which KV head has which"
    if (fault := others_fault(profile.policy, others)) is not None:
        return "other_policies", *fault
    if table.shape != profile.budgets.shape or table.dtype != np.int64:
        expected = f"int64 shaped {profile.budgets.shape}"
        return "unit_policies", f"{table.dtype} shaped {table.shape}", expected
    if int(table.min()) < 0 or int(table.max()) > len(others):
        found = f"{int(table.min())}..{int(table.max())}"
        return "unit_policies", found, f"0..{len(others)}, places in the list of policies"
    sliding = [i for i in range(len(table)) if i not in profile.shape.full_layers]
    if np.any(table[sliding] != 0):
        return "unit_policies", "not 0 in a sliding layer", "0 there: nothing is decided"
    return None


def _bit_fault(profile: BudgetProfile, bits: IntArray) -> Fault | None:
    if bits.shape != profile.budgets.shape or bits.dtype != np.int64:
        return "bits", f"{bits.dtype} shaped {bits.shape}", f"int64 shaped {profile.budgets.shape}"
    unknown = set(np.unique(bits).tolist()) - set(BIT_WIDTHS)
    if unknown:
        return "bits", sorted(unknown), f"one of {', '.join(map(str, BIT_WIDTHS))} each"
    sliding = [i for i in range(len(bits)) if i not in profile.shape.full_layers]
    if np.any(bits[sliding] != 16):
        return "bits", "below 16 in a sliding layer", "16 there: nothing is decided"
    if profile.level == "layer" and np.any(bits != bits[:, :1]):
        return "bits", "different within a layer", "one width for all KV heads of a layer"
    return None


def _rank_fault(profile: BudgetProfile, ranks: IntArray) -> Fault | None:
    if ranks.shape != profile.budgets.shape or ranks.dtype != np.int64:
        shape = profile.budgets.shape
        return "ranks", f"{ranks.dtype} shaped {ranks.shape}", f"int64 shaped {shape}"
    if profile.level != "head":
        return "ranks", "given at layer level", "a placement of single heads, at head level"
    decided = np.zeros(len(ranks), dtype=np.bool_)
    decided[list(profile.shape.full_layers)] = True
    if np.any(ranks[decided] < 0) or np.any(ranks[~decided] != -1):
        return "ranks", "not right for each layer", "ranks >= 0, and -1 in sliding layers"
    return None


def _weights_fault(profile: BudgetProfile, weights: FloatArray) -> Fault | None:
    expected = (*profile.budgets.shape, 1 + len(profile.other_policies))
    if profile.unit_policies is not None:
        return "unit_weights", "given beside unit_policies", "one of the two"
    if (others := others_fault(profile.policy, profile.other_policies)) is not None:
        return "other_policies", *others
    if (other := _beyond_scores(profile)) is not None:
        return "unit_weights", f"given to the policy {other!r}", "scores alone can be weighted"
    if weights.shape != expected or weights.dtype != np.float64:
        return "unit_weights", f"{weights.dtype} shaped {weights.shape}", f"float64 {expected}"
    if not np.isfinite(weights).all() or float(weights.min()) < 0:
        return "unit_weights", "not finite or below 0", "finite numbers >= 0"
    some = weights.sum(axis=2) > 0
    full = np.zeros(len(weights), dtype=np.bool_)
    full[list(profile.shape.full_layers)] = True
    if not some[full].all() or some[~full].any():
        return "unit_weights", "not right for each layer", "some above 0; all 0 in sliding layers"
    return None


def _beyond_scores(profile: BudgetProfile) -> str | None:
    """The first policy that does not keep the best by score; the others do nothing more."""
    own, others = profile.policy, profile.other_policies
    names = [own.name] if own.name not in BY_SCORE else []
    return next((name for name in (*names, *(one.name for one in others)) if name != "score"), None)


def _by_prompt_fault(profile: BudgetProfile) -> Fault | None:
    """Budgets that each prompt hands out anew can keep a total, and nothing more."""
    fixed = {
        "layer level": profile.level != "head",
        "unit_policies, whose scores cannot be compared": profile.unit_policies is not None,
        "another policy than scores": _beyond_scores(profile) is not None,
        "layers that share entries": bool(profile.share_groups),
        "bits": profile.bits is not None,
        "ranks": profile.ranks is not None,
        "pages": profile.page_tokens > 1,
    }
    found = next((name for name, there in fixed.items() if there), None)
    return None if found is None else ("by_prompt", f"true with {found}", "false, or without")
