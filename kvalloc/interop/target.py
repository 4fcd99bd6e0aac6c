"""What a foreign engine cannot express of a budget profile, and the nearest that it can.

A profile says more than most engines do. What one of them cannot say is never dropped silently:
each loss has a name, a `Restriction`, that the user accepts. What is left is a budget profile
again, at the bytes of the first, so that ``kvalloc eval`` measures what the loss costs.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.costs import sliding_entries
from kvalloc.accounting.rounding import apportion
from kvalloc.errors import (
    InputError,
    MissingDependencyError,
    UnsupportedRequestError,
    one_line,
    one_of,
    several,
)
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.policy import Policy
from kvalloc.shape import ModelShape


class ExportTarget(ABC):
    """An engine or a file that takes budgets: what it cannot say, and how it is written and read.

    Attributes
    ----------
    name : str
        What ``--to`` takes.
    summary : str
        What is written, and for whom.
    says : str
        What of a profile stands in it.
    restrictions : tuple of str
        Names of what it cannot say (`RESTRICTIONS`), in any order.
    suffix : str
        Usual ending of its files.
    widths : mapping of int to str
        Its names for the widths of entries, by bits.
    bits_by_layer : bool
        Whether it can leave layers at 16 bits and round the others.
    block_tokens : int
        Entries of a block; it keeps whole blocks.
    engine_keeps : str
        Which entries it keeps, in words, where it picks them itself.
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
        """Return kvalloc's policy that is nearest to how the engine picks entries."""
        return profile.policy

    @abstractmethod
    def write(self, profile: BudgetProfile, path: Path) -> None:
        """Write what is left of a profile once everything is gone that cannot be said."""

    def read(self, path: Path, like: BudgetProfile) -> BudgetProfile:
        """Read budgets from a file; model, context and policy come from another profile.

        Raises
        ------
        UnsupportedRequestError
            If files of this kind say too little.
        InputError
            If the file does not fit the model.
        """
        raise UnsupportedRequestError(f"a file of {self.name} says too little to be read back")


class Restriction(NamedTuple):
    """Something that a profile can say and some engines cannot.

    Attributes
    ----------
    lost : callable
        ``lost(profile, target)``: what a profile would lose, in words; empty for nothing.
    apply : callable
        ``apply(profile, target)``: what is left, as changes of fields. Budgets may be
        real-valued wishes; they are scaled to the bytes that the profile had.
    """

    lost: Callable[[BudgetProfile, ExportTarget], str]
    apply: Callable[[BudgetProfile, ExportTarget], dict[str, Any]]


def restrict(
    profile: BudgetProfile, target: ExportTarget, accept: Collection[str] = ()
) -> BudgetProfile:
    """Return the nearest profile that a target can express.

    Parameters
    ----------
    profile : BudgetProfile
    target : ExportTarget
    accept : collection of str
        Names of restrictions that may be applied.

    Returns
    -------
    BudgetProfile
        The same where nothing is lost. Otherwise its budgets keep no more bytes at the reference
        context than the first ones, unless the target can evict nothing; who solved it, and how
        well, is no longer stated.

    Raises
    ------
    InputError
        If something would be lost that is not accepted, or there is no such restriction.
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
    for one in (RESTRICTIONS[name] for name in losses):
        if one.lost(left, target):
            left = _changed(left, one.apply(left, target), max_bytes)
    return left.replace(
        solver="restriction",
        decided_by=profile.decided_by or profile.solver,
        detail=f"{profile.digest[:12]} restricted to {target.name}: {', '.join(losses)}",
    )


def lost(profile: BudgetProfile, target: ExportTarget) -> dict[str, str]:
    """Return what a target cannot express of a profile, by the names of the restrictions."""
    named = {name: one for name, one in RESTRICTIONS.items() if name in target.restrictions}
    words = {name: one.lost(profile, target) for name, one in named.items()}
    return {name: text for name, text in words.items() if text}


def at_length(profile: BudgetProfile, context_tokens: int, *, fixed: bool) -> BudgetProfile:
    """Return a profile whose reference context is another length.

    Parameters
    ----------
    profile : BudgetProfile
    context_tokens : int
    fixed : bool
        Whether longer prompts keep no more.

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
    """Return a profile that keeps everything: a start for `ExportTarget.read`.

    Parameters
    ----------
    shape : ModelShape
        `kvalloc.models.loading.shape_of` has it for a model.
    context_tokens : int
        Prompt that budgets are of, tokens.
    """
    budgets = np.full((shape.n_layers, shape.n_kv_heads), context_tokens, dtype=np.int64)
    budgets[list(shape.sliding_layers)] = sliding_entries(shape, context_tokens)
    return BudgetProfile(
        shape=shape,
        level="head",
        context_tokens=context_tokens,
        budgets=budgets,
        policy=scored("streaming", sinks=4, window=8),
    )


