"""L1 norms of projected values."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvalloc.errors import UnsupportedModelError
from kvalloc.models.attention import AttentionStates
from kvalloc.models.structure import plain_weight

if TYPE_CHECKING:
    from torch import Tensor

_BLOCK_TOKENS = 1024


def projected_value_norms(states: AttentionStates) -> Tensor:
    """Return norms of projected values, float32, (batch, n_kv_heads, n_tokens).

    ``mean over the group's query heads h of || v W_O[h] ||_1``; the scratch is
    ``batch x 1024 x hidden_size``.

    Raises
    ------
    UnsupportedModelError
        If the layer has no output projection of plain numbers, or it is offloaded.

    References
    ----------
    `CriticalKV`, Algorithm 1, line 3; the mean over a group is as in its code.
    """
    import torch

    batch, n_kv_heads, n_tokens, head_dim = states.values.shape
    n_query_heads = states.queries.shape[1]
    group = n_query_heads // n_kv_heads
    first_column = states.first_head * group * head_dim
    layer = states.output_projection
    weight = torch.empty(0, device="cpu") if layer is None else plain_weight(layer)
    n_columns = weight.shape[1] if weight.ndim == 2 and weight.is_floating_point() else 0
    if n_columns % (group * head_dim) or n_columns < first_column + n_query_heads * head_dim:
        raise UnsupportedModelError(
            "CriticalKV needs a layer's output projection, o_proj.weight of (hidden_size, query "
            "heads x head_dim), which this model does not have; use another policy"
        )
    if weight.device.type == "meta":
        raise UnsupportedModelError(
            f"CriticalKV needs the output projection of layer {states.layer}, which is offloaded; "
            "keep the layers on devices, or use another scorer"
        )
    norms = torch.zeros(
        (batch, n_kv_heads, n_tokens), dtype=torch.float32, device=states.values.device
    )
    for query_head in range(n_query_heads):
        head = query_head // group
        start = first_column + query_head * head_dim
        projection = weight[:, start : start + head_dim].to(states.values.device).float().T
        for first in range(0, n_tokens, _BLOCK_TOKENS):
            block = states.values[:, head, first : first + _BLOCK_TOKENS].float() @ projection
            norms[:, head, first : first + _BLOCK_TOKENS] += block.abs_().sum(dim=-1)
    return norms.div_(group)
