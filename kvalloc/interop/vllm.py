"""vLLM's engine arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

from kvalloc.errors import InputError, option
from kvalloc.files import write_text
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.interop.target import ExportTarget


class VLLM(ExportTarget):
    """The cache's data type, and the layers at 16 bits.

    vLLM evicts nothing within a layer. Its 8 bits are fp8 with a scale a tensor, its 4 bits
    integers with a scale a token and head; kvalloc's scales are for groups of 64.

    References
    ----------
    vLLM 0.33, ``CacheConfig``: cache_dtype (``--kv-cache-dtype``), kv_cache_dtype_skip_layers.
    """

    name = "vllm"
    summary = "vLLM's engine arguments for the cache's data type, JSON"
    says = "bits: one width for some layers, 16 for the others; it evicts nothing"
    restrictions = ("no-eviction", "one-width")
    widths: ClassVar[Mapping[int, str]] = {16: "auto", 8: "fp8", 4: "int4_per_token_head"}
    bits_by_layer = True

    def write(self, profile: BudgetProfile, path: Path) -> None:
        """Write keywords of ``vllm.LLM``, or flags of ``vllm serve``.

        Raises
        ------
        InputError
            If every entry is at 16 bits.
        """
        bits, full = profile.widths[:, 0].tolist(), profile.shape.full_layers
        width = min(bits[layer] for layer in full)
        if width == 16:
            raise InputError(
                "vllm: this profile rounds no layer, and vLLM evicts nothing, so nothing of it "
                f"would be left; decide bits, too, with {option('bits', (16, 8, 4))}"
            )
        arguments: dict[str, Any] = {"kv_cache_dtype": self.widths[width]}
        skipped = [str(layer) for layer in range(len(bits)) if bits[layer] == 16]
        if skipped:
            arguments["kv_cache_dtype_skip_layers"] = skipped
        write_text(path, json.dumps(arguments, indent=2))
