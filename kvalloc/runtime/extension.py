"""Extensions: everything built on top of a cache, behind one contract."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.models.attention import AttentionStates, Compute


class Extension:
    """Listens to one cache. Each method does nothing by default.

    A copy of the cache copies its extensions.
    """

    def begin(self, cache: Any, arguments: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return the arguments of a forward, without tokens already read."""
        return arguments

    def appended(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Note new keys and values of any layer, (rows, n_kv_heads, n_new, head_dim)."""

    def cuts(self, cache: Any, end: int) -> Iterable[int]:
        """Return the columns at which a forward up to ``end`` is read in pieces."""
        return ()

    def read(self, cache: Any) -> None:
        """Note a read piece of a forward, but not its last; no eviction is due."""

    def record(self, cache: Any, start: int | None) -> bool:
        """Return whether tokens from a column on can be taken back."""
        return False

    def refuse_taking_back(self, cache: Any) -> None:
        """Refuse a forward of several tokens that could not be taken back."""

    @property
    def holds(self) -> bool:
        """Whether evictions after a forward wait, since tokens may be taken back."""
        return False

    def planned(self, targets: Mapping[int, IntArray]) -> None:
        """Check the entries that are to stay in layers, (n_rows, n_kv_heads)."""

    def answer(self, cache: Any, store: Any, states: AttentionStates, compute: Compute) -> Any:
        """Return a reduced layer's answer to one new token; None leaves it to the cache."""
        return None

    def crop(self, cache: Any, end: int) -> None:
        """Prepare for a crop to ``end`` columns; may change the cache's layers."""

    def cropped(self, cache: Any) -> None:
        """Note that a cache has been cut."""

    def reset(self) -> None:
        """Note that the cache was reset."""