def scored(scorer: str, *, sinks: int, window: int) -> Policy:
    """Return the policy of a scorer with sinks and a window, and its other parameters' defaults."""
    return Policy(scorer=scorer, scorer_parameters={"window": window}, sinks=sinks, window=window)


@contextmanager
def reading(path: str | Path, what: str) -> Iterator[None]:
    """Say in one line what is wrong with a foreign file: its reader may fail in any way.

    Parameters
    ----------
    path : str or Path
    what : str
        What it turns out not to be, such as ``"is no file of LU-KV"``.

    Raises
    ------
    InputError
    """
    try:
        yield
    except MissingDependencyError:
        raise
    except Exception as error:
        raise InputError(f"{path} {what}: {one_line(error)}") from error


def check_numbers(array: npt.NDArray[Any], shape: tuple[int, ...]) -> None:
    """Raise ValueError unless a file's numbers are finite and of this shape."""
    if array.shape != shape or not np.isfinite(array).all():
        raise ValueError(f"its numbers are shaped {array.shape}, expected finite ones, {shape}")


def imported(like: BudgetProfile, path: Path, **values: Any) -> BudgetProfile:
    """Return a profile with the values of a foreign file, the rest from another profile.

    Parameters
    ----------
    like : BudgetProfile
        Has model, context and all that ``values`` do not.
    path : Path
        The file.
    **values
        Fields of the profile.

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


def imported_heads(like: BudgetProfile, path: Path, wanted: FloatArray) -> BudgetProfile:
    """Return `imported` with the budgets nearest to wanted ones, as shares at any length.

    Parameters
    ----------
    like : BudgetProfile
    path : Path
    wanted : ndarray of float64, (n_full_layers * n_kv_heads,)
        Entries of each head; sinks and window are kept in any case.
    """
    context = like.context_tokens
    floor = min(like.policy.protected_tokens, context)
    total = max(round(float(wanted.sum())), floor * wanted.size)
    rows = apportion(wanted, total, minimum=floor, maximum=context)
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
"""Defaults of the fields that no longer hold once budgets are changed."""


def _changed(
    profile: BudgetProfile, changes: dict[str, Any], max_bytes: int | None
) -> BudgetProfile:
    """Return a profile with other fields, real-valued budgets rounded to at most these bytes."""
    changes = {**_UNDECIDED, **changes}
    policy, wanted = changes.get("policy", profile.policy), changes.pop("wanted", None)
    if wanted is None and ("bits" in changes or policy != profile.policy):
        wanted = profile.budgets
    if wanted is None:
        return profile.replace(**changes)
    columns = 1 if changes.get("level", profile.level) == "layer" else profile.shape.n_kv_heads
    context = profile.context_tokens
    exact: FloatArray = _full(profile, wanted)[:, :columns].astype(np.float64)
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
    """Return the rows of layers that get budgets."""
    return array[list(profile.shape.full_layers)]


def with_decided(profile: BudgetProfile, decided: npt.ArrayLike) -> IntArray:
    """Return a profile's budgets with other ones in the layers that get some."""
    budgets = profile.budgets.copy()
    budgets[list(profile.shape.full_layers)] = decided
    return budgets


def _lengths(profile: BudgetProfile, _: ExportTarget) -> str:
    if profile.length_rule == "fixed" and profile.share_of_16_bits is None:
        return ""
    return f"budgets that follow the prompt's length: {profile.context_tokens:,} tokens count"


def _shares(profile: BudgetProfile, _: ExportTarget) -> str:
    if profile.share_of_16_bits is not None:
        return "budgets as a share of a 16-bit cache's bytes: shares of the entries count"
    fixed = profile.length_rule == "fixed"
    return "the same number of entries at any length: shares of the entries count" if fixed else ""


def _beyond_scores(profile: BudgetProfile) -> list[str]:
    """Return what a profile needs beyond the best entries by one score."""
    policy, names = profile.policy, []
    if profile.by_prompt:
        names.append("budgets that each prompt hands out among the heads")
    if policy.name != "score":
        names.append(f"the policy {policy.name} (fitted values and all)")
    return names


def alone(policy: Policy) -> dict[str, Any]:
    """Return the fields of a profile that keeps entries by a policy alone."""
    return {"policy": policy, "by_prompt": False}


def _engine_policy(profile: BudgetProfile, target: ExportTarget) -> str:
    policy, engine = profile.policy, target.policy(profile)
    beyond = _beyond_scores(profile)
    if policy == engine and not beyond:
        return ""
    kept = f"entries by {policy.scorer}, {policy.sinks} sinks, window {policy.window}"
    needs = ", ".join([*beyond, kept])
    return f"{needs}: the engine keeps {target.engine_keeps}"


