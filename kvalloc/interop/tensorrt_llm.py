"""TensorRT-LLM's windows, sinks and precision."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

from kvalloc.files import write_text
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.interop.target import ExportTarget, scored


class TensorRTLLM(ExportTarget):
    """The part ``kv_cache_config`` of the YAML file that ``trtllm-serve --config`` reads.

    A layer's window holds sinks and most recent tokens, and moves on with generated ones. It also
    holds while the prompt is read: queries never see earlier tokens.

    References
    ----------
    TensorRT-LLM 1.2, ``KvCacheConfig``; only the TensorRT engine has sink_token_length
    (StreamingLLM).
    """

    name = "tensorrt-llm"
    summary = "TensorRT-LLM's kv_cache_config: a window for each layer, YAML"
    says = "one size for each layer, of sinks and the most recent tokens; one precision"
    restrictions = (
        *("one-length", "one-width", "engine-policy"),
        "heads-to-layers",
    )
    suffix = ".yaml"
    widths: ClassVar[Mapping[int, str]] = {16: "auto", 8: "fp8", 4: "nvfp4"}
    engine_keeps = "sinks and the most recent tokens"

    def policy(self, profile: BudgetProfile) -> Policy:
        """Return StreamingLLM."""
        policy = profile.policy
        return scored("streaming", sinks=policy.sinks, window=policy.window)

    def write(self, profile: BudgetProfile, path: Path) -> None:
        """Write it, without reuse of blocks of another prompt's window."""
        windows = [int(budget) for budget in profile.budgets[:, 0]]
        shape = profile.shape
        for layer in shape.constant_layers:  # what transformers stores is one token less
            windows[layer] = shape.by_layer[layer].window or windows[layer]
        # layers without entries of their own have no window there
        windows = [
            one for one, layer in zip(windows, shape.by_layer, strict=True) if layer.kv_heads
        ]
        write_text(
            path,
            f"""\
# {shape.model_id}: budgets of {profile.context_tokens} tokens, profile {profile.digest[:12]}
kv_cache_config:
  max_attention_window: {windows}
  sink_token_length: {profile.policy.sinks}
  dtype: {self.widths[int(profile.widths[shape.full_layers[0], 0])]}
  enable_block_reuse: false
""",
        )
