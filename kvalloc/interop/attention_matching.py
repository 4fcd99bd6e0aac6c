"""Attention Matching's head budgets."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from kvalloc.files import write_text
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.interop.target import ExportTarget, imported_heads, reading


class AttentionMatching(ExportTarget):
    """A JSON object with each budgeted KV head's share of all kept entries, for any total.

    References
    ----------
    Attention Matching (Zweiger et al., arXiv 2602.16284); its code,
    ``head_budget_optimization/head_budgets``.
    """

    name = "attention-matching"
    summary = "Attention Matching's head budgets, .json"
    says = "of each head its share of all entries that are kept"
    restrictions = ("length-shares", "one-width", "plain-scores")

    def write(self, profile: BudgetProfile, path: Path) -> None:
        """Write the shares."""
        names = _names(profile)
        kept = profile.budgets[list(profile.shape.full_layers)]
        shares = (kept / kept.sum()).ravel().tolist()
        write_text(path, json.dumps(dict(zip(names, shares, strict=True)), indent=2))

    def read(self, path: Path, like: BudgetProfile, *, kept: float | None = None) -> BudgetProfile:
        """Read the budgets at one total; see `ExportTarget.read`.

        ``kept`` is its share of all entries, 0..1, by default as ``like``.
        """
        names = _names(like)
        with reading(path, "has no head budgets of Attention Matching"):
            shares = json.loads(path.read_bytes())
            if not isinstance(shares, dict) or shares.keys() != {*names}:
                raise ValueError(
                    f"expected a share for each of the {len(names)} heads {names[0]} to "
                    f"{names[-1]} of {like.shape.model_id}"
                )
            entries = np.array([float(shares[name]) for name in names])
            if not (np.isfinite(entries).all() and entries.min() >= 0 and entries.max() > 0):
                raise ValueError("expected shares from 0 on, not all of them 0")
        if kept is None:
            kept = like.budgets[list(like.shape.full_layers)].mean() / like.context_tokens
        total = kept * entries.size * like.context_tokens
        return imported_heads(like, path, entries / entries.sum() * total)


def _names(profile: BudgetProfile) -> list[str]:
    heads = range(profile.shape.n_kv_heads)
    return [f"L{layer}H{head}" for layer in profile.shape.full_layers for head in heads]
