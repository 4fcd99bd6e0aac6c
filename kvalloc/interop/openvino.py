"""OpenVINO GenAI's cache eviction."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvalloc.errors import InputError, MissingDependencyError
from kvalloc.files import write_text
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.interop.target import ExportTarget, reading, scored

BLOCK_TOKENS = 32
"""Tokens of a CPU's block; a GPU has blocks of 16, so these are whole numbers of them."""


class OpenVINO(ExportTarget):
    """A ``CacheEvictionConfig``: first and last tokens, and equally many entries in each head.

    Entries rank by the attention of the prompt's last tokens (as in SnapKV) and of generated
    tokens. These count in ``max_cache_size``, unlike in a budget.

    References
    ----------
    openvino_genai 2026.4, CacheEvictionConfig and SchedulerConfig.
    """

    name = "openvino"
    summary = "OpenVINO GenAI's CacheEvictionConfig and cache precision, JSON"
    says = "one size for all heads, in blocks of 32 tokens; sinks and window; one precision"
    restrictions = (
        *("one-length", "one-width", "engine-policy"),
        *("heads-to-layers", "layers-to-uniform", "whole-blocks"),
    )
    widths: ClassVar[Mapping[int, str]] = {16: "f16", 8: "u8", 4: "u4"}
    block_tokens = BLOCK_TOKENS
    engine_keeps = "what the prompt's last tokens look at, in blocks of 32 tokens"

    def policy(self, profile: BudgetProfile) -> Policy:
        """Return SnapKV with sinks and window in whole blocks."""
        sizes = (profile.policy.sinks, profile.policy.window)
        sinks, window = (BLOCK_TOKENS * max(1, -(-size // BLOCK_TOKENS)) for size in sizes)
        return scored("snapkv", sinks=sinks, window=window)

    def write(self, profile: BudgetProfile, path: Path) -> None:
        """Write the file of `scheduler_config`.

        Raises
        ------
        InputError
            If nothing can be evicted between sinks and window.
        """
        policy, entries = profile.policy, int(profile.budgets[profile.shape.full_layers[0], 0])
        if entries <= policy.protected_tokens:
            raise InputError(
                f"openvino: {entries} entries a head are no more than its {policy.sinks} first and "
                f"{policy.window} last tokens; give a larger budget or a longer context"
            )
        width = self.widths[int(profile.widths[profile.shape.full_layers[0], 0])]
        config = {
            "cache_eviction_config": {
                "start_size": policy.sinks,
                "recent_size": policy.window,
                "max_cache_size": entries,
                "aggregation_mode": "NORM_SUM",
            },
            "ov_config": {"KV_CACHE_PRECISION": width},
            "from": profile.digest,
        }
        write_text(path, json.dumps(config, indent=2))


def scheduler_config(path: str | Path) -> Any:
    """Return a ``SchedulerConfig`` from a file of ``kvalloc export``.

    Raises
    ------
    MissingDependencyError
        If openvino_genai is not installed.
    InputError
        If the file is not valid.
    """
    try:
        import openvino_genai
    except ImportError as error:
        raise MissingDependencyError(
            "openvino_genai is not installed; get it with: pip install openvino-genai"
        ) from error
    with reading(path, "is no cache eviction config of 'kvalloc export --to openvino'"):
        stated = json.loads(Path(path).read_bytes())["cache_eviction_config"]
        mode = getattr(openvino_genai.AggregationMode, stated["aggregation_mode"])
        eviction = openvino_genai.CacheEvictionConfig(**stated | {"aggregation_mode": mode})
    config = openvino_genai.SchedulerConfig()
    config.use_cache_eviction, config.cache_eviction_config = True, eviction
    return config
