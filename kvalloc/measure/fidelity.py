"""What bit widths leave of one layer's attention output, checked."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.accounting.stored_bytes import BIT_WIDTHS
from kvalloc.errors import InputError, option

if TYPE_CHECKING:
    from kvalloc.models.attention import AttentionStates

FIDELITY_ROWS = 8
"""Rows of attention output that bits are judged by where the scorer has no window: XKV's ows."""


def checked_widths(bits: Sequence[int] | None) -> tuple[int, ...]:
    """Bit widths to measure, the widest first; none by default.

    Raises
    ------
    InputError
        If one is not 16, 8 or 4, or there is none in a list.
    """
    if bits is None:
        return ()
    widths = tuple(sorted(set(bits), reverse=True))
    if not widths or any(width not in BIT_WIDTHS for width in widths):
        known = ", ".join(map(str, BIT_WIDTHS))
        raise InputError(
            f"the bits are {list(bits)}, expected some of {known}, such as "
            f"{option('bits', (16, 8, 4))}"
        )
    return widths


def layer_fidelity(
    states: AttentionStates, bits: tuple[int, ...], *, window: int, model_id: str
) -> FloatArray:
    """Fidelity of each bit width in one layer.

    Parameters
    ----------
    states : AttentionStates
        What the layer's attention sees.
    bits : tuple of int
        From `checked_widths`.
    window : int
        The scorer's window, tokens; `FIDELITY_ROWS` stand in where it has none.
    model_id : str
        Named in errors.

    Returns
    -------
    ndarray of float64, (batch, n_kv_heads, n_bits)

    Raises
    ------
    InputError
        If the attention output is not finite.
    """
    # The runtime loads torch, and naming a scorer does not.
    from kvalloc.runtime.quantization import output_fidelity

    found = np.ones((*states.keys.shape[:2], len(bits)))
    for place, width in enumerate(bits):
        fidelity = output_fidelity(states, bits=width, rows=window or FIDELITY_ROWS)
        found[..., place] = fidelity.double().cpu().numpy()
        if not np.isfinite(found[..., place]).all():
            raise InputError(
                f"the attention output of {model_id} in layer {states.layer} at {width} bits is "
                "not finite; load the model in float32 or bfloat16, or check its weights"
            )
    return found
