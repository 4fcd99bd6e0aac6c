"""What listens to a cache: all that the runtime knows of anything built on top of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.models.attention import AttentionStates, Compute


class Extension:
    """Listens to one cache. Each method does nothing by default.

    A copy of the cache has copies of its extensions.
    """

    def begin(self, cache: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a forward, which may leave out tokens already read."""
        return arguments

    def appended(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Note new keys and values of any layer, (rows, n_kv_heads, n_new, head_dim)."""

    def cuts(self, cache: Any, end: int) -> Iterable[int]:
        """Return the columns at which a forward up to ``end`` is to be read in pieces."""
        return ()

    def read(self, cache: Any) -> None:
        """Note that a piece of a forward, but not its last, has been read; nothing of it is due."""

    def record(self, cache: Any, start: int | None) -> bool:
        """Return whether it takes back what a caller says may be taken back from a column on."""
        return False

    def refuse_taking_back(self, cache: Any) -> None:
        """Refuse, if that cannot be right, that several tokens come that may be taken back."""

    @property
    def holds(self) -> bool:
        """Whether evictions after a forward wait, since some of it may be taken back."""
        return False

    def planned(self, targets: Mapping[int, IntArray]) -> None:
        """Refuse how many entries are to stay of layers, (n_rows, n_kv_heads), if need be."""

    def answer(self, cache: Any, store: Any, states: AttentionStates, compute: Compute) -> Any:
        """Return a reduced layer's answer to one new token; None to leave it to the cache."""
        return None

    def crop(self, cache: Any, end: int) -> None:
        """Prepare for a cache to be cut to ``end`` columns; may change its layers."""

    def cropped(self, cache: Any) -> None:
        """Note that a cache has been cut."""

    def reset(self) -> None:
        """Note that all is forgotten."""
