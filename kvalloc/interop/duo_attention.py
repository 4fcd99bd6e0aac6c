"""DuoAttention's full and streaming heads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from kvalloc.files import make_folder, write_text
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.interop.target import (
    ExportTarget,
    by_policy,
    check_numbers,
    imported,
    reading,
    scored,
    with_decided,
)

HEADS = "full_attention_heads.tsv"


class DuoAttention(ExportTarget):
    """A folder with ``full_attention_heads.tsv`` and ``config.json``.

    The table has a row a layer and a number a KV head: 1 keeps everything, 0 ``sink_size`` first
    and ``recent_size`` last tokens.

    References
    ----------
    DuoAttention (Xiao et al., 2024); ``load_attn_pattern`` and ``sparsify_attention_heads`` of its
    code.
    """

    name = "duo-attention"
    summary = "DuoAttention's full_attention_heads.tsv with its config.json, a folder"
    says = "of each head whether it keeps everything, or sinks and recent tokens"
    restrictions = (
        *("length-shares", "one-width", "engine-policy"),
        "full-or-streaming",
    )
    suffix = ""
    engine_keeps = "sinks and the most recent tokens in streaming heads"

    def policy(self, profile: BudgetProfile) -> Policy:
        """Return StreamingLLM with the smallest head's entries as sinks and window."""
        smallest = int(profile.budgets[list(profile.shape.full_layers)].min())
        sinks, window = profile.policy.sinks, profile.policy.window
        return scored("streaming", sinks=sinks, window=max(1, window, smallest - sinks))

    def write(self, profile: BudgetProfile, path: Path) -> None:
        """Write both files."""
        heads = profile.budgets == profile.context_tokens
        heads[list(profile.shape.constant_layers)] = False
        make_folder(path)
        rows = ["\t".join(f"{one:.1f}" for one in row) for row in heads]
        write_text(path / HEADS, "\n".join(rows))
        sizes = {"sink_size": profile.policy.sinks, "recent_size": profile.policy.window}
        write_text(path / "config.json", json.dumps(sizes))

    def read(
        self, path: Path, like: BudgetProfile, *, sparsity: float | None = None
    ) -> BudgetProfile:
        """Read the folder; see `ExportTarget.read`.

        A share ``sparsity`` of the heads streams, the smallest numbers first; by default numbers
        below one half.
        """
        with reading(path, f"is no pattern of DuoAttention, a folder with {HEADS} and config.json"):
            rows = [row for row in (path / HEADS).read_text("utf-8").splitlines() if row.strip()]
            if not rows:
                raise ValueError(f"{HEADS} is empty")
            heads = np.atleast_2d(np.loadtxt(rows, dtype=float, delimiter="\t"))
            sizes = json.loads((path / "config.json").read_bytes())
            sinks, recent = int(sizes["sink_size"]), int(sizes["recent_size"])
            if min(sinks, recent) < 0:
                raise ValueError(f"sink_size is {sinks}, recent_size {recent}, expected >= 0")
            check_numbers(heads, like.budgets.shape)
        limit = 0.5 if sparsity is None else float(np.quantile(heads.clip(0, 1), sparsity))
        retrieval = heads.clip(0, 1)[list(like.shape.full_layers)] >= limit
        few = min(sinks + recent, like.context_tokens)
        return imported(
            like,
            path,
            level="head",
            length_rule="proportional",
            budgets=with_decided(like, np.where(retrieval, like.context_tokens, few)),
            bits=None,
            **by_policy(scored("streaming", sinks=sinks, window=recent)),
        )
