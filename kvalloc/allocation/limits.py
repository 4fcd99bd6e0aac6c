"""What engines ask for beyond one target, as a user says it: caps, few sizes, ranks, equal heads.

`Limits` holds the words of the command line; `Limits.constraints` makes the side constraints of a
problem out of them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.errors import InputError, option
from kvalloc.problem import GroupCap, MaxDistinct, RankBalance, SameBudget, SideConstraint
from kvalloc.shape import ModelShape
from kvalloc.units import parse_bytes, parse_indices

RANK_TOLERANCE = 0.02
"""The largest rank stores at most this share more than the mean one, unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class LayerCap:
    """A capacity for some layers.

    Attributes
    ----------
    layers : tuple of int
        Layer indices.
    capacity_bytes : int
        Most bytes they may store together, sliding layers among them included.
    text : str
        As the user wrote it.
    """

    layers: tuple[int, ...]
    capacity_bytes: int
    text: str

    @property
    def name(self) -> str:
        """How messages call it, such as ``"layers 0-15"``."""
        which = self.text.partition("=")[0]
        return f"layer{'s' if len(self.layers) > 1 else ''} {which}"

    @classmethod
    def parse(cls, text: str) -> LayerCap:
        """A cap from ``"0-15=256MiB"``.

        Raises
        ------
        InputError
            If it is not ``LAYERS=SIZE``.

        Examples
        --------
        >>> LayerCap.parse("0-1=1KiB")
        LayerCap(layers=(0, 1), capacity_bytes=1024, text='0-1=1KiB')
        """
        which, equals, size = str(text).partition("=")
        if not equals or not which.strip() or not size.strip():
            raise InputError(f"the cap {str(text)!r} is not LAYERS=SIZE, such as 0-15=256MiB")
        try:
            layers, capacity = parse_indices(which), parse_bytes(size.strip())
        except InputError as error:
            raise InputError(f"the cap {str(text)!r}: {error}") from None
        return cls(
            layers=layers,
            capacity_bytes=capacity,
            text=f"{''.join(which.split())}={''.join(size.split())}",
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What must hold beside the target.

    Attributes
    ----------
    max_distinct : int or None
        At most so many different budgets in the whole model.
    ranks : int or None
        Tensor-parallel ranks that the KV heads are placed on.
    rank_tolerance : float or None
        The largest rank's bytes are at most this share above the mean; `RANK_TOLERANCE` if None.
    equal_heads : bool
        All heads of a layer get the same budget, in a problem of single heads.
    cap : tuple of str
        Capacities of some layers, each as ``"0-15=256MiB"``; they may nest and overlap.

    Raises
    ------
    InputError
        If one of them cannot be, or a tolerance is given without ranks.
    """

    max_distinct: int | None = None
    ranks: int | None = None
    rank_tolerance: float | None = None
    equal_heads: bool = False
    cap: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.max_distinct is not None and self.max_distinct < 1:
            raise InputError(
                f"at most {self.max_distinct} different budgets is not possible; give "
                f"{option('max_distinct', 1)} or more"
            )
        if self.ranks is not None and self.ranks < 1:
            raise InputError(f"{self.ranks} ranks hold nothing; give {option('ranks', 1)} or more")
        tolerance = self.rank_tolerance
        if tolerance is not None and self.ranks is None:
            raise InputError(
                f"{option('rank_tolerance')} says nothing without {option('ranks')}; give both or "
                "neither"
            )
        if tolerance is not None and not 0 <= tolerance < math.inf:
            raise InputError(
                f"a rank tolerance of {tolerance:g} is no share above the mean; give a number >= "
                f"0, such as {option('rank_tolerance', 0.02)}"
            )
        for text in self.cap:
            LayerCap.parse(text)

    @property
    def caps(self) -> tuple[LayerCap, ...]:
        """The caps, parsed."""
        return tuple(LayerCap.parse(text) for text in self.cap)

    @property
    def tolerance(self) -> float:
        """The rank tolerance that holds."""
        return RANK_TOLERANCE if self.rank_tolerance is None else self.rank_tolerance

    def check_level(self, level: str) -> None:
        """Refuse what only makes sense for single heads.

        Raises
        ------
        InputError
            With the way out.
        """
        if level == "head":
            return
        if self.ranks is not None:
            raise InputError(
                f"{option('ranks')} places single KV heads, and at layer level all heads of a "
                f"layer are one unit; use {option('level', 'head')} (with "
                f"{option('equal_heads', True)} for one budget a layer)"
            )
        if self.equal_heads:
            raise InputError(
                f"{option('equal_heads')} is what {option('level', 'layer')} does in any case; "
                f"leave it out, or use {option('level', 'head')}"
            )

    def constraints(
        self, *, shape: ModelShape, layers: IntArray, sliding_layer_bytes: int
    ) -> tuple[SideConstraint, ...]:
        """The side constraints of a problem.

        Parameters
        ----------
        shape : ModelShape
            The model.
        layers : ndarray of int64, (n_units,)
            Layer of each unit.
        sliding_layer_bytes : int
            What one sliding layer stores whatever is decided; it counts towards its caps.

        Returns
        -------
        tuple of SideConstraint
            Caps in the order given, then equal heads, distinct budgets, ranks.

        Raises
        ------
        InputError
            If a cap names a layer that the model does not have, or no layer with a budget.
        """
        found: list[SideConstraint] = [
            _group_cap(cap, shape, layers, sliding_layer_bytes) for cap in self.caps
        ]
        if self.equal_heads:
            groups = (np.flatnonzero(layers == layer).tolist() for layer in np.unique(layers))
            found.append(SameBudget(groups=tuple(tuple(group) for group in groups)))
        if self.max_distinct is not None:
            found.append(MaxDistinct(most=self.max_distinct))
        if self.ranks is not None:
            found.append(RankBalance(n_ranks=self.ranks, tolerance=self.tolerance))
        return tuple(found)

    def describe(self) -> dict[str, Any]:
        """What was asked, as plain values; nothing where nothing was asked."""
        values: dict[str, Any] = {"cap": list(self.cap)} if self.cap else {}
        if self.equal_heads:
            values["equal_heads"] = True
        if self.max_distinct is not None:
            values["max_distinct"] = self.max_distinct
        if self.ranks is not None:
            values |= {"ranks": self.ranks, "rank_tolerance": self.tolerance}
        return values

    @classmethod
    def of(cls, asked: dict[str, Any]) -> Limits:
        """The limits that `describe` described, among other things that were asked.

        Raises
        ------
        InputError
            If they are not what `describe` writes.
        """
        names = {field.name for field in fields(cls)}
        values = {name: value for name, value in asked.items() if name in names}
        try:
            return cls(**{**values, "cap": tuple(values.get("cap", ()))})
        except (TypeError, ValueError) as error:
            raise InputError(f"the limits {values} are not what 'kvalloc solve' writes") from error


def _group_cap(
    cap: LayerCap, shape: ModelShape, layers: IntArray, sliding_layer_bytes: int
) -> GroupCap:
    beyond = [layer for layer in cap.layers if layer >= shape.n_layers]
    if beyond:
        raise InputError(
            f"{option('cap', cap.text)} names layer {beyond[0]}, and {shape.model_id} has layers "
            f"0-{shape.n_layers - 1}; name some of those"
        )
    sliding = sum(shape.layer_types[layer] == "sliding" for layer in cap.layers)
    if sliding == len(cap.layers):
        raise InputError(
            f"{option('cap', cap.text)} names only sliding-window layers, which store "
            f"{sliding * sliding_layer_bytes:,} bytes whatever is decided; leave it out"
        )
    return GroupCap(
        name=cap.name,
        units=tuple(np.flatnonzero(np.isin(layers, cap.layers)).tolist()),
        capacity_bytes=cap.capacity_bytes - sliding * sliding_layer_bytes,
    )
