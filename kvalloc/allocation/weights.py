"""Weights of layers or heads: how much each counts in what is optimised."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.errors import InputError
from kvalloc.shape import ModelShape

Weights = Sequence[float] | Sequence[Sequence[float]] | FloatArray

SHAPES = "one number a layer, or one a KV head as a list of lists"


def checked_weights(weights: Weights) -> tuple[Any, ...]:
    """Weights as plain tuples, as far as they can be checked without a model.

    Parameters
    ----------
    weights : sequence or ndarray of float, (n_layers,) or (n_layers, n_kv_heads)
        Each at least 0, not all 0.

    Returns
    -------
    tuple of float, or tuple of tuple of float

    Raises
    ------
    InputError
        If they are no such numbers.

    Examples
    --------
    >>> checked_weights([1, 0.5])
    (1.0, 0.5)
    """
    try:
        array = np.asarray(weights, dtype=np.float64)
    except (TypeError, ValueError):
        raise InputError(
            f"weights are {str(weights)[:60]!r}, which are no table of numbers; give {SHAPES}"
        ) from None
    if array.ndim not in (1, 2) or array.size == 0:
        raise InputError(f"weights are shaped {array.shape}; give {SHAPES}")
    wrong = ~np.isfinite(array) | (array < 0)
    if np.any(wrong):
        place = np.argwhere(wrong)[0].tolist()
        raise InputError(
            f"the weight of {_place(place)} is {array[tuple(place)]:g}, expected a finite number "
            "from 0 up"
        )
    if not np.any(array > 0):
        raise InputError("all weights are 0, so nothing would count; give at least one above 0")
    listed = array.tolist()
    return tuple(tuple(row) if isinstance(row, list) else row for row in listed)


def head_weights(shape: ModelShape, weights: Weights) -> FloatArray:
    """Weights of every KV head of the full-attention layers, with a mean of 1.

    Parameters
    ----------
    shape : ModelShape
    weights : sequence of float
        From `checked_weights`.

    Returns
    -------
    ndarray of float64, (n_full_layers, n_kv_heads)

    Raises
    ------
    InputError
        If they do not fit the model, or none counts that has a budget.
    """
    array = np.asarray(weights, dtype=np.float64)
    expected = (shape.n_layers, shape.n_kv_heads)
    if array.shape not in (expected[:1], expected):
        raise InputError(
            f"weights are shaped {array.shape}, and {shape.model_id} has {shape.n_layers} layers "
            f"of {shape.n_kv_heads} KV heads; give {SHAPES}"
        )
    if array.ndim == 1:
        array = np.repeat(array[:, None], shape.n_kv_heads, axis=1)
    decided: FloatArray = array[list(shape.full_layers)]
    mean = float(decided.mean())
    if mean <= 0:
        raise InputError(
            "all weights of full-attention layers are 0, and only those get budgets; give at "
            "least one above 0"
        )
    return decided / mean


def read_weights(path: str | Path) -> tuple[Any, ...]:
    """Weights from a JSON file: a list of numbers, or of lists of numbers.

    Raises
    ------
    InputError
        If there is no such file, or it holds no such list.
    """
    try:
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"cannot read the weights in {path} ({error.strerror})") from error
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is no JSON ({error}); write weights as {SHAPES}") from error
    if not isinstance(data, list):
        raise InputError(f"{path} holds no list; write weights as {SHAPES}")
    try:
        return checked_weights(data)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error


def _place(indices: list[int]) -> str:
    layer = f"layer {indices[0]}"
    return layer if len(indices) == 1 else f"{layer}, head {indices[1]}"
