"""Nearest profiles that other engines can express, with each loss named.

The user accepts each loss by name. The result keeps the first profile's bytes, so ``kvalloc eval``
measures the cost of the loss.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.costs import MIXES, constant_entries
from kvalloc.accounting.rounding import apportion
from kvalloc.errors import (
    InputError,
    MissingDependencyError,
    UnsupportedRequestError,
    one_line,
    one_of,
    several,
)
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.shape import ModelShape


class ExportTarget(ABC):
    """An engine or a file that takes budgets.

    ``name`` is the value of ``--to``, ``summary`` the file and its reader. ``says`` are the parts
    of a profile that it expresses; ``restrictions`` names others, of `RESTRICTIONS`. ``suffix`` is
    empty for a folder. ``widths`` are its names for bits of entries; with ``bits_by_layer`` some
    layers can stay at 16. It keeps whole blocks of ``block_tokens`` entries. ``engine_keeps`` are
    entries that it picks itself, in words.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    says: ClassVar[str]
    restrictions: ClassVar[tuple[str, ...]] = ()
    suffix: ClassVar[str] = ".json"
    widths: ClassVar[Mapping[int, str]] = {16: "auto"}
    bits_by_layer: ClassVar[bool] = False
    block_tokens: ClassVar[int] = 1
    engine_keeps: ClassVar[str] = ""

    def policy(self, profile: BudgetProfile) -> Policy:
        """Return the policy nearest to the engine's."""
        return profile.policy

    @abstractmethod
    def write(self, profile: BudgetProfile, path: Path) -> None:
        """Write a profile that `restrict` has returned."""

    def read(self, path: Path, like: BudgetProfile) -> BudgetProfile:
        """Read budgets from a file; ``like`` has model, context and policy.

        Raises
        ------
        UnsupportedRequestError
            If such files hold too little.
        InputError
            If the file does not fit the model.
        """
        raise UnsupportedRequestError(f"a file of {self.name} says too little to be read back")


Loss = tuple[str, dict[str, Any]]
"""The loss of a profile, in words, and the changes of fields that leave the nearest profile.

``real_budgets`` among the changes may be any real numbers; they are scaled to the bytes of the
profile.
"""

Restriction = Callable[[BudgetProfile, ExportTarget], "Loss | None"]
"""Returns the loss of a profile by a part that an engine cannot express; None for no loss."""


def restrict(
    profile: BudgetProfile, target: ExportTarget, accept: Collection[str] = ()
) -> BudgetProfile:
    """Return the nearest profile that a target can express; the same object without a loss.

    It keeps no more bytes at the reference context, unless the target cannot evict. Bound and
    objective are not stated.

    Raises
    ------
    InputError
        If a loss is not in ``accept``, or there is no such restriction.
    """
    for name in accept:
        one_of("loss to accept", name, RESTRICTIONS)
    losses = lost(profile, target)
    refused = [f"{name} ({words})" for name, words in losses.items() if name not in accept]
    if refused:
        raise InputError(
            f"{target.name} cannot say all of this profile; lost would be {'; '.join(refused)}. "
            f"Accept that with {several(accept=tuple(losses))}"
        )
    if not losses:
        return profile
    left, max_bytes = profile, None if "no-eviction" in losses else profile.retained_bytes
    for restriction in (RESTRICTIONS[name] for name in losses):
        if (loss := restriction(left, target)) is not None:
            left = _changed(left, loss[1], max_bytes)
    return left.replace(
        solver="restriction",
        decided_by=profile.decided_by or profile.solver,
        detail=f"{profile.digest[:12]} restricted to {target.name}: {', '.join(losses)}",
    )


def lost(profile: BudgetProfile, target: ExportTarget) -> dict[str, str]:
    """Return a profile's losses in words, by restriction."""
    return {
        name: loss[0]
        for name, restriction in RESTRICTIONS.items()
        if name in target.restrictions and (loss := restriction(profile, target)) is not None
    }


def at_length(profile: BudgetProfile, context_tokens: int, *, fixed: bool) -> BudgetProfile:
    """Return a profile with another reference context; if ``fixed``, longer prompts keep no more.

    Raises
    ------
    InputError
        If the budgets do not fit that length.
    """
    kept = ("page_tokens",) if fixed else ("page_tokens", "share_of_16_bits")
    changes = _UNDECIDED | {name: getattr(profile, name) for name in kept}
    changes |= {"context_tokens": context_tokens, "budgets": profile.budgets_for(context_tokens)}
    return profile.replace(**changes | ({"length_rule": "fixed"} if fixed else {}))


def full_profile(shape: ModelShape, context_tokens: int) -> BudgetProfile:
    """Return a profile that keeps everything, for `ExportTarget.read`."""
    budgets = constant_entries(shape, context_tokens)
    budgets[list(shape.full_layers)] = context_tokens
    return BudgetProfile(
        shape=shape,
        level="head",
        context_tokens=context_tokens,
        budgets=budgets,
        policy=scored("streaming", sinks=4, window=8),
    )


