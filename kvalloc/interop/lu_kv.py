"""LU-KV's prune ratios."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.accounting.rounding import apportion
from kvalloc.files import atomic_write
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.interop.target import ExportTarget, check_numbers, imported_heads, reading

TOTALS = np.arange(1, 100) / 100
"""Share of all entries that is evicted, one a row of the file."""


class LUKV(ExportTarget):
    """An array ``[99, n_layers, n_kv_heads]``: row i prunes i + 1 percent of all entries.

    Numbers are heads' evicted shares. The row nearest to the profile has its budgets; others scale
    them. The policy is not in the file: LUKVPress takes a press, ``sink`` and ``window``.

    References
    ----------
    Predicting Future Utility (arXiv 2602.08585); kvpress 0.5.5, ``LUKVPress``.
    """

    name = "lu-kv"
    summary = "LU-KV's budget curves for kvpress' LUKVPress, .npy"
    says = "of each head the share of the entries that it keeps"
    restrictions = ("length-shares", "one-width", "plain-scores")
    suffix = ".npy"

    def write(self, profile: BudgetProfile, path: Path) -> None:
        """Write the curves."""
        full, context = list(profile.shape.full_layers), profile.context_tokens
        decided = profile.budgets[full].ravel()
        kept = decided.sum() / (decided.size * context)
        floor = min(profile.policy.protected_tokens, context)
        curves = np.zeros((len(TOTALS), *profile.budgets.shape))
        nearest = int(np.abs(TOTALS - (1 - kept)).argmin())
        for row, evicted in enumerate(TOTALS):
            total = max(round((1 - evicted) * decided.size * context), floor * decided.size)
            budgets = decided
            if row != nearest:
                scaled = decided * (total / decided.sum())
                budgets = apportion(scaled, total, minimum=floor, maximum=context)
            curves[row, full] = 1 - budgets.reshape(len(full), -1) / context
        with atomic_write(path) as temporary, open(temporary, "wb") as file:
            np.save(file, curves)

    def read(
        self, path: Path, like: BudgetProfile, *, evicted: float | None = None
    ) -> BudgetProfile:
        """Read the budgets at one total; see `ExportTarget.read`.

        ``evicted`` is its share of all entries, ``compression_ratio``, 0.01..0.99; by default as
        ``like``.
        """
        # np.load would open archives, too, and not close them
        with reading(path, "is no file of LU-KV"), open(path, "rb") as file:
            curves: FloatArray = np.lib.format.read_array(file, allow_pickle=False)
            check_numbers(curves, (len(TOTALS), *like.budgets.shape))
        full, context = list(like.shape.full_layers), like.context_tokens
        if evicted is None:
            evicted = 1 - like.budgets[full].mean() / context
        ratios = curves[min(98, max(0, round(evicted * 100) - 1)), full].clip(0, 1)
        return imported_heads(like, path, (1 - ratios).ravel() * context)
