"""What a score profile must be like: the first thing in it that cannot be."""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING

import numpy as np

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.stored_bytes import BIT_WIDTHS
from kvalloc.formats.policy import others_fault
from kvalloc.formats.sharing_groups import shared_fault

if TYPE_CHECKING:
    from kvalloc.formats.score_profile import ScoreProfile

CURVE_TOLERANCE = 1e-9
"""How far float64 rounding may take a curve from monotone or concave."""

LOSS_NOISE_NATS = 1e-3
"""A measured loss may be this far below 0 whatever the others are; see `_loss_fault`."""

Fault = tuple[str, object, str]


def first_fault(profile: ScoreProfile) -> Fault | None:
    """The first thing that cannot be, as (field, found, expected), or None.

    Parameters
    ----------
    profile : ScoreProfile
        Half made: its fields are set and nothing else is known of them.
    """
    shape, curves, ranks = profile.shape, profile.curves, profile.ranks
    if profile.sinks < 0 or profile.window < 0:
        return "sinks, window", (profile.sinks, profile.window), "numbers of tokens >= 0"
    if profile.evictable_tokens < 1:
        return (
            "context_tokens",
            profile.context_tokens,
            f"more than the {profile.protected_tokens} tokens of sinks and window",
        )
    if ranks.ndim != 1 or ranks.size < 2:
        return "ranks", f"shaped {ranks.shape}", "a list of at least two ranks"
    if ranks[0] != 0 or ranks[-1] != profile.evictable_tokens or np.any(np.diff(ranks) <= 0):
        return "ranks", f"{ranks[0]}..{ranks[-1]}", f"rising from 0 to {profile.evictable_tokens}"
    expected = (shape.n_layers, shape.n_kv_heads)
    if curves.ndim != 4 or curves.shape[0] < 1 or curves.shape[1:] != (*expected, ranks.size):
        return "curves", f"shaped {curves.shape}", f"(n_samples >= 1, {expected}, {ranks.size})"
    if profile.masses.shape != curves.shape[:3]:
        return "masses", f"shaped {profile.masses.shape}", str(curves.shape[:3])
    if profile.sample_tokens.shape != curves.shape[:1]:
        return "sample_tokens", f"shaped {profile.sample_tokens.shape}", str(curves.shape[:1])
    if not np.all(np.isfinite(profile.masses)) or np.any(profile.masses < 0):
        return "masses", "negative or not finite", "finite masses >= 0"
    if not 0 <= profile.interpolation_error < 1:
        return "interpolation_error", profile.interpolation_error, "a share within 0..1"
    # One layer of one sample at a time: with a long context, a copy of all curves is gigabytes.
    for sample, layer in itertools.product(range(profile.n_samples), shape.full_layers):
        fault = _curve_fault(curves[sample, layer], ranks)
        if fault is not None:
            return "curves", f"{fault[0]} in sample {sample}, layer {layer}", fault[1]
    return _loss_fault(profile) or _bit_fault(profile) or shared_fault(profile, CURVE_TOLERANCE)


def _curve_fault(curves: FloatArray, ranks: IntArray) -> tuple[str, str] | None:
    """What cannot be in the curves of a layer, ``(n_kv_heads, n_points)``: found, expected."""
    if not np.all(np.isfinite(curves)):
        head, point = np.argwhere(~np.isfinite(curves))[0].tolist()
        return f"not finite at head {head}, rank {ranks[point]}", "finite values"
    if curves.min() < -CURVE_TOLERANCE or curves.max() > 1 + CURVE_TOLERANCE:
        return f"{curves.min():.6g}..{curves.max():.6g}", "shares of mass within 0..1"
    if np.any(np.abs(curves[:, -1] - 1) > CURVE_TOLERANCE):
        return "not 1 when everything is kept", "R(all evictable entries) = 1"
    gains = np.diff(curves, axis=1)
    gains /= np.diff(ranks)
    if gains.min() < -CURVE_TOLERANCE:
        return "falling", "curves that rise with every entry"
    if np.diff(gains, axis=1).max(initial=0.0) > CURVE_TOLERANCE:
        return "not concave", "best entries first (concave)"
    return None


LOSS_METHODS = ("", "measured", "fast")
"""How losses can have come about; empty where a file does not tell."""


def _loss_fault(profile: ScoreProfile) -> Fault | None:
    """Loss curves are measured, so noise stays: a curve need not fall, nor be above 0 all along.

    What cannot be noise is refused: more nats below 0 than above it (a sign turned round), a loss
    where everything is kept (levels turned round).
    """
    levels, losses, stderr = profile.loss_tokens, profile.losses, profile.loss_stderr
    if levels is None or losses is None:
        if any(array is not None for array in (levels, losses, stderr, profile.loss_probed)):
            both = "both or neither (and loss_stderr)"
            return "loss_tokens, losses", "one without the other", both
        if profile.loss_method:
            return "loss_method", profile.loss_method, "losses to be told of"
        if profile.loss_policies or profile.other_losses is not None:
            return "other_losses", "given", "losses of the scorer's own entries beside them"
        return None
    if profile.loss_method not in LOSS_METHODS:
        return "loss_method", profile.loss_method, f"one of {', '.join(filter(None, LOSS_METHODS))}"
    if levels.ndim != 1 or levels.size < 2 or levels.dtype != np.int64:
        return "loss_tokens", f"{levels.dtype} shaped {levels.shape}", "int64, two levels or more"
    least, most = profile.protected_tokens, profile.context_tokens
    if np.any(np.diff(levels) <= 0) or levels[0] < max(1, least) or levels[-1] != most:
        return (
            "loss_tokens",
            f"{levels.tolist()[:4]}..{int(levels[-1])}",
            f"rising from at least {max(1, least)} (sinks and window) to the context of {most}",
        )
    columns = {1, profile.shape.n_kv_heads}
    fault = _losses_fault(profile, ("losses", "loss_stderr"), (losses, stderr), columns)
    fault = fault or _other_losses_fault(profile, losses.shape[2])
    return fault or _probed_fault(profile, (*losses.shape[1:3], len(profile.policies), levels.size))