def _width(bits: IntArray, target: ExportTarget) -> int:
    """Return the narrowest width of a target that loses nothing of these."""
    return min(width for width in target.widths if width >= int(bits.max()))


def _by_layer(profile: BudgetProfile, target: ExportTarget) -> IntArray:
    """Return the bits that a target can express, none below a profile's own."""
    assert profile.bits is not None  # asked of profiles that have some
    bits = np.full_like(profile.bits, 16)
    full = list(profile.shape.full_layers)
    layers = np.array([_width(profile.bits[layer], target) for layer in full])
    some = layers[layers < 16] if target.bits_by_layer else layers
    if some.size:
        bits[full] = np.where(layers < 16, some.max(), 16)[:, None]
    return bits


def _one_width(profile: BudgetProfile, target: ExportTarget) -> str:
    if profile.bits is None or (_by_layer(profile, target) == profile.bits).all():
        return ""
    before = "/".join(map(str, np.unique(_full(profile, profile.bits))[::-1]))
    after = "/".join(map(str, np.unique(_full(profile, _by_layer(profile, target)))[::-1]))
    return f"entries at {before} bits: it has {after} bits for them, and keeps fewer"


def _heads(profile: BudgetProfile, _: ExportTarget) -> str:
    budgets = _full(profile, profile.budgets)
    alike = (budgets == budgets[:, :1]).all()
    return "" if alike else "budgets of single heads: each layer's mean counts"


def _layer_means(profile: BudgetProfile, _: ExportTarget) -> dict[str, Any]:
    means = profile.budgets.mean(axis=1, keepdims=True)
    return {"level": "layer", "wanted": np.broadcast_to(means, profile.budgets.shape)}


def _layers(profile: BudgetProfile, _: ExportTarget) -> str:
    means = _full(profile, profile.budgets).sum(axis=1)
    return "" if (means == means[0]).all() else "budgets of single layers: their mean counts"


def _uniform(profile: BudgetProfile, target: ExportTarget) -> dict[str, Any]:
    """Return the largest common budget, in whole blocks, that takes no more bytes."""
    mean = _full(profile, profile.budgets).mean() // target.block_tokens * target.block_tokens
    return {"level": "layer", "budgets": with_decided(profile, int(mean))}


def _blocks(profile: BudgetProfile, target: ExportTarget) -> str:
    uneven = (_full(profile, profile.budgets) % target.block_tokens).any()
    return f"budgets that are no whole blocks of {target.block_tokens} entries" if uneven else ""


def _classes(profile: BudgetProfile, _: ExportTarget) -> str:
    few = profile.policy.protected_tokens
    two = np.isin(_full(profile, profile.budgets), (few, profile.context_tokens)).all()
    return "" if two else "budgets between a few recent entries and all: heads keep one or other"


def _full_or_streaming(profile: BudgetProfile, _: ExportTarget) -> dict[str, Any]:
    """Let the heads with the largest budgets keep all, within the entries of all."""
    budgets, context = _full(profile, profile.budgets), profile.context_tokens
    few = profile.policy.protected_tokens
    classes = np.full(budgets.size, few)
    n_full = (int(budgets.sum()) - few * budgets.size) // max(1, context - few)
    classes[np.argsort(-budgets, axis=None, kind="stable")[:n_full]] = context
    return {"level": "head", "budgets": with_decided(profile, classes.reshape(budgets.shape))}


def _evicts(profile: BudgetProfile, _: ExportTarget) -> str:
    kept = _full(profile, profile.budgets).mean() / profile.context_tokens
    return "" if kept == 1 else f"the eviction of {1 - kept:.0%} of the entries: all are kept"


RESTRICTIONS = {
    "one-length": Restriction(lost=_lengths, apply=lambda *_: {"length_rule": "fixed"}),
    "length-shares": Restriction(lost=_shares, apply=lambda *_: {"length_rule": "proportional"}),
    "no-eviction": Restriction(
        lost=_evicts,
        apply=lambda profile, _: {"budgets": with_decided(profile, profile.context_tokens)},
    ),
    "one-width": Restriction(
        lost=_one_width,
        apply=lambda profile, target: {"bits": _by_layer(profile, target)},
    ),
    "plain-scores": Restriction(
        lost=lambda profile, _: ", ".join(_beyond_scores(profile)),
        apply=lambda profile, _: alone(profile.policy.replace(name="score", parameters={})),
    ),
    "engine-policy": Restriction(
        lost=_engine_policy,
        apply=lambda profile, target: alone(target.policy(profile)),
    ),
    "full-or-streaming": Restriction(lost=_classes, apply=_full_or_streaming),
    "heads-to-layers": Restriction(lost=_heads, apply=_layer_means),
    "layers-to-uniform": Restriction(lost=_layers, apply=_uniform),
    "whole-blocks": Restriction(lost=_blocks, apply=_uniform),
}
"""All of them, in the order in which they are applied."""
