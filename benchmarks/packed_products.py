"""A model's products with its weights by oneDNN instead of by the BLAS that torch was built with.

What a cache can save of a decoded token is bounded by what the model takes without one. In float32
that is the products of a few rows with each weight, and there some processors' BLAS reads the
weights at a fraction of the memory's speed. oneDNN, which torch brings along and which compiled
models use, packs each weight once. A benchmark that uses it does so for all that it compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["packed_products"]


@contextmanager
def packed_products(model: Any, rows: int) -> Iterator[None]:
    """Inside, every linear layer of the model multiplies by oneDNN, packed for so many rows.

    Parameters
    ----------
    model : PreTrainedModel
        On the CPU, in float32. Its results change by rounding only, which is checked.
    rows : int
        Rows of a step; other numbers give the same results, slower.

    Raises
    ------
    RuntimeError
        If the products of both libraries differ by more than rounding.
    """
    layers = [module for module in model.modules() if type(module) is nn.Linear]
    for layer in layers:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), rows)
        product = partial(_product, packed=packed, bias=layer.bias)
        _check(layer, product, rows)
        layer.forward = product
    try:
        yield
    finally:
        for layer in layers:
            del layer.forward


def _product(states: Tensor, *, packed: Tensor, bias: Tensor | None) -> Tensor:
    result: Tensor = torch.ops.mkldnn._linear_pointwise(states, packed, bias, "none", [], "")
    return result


@torch.no_grad()
def _check(layer: nn.Linear, product: partial[Tensor], rows: int) -> None:
    states = torch.randn(rows, layer.in_features, generator=torch.Generator().manual_seed(0))
    expected, result = layer(states), product(states)
    if not torch.allclose(expected, result, rtol=1e-5, atol=1e-5 * float(expected.abs().max())):
        raise RuntimeError("oneDNN's product differs from torch's by more than rounding")