def _probed_fault(profile: ScoreProfile, expected: tuple[int, ...]) -> Fault | None:
    probed = profile.loss_probed
    if probed is None:
        return None
    if (
        probed.shape != expected
        or probed.dtype != np.int64
        or np.any((probed != 0) & (probed != 1))
    ):
        found = f"{probed.dtype} shaped {probed.shape}"
        return "loss_probed", found, f"int64 of 0 and 1 shaped {expected}"
    return None


def _other_losses_fault(profile: ScoreProfile, columns: int) -> Fault | None:
    """The same of the policies beside the scorer's own, which are measured for the same units."""
    others, losses, stderr = profile.loss_policies, profile.other_losses, profile.other_loss_stderr
    if not others and losses is None and stderr is None:
        return None
    if not others or losses is None:
        return "loss_policies, other_losses", "one without the other", "both or neither"
    if (fault := others_fault(profile.policy, others)) is not None:
        return "loss_policies", *fault
    names = ("other_losses", "other_loss_stderr")
    return _losses_fault(profile, names, (losses, stderr), {columns}, (len(others),))


def _losses_fault(
    profile: ScoreProfile,
    names: tuple[str, str],
    arrays: tuple[FloatArray, FloatArray | None],
    columns: set[int],
    middle: tuple[int, ...] = (),
) -> Fault | None:
    """What cannot be in losses and their standard errors.

    They are shaped (n_samples, n_layers, one of `columns`, `middle`, n_levels).
    """
    assert profile.loss_tokens is not None  # the caller has looked
    losses, stderr = arrays
    rows, full = (profile.n_samples, profile.shape.n_layers), list(profile.shape.full_layers)
    sizes = {(*rows, heads, *middle, profile.loss_tokens.size) for heads in columns}
    for name, array in zip(names, arrays, strict=True):
        if array is None:
            continue
        if array.shape not in sizes or array.shape != losses.shape or array.dtype != np.float64:
            return name, f"{array.dtype} shaped {array.shape}", f"float64 shaped {sorted(sizes)}"
        decided = array[:, full]
        if not np.all(np.isfinite(decided)):
            sample, layer, head, *others = np.argwhere(~np.isfinite(decided))[0].tolist()
            policy = "".join(f", policy {place}" for place in others[:-1])
            place = f"sample {sample}, layer {full[layer]}, head {head}{policy}, level {others[-1]}"
            return name, f"not finite in {place}", "finite nats per token"
    if stderr is not None and np.any(stderr < 0):
        return names[1], "negative", "standard errors >= 0"
    decided = losses[:, full]
    if np.any(np.abs(decided[..., -1]) > CURVE_TOLERANCE):
        return names[0], "not 0 where everything is kept", "C(context) = 0, levels rising"
    low, high = float(decided.min()), float(decided.max())
    if low < -max(LOSS_NOISE_NATS, high):
        return (
            names[0],
            f"{low:.6g}..{high:.6g}",
            "KL in nats: what is lost, above 0 but for noise",
        )
    return None


def _bit_fault(profile: ScoreProfile) -> Fault | None:
    widths, fidelity = profile.bit_widths, profile.bit_fidelity
    if widths is None or fidelity is None:
        if widths is None and fidelity is None:
            return None
        return "bit_widths, bit_fidelity", "one without the other", "both or neither"
    known = ", ".join(map(str, BIT_WIDTHS))
    sound = widths.ndim == 1 and widths.size > 0 and widths.dtype == np.int64
    if not sound or np.unique(widths).size < widths.size or set(widths.tolist()) - set(BIT_WIDTHS):
        return "bit_widths", f"{widths.dtype} {widths.tolist()}", f"int64, each one of {known} once"
    expected = (*profile.curves.shape[:3], widths.size)
    if fidelity.shape != expected or fidelity.dtype != np.float64:
        return "bit_fidelity", f"{fidelity.dtype} shaped {fidelity.shape}", f"float64 {expected}"
    decided = fidelity[:, list(profile.shape.full_layers)]
    if not np.all(np.isfinite(decided)):
        return "bit_fidelity", "not finite", "finite values"
    if decided.min() < 0 or decided.max() > 1:
        return "bit_fidelity", f"{decided.min():.6g}..{decided.max():.6g}", "values within 0..1"
    if np.any(decided[..., widths == 16] != 1):
        return "bit_fidelity", "not 1 at 16 bits", "1 where nothing is changed"
    return None