def scored(scorer: str, *, sinks: int, window: int) -> Policy:
    """Return a scorer's policy at its other defaults."""
    return Policy(scorer=scorer, scorer_parameters={"window": window}, sinks=sinks, window=window)


@contextmanager
def reading(path: str | Path, what: str) -> Iterator[None]:
    """Raise InputError with ``what`` for any error inside but MissingDependencyError."""
    try:
        yield
    except MissingDependencyError:
        raise
    except Exception as error:
        raise InputError(f"{path} {what}: {one_line(error)}") from error


def check_numbers(array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless numbers are finite and of this shape."""
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"its numbers are shaped {array.shape}, expected finite ones, {shape}")


def imported(like: BudgetProfile, path: Path, **values: Any) -> BudgetProfile:
    """Return ``like`` with a file's values, and without the facts of its decision.

    Raises
    ------
    InputError
        If the budgets do not fit the model.
    """
    try:
        return like.replace(
            **_UNDECIDED | values, solver="file", decided_by="", detail=f"read from {path}"
        )
    except InputError as error:
        raise InputError(f"{path} does not fit {like.shape.model_id}: {error}") from error


def imported_heads(like: BudgetProfile, path: Path, entries: FloatArray) -> BudgetProfile:
    """Return `imported` with the whole budgets nearest to ``entries``, as shares at any length.

    ``entries`` are (n_full_layers * n_kv_heads,); sinks and window stay in any case.
    """
    context = like.context_tokens
    floor = min(like.policy.protected_tokens, context)
    total = max(round(float(entries.sum())), floor * entries.size)
    rows = apportion(entries, total, minimum=floor, maximum=context)
    budgets = with_decided(like, rows.reshape(-1, like.shape.n_kv_heads))
    return imported(like, path, level="head", length_rule="proportional", budgets=budgets)


_UNDECIDED: dict[str, Any] = {
    name: BudgetProfile.model_fields[name].get_default(call_default_factory=True)
    for name in (
        *("solver_options", "sense", "objective", "bound", "bound_source", "prices"),
        *("termination", "value_per_mib", "price_source", "limits", "requested"),
        *("retention", "predicted_loss", "model_error", "measured_loss"),
        *("problem_digest", "share_of_16_bits", "target_share", "fits_a_peak", "plain_if_full"),
        "page_tokens",
    )
}
"""Defaults of the fields that no longer hold with changed budgets."""


def _changed(
    profile: BudgetProfile, changes: dict[str, Any], max_bytes: int | None
) -> BudgetProfile:
    """Return a profile with other fields, real-valued budgets rounded to at most these bytes."""
    changes = {**_UNDECIDED, **changes}
    policy, budgets = changes.get("policy", profile.policy), changes.pop("real_budgets", None)
    if budgets is None and ("bits" in changes or policy != profile.policy):
        budgets = profile.budgets
    if budgets is None:
        return profile.replace(**changes)
    columns = 1 if changes.get("level", profile.level) == "layer" else profile.shape.n_kv_heads
    context = profile.context_tokens
    exact: FloatArray = _full(profile, budgets)[:, :columns].astype(np.float64)
    floor = min(policy.protected_tokens, context)
    sizes = profile.model_copy(update=changes)

    def rounded(total: int) -> IntArray:
        scaled = exact.ravel() * (total / exact.sum())
        rows = apportion(scaled, total, minimum=floor, maximum=context)
        return with_decided(profile, rows.reshape(exact.shape))

    def needed_bytes(total: int) -> int:
        return sizes.model_copy(update={"budgets": rounded(total)}).retained_bytes

    totals = range(floor * exact.size, context * exact.size + 1)
    if max_bytes is None:
        return profile.replace(**changes, budgets=rounded(totals[-1]))
    largest = bisect_right(totals, max_bytes, key=needed_bytes) - 1
    if largest < 0:
        raise InputError(
            f"sinks and window alone, {floor} tokens in every head, take more than the "
            f"{max_bytes:,} bytes of this profile once it is restricted; give a larger budget"
        )
    return profile.replace(**changes, budgets=rounded(totals[largest]))


def _full(profile: BudgetProfile, array: IntArray) -> IntArray:
    return array[list(profile.shape.full_layers)]


def with_decided(profile: BudgetProfile, decided: npt.ArrayLike) -> IntArray:
    """Return budgets with other ones in the layers that get some."""
    budgets = profile.budgets.copy()
    budgets[list(profile.shape.full_layers)] = decided
    return budgets


def by_policy(policy: Policy) -> dict[str, Any]:
    """Return fields for entries kept by a policy alone."""
    return {"policy": policy, "by_prompt": False}


def _one_length(profile: BudgetProfile, _: ExportTarget) -> Loss | None:
    if profile.length_rule == "fixed" and profile.share_of_16_bits is None:
        return None
    words = f"budgets that follow the prompt's length: {profile.context_tokens:,} tokens count"
    return words, {"length_rule": "fixed"}


def _length_shares(profile: BudgetProfile, _: ExportTarget) -> Loss | None:
    words = "the same number of entries at any length"
    if profile.share_of_16_bits is not None:
        words = "budgets as a share of a 16-bit cache's bytes"
    elif profile.length_rule != "fixed":
        return None
    return f"{words}: shares of the entries count", {"length_rule": "proportional"}


def _no_eviction(profile: BudgetProfile, _: ExportTarget) -> Loss | None:
    kept = _full(profile, profile.budgets).mean() / profile.context_tokens
    words = f"the eviction of {1 - kept:.0%} of the entries: all are kept"
    everything = with_decided(profile, profile.context_tokens)
    return None if kept == 1 else (words, {"budgets": everything})


def _one_width(profile: BudgetProfile, target: ExportTarget) -> Loss | None:
    """Round at a target's narrowest widths not below the profile's."""
    if profile.bits is None:
        return None
    bits, decided = np.full_like(profile.bits, 16), _full(profile, profile.bits)
    widest = [[max(MIXES.get(one, (one,))) for one in heads] for heads in decided.tolist()]
    highest = np.max(widest, axis=1, keepdims=True)
    layers = np.array([min(w for w in target.widths if w >= high) for high in highest.flat])
    rounded = layers[layers != 16] if target.bits_by_layer else layers
    if rounded.size:
        width = np.where(layers != 16, rounded.max(), 16)
        bits[list(profile.shape.full_layers)] = width[:, None]
    if (bits == profile.bits).all():
        return None
    before, after = (
        "/".join(map(str, np.unique(one)[::-1])) for one in (decided, _full(profile, bits))
    )
    words = f"entries at {before} bits: it has {after} bits for them, and keeps fewer"
    return words, {"bits": bits}


def _more_than_scores(profile: BudgetProfile) -> list[str]:
    needs = ["budgets that each prompt hands out among the heads"] if profile.by_prompt else []
    if (name := profile.policy.name) != "score":
        needs.append(f"the policy {name} (fitted values and all)")
    return needs


def _plain_scores(profile: BudgetProfile, _: ExportTarget) -> Loss | None:
    words = ", ".join(_more_than_scores(profile))
    plain = profile.policy.replace(name="score", parameters={})
    return (words, by_policy(plain)) if words else None


def _engine_policy(profile: BudgetProfile, target: ExportTarget) -> Loss | None:
    policy, engine, more = profile.policy, target.policy(profile), _more_than_scores(profile)
    if policy == engine and not more:
        return None
    kept = f"entries by {policy.scorer}, {policy.sinks} sinks, window {policy.window}"
    words = f"{', '.join([*more, kept])}: the engine keeps {target.engine_keeps}"
    return words, by_policy(engine)


def _full_or_streaming(profile: BudgetProfile, _: ExportTarget) -> Loss | None:
    """Let the heads with the largest budgets keep all, within the same entries."""
    budgets, context = _full(profile, profile.budgets), profile.context_tokens
    few = profile.policy.protected_tokens
    if np.isin(budgets, (few, context)).all():
        return None
    classes = np.full(budgets.size, few)
    n_full = (int(budgets.sum()) - few * budgets.size) // max(1, context - few)
    classes[np.argsort(-budgets, axis=None, kind="stable")[:n_full]] = context
    words = "budgets between a few recent entries and all: heads keep one or other"
    decided = with_decided(profile, classes.reshape(budgets.shape))
    return words, {"level": "head", "budgets": decided}


def _heads_to_layers(profile: BudgetProfile, _: ExportTarget) -> Loss | None:
    budgets = _full(profile, profile.budgets)
    if (budgets == budgets[:, :1]).all():
        return None
    means = np.broadcast_to(profile.budgets.mean(axis=1, keepdims=True), profile.budgets.shape)
    words = "budgets of single heads: each layer's mean counts"
    return words, {"level": "layer", "real_budgets": means}


def _layers_to_uniform(profile: BudgetProfile, target: ExportTarget) -> Loss | None:
    sums = _full(profile, profile.budgets).sum(axis=1)
    words = "budgets of single layers: their mean counts"
    return None if (sums == sums[0]).all() else (words, _uniform(profile, target))


def _whole_blocks(profile: BudgetProfile, target: ExportTarget) -> Loss | None:
    uneven = (_full(profile, profile.budgets) % target.block_tokens).any()
    words = f"budgets that are no whole blocks of {target.block_tokens} entries"
    return (words, _uniform(profile, target)) if uneven else None


def _uniform(profile: BudgetProfile, target: ExportTarget) -> dict[str, Any]:
    mean = _full(profile, profile.budgets).mean() // target.block_tokens * target.block_tokens
    return {"level": "layer", "budgets": with_decided(profile, int(mean))}


RESTRICTIONS: dict[str, Restriction] = {
    "one-length": _one_length,
    "length-shares": _length_shares,
    "no-eviction": _no_eviction,
    "one-width": _one_width,
    "plain-scores": _plain_scores,
    "engine-policy": _engine_policy,
    "full-or-streaming": _full_or_streaming,
    "heads-to-layers": _heads_to_layers,
    "layers-to-uniform": _layers_to_uniform,
    "whole-blocks": _whole_blocks,
}
"""All restrictions, in the order of their application."""
