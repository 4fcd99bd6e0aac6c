"""How many bytes of tensor storage are alive, followed operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveStorage(TorchDispatchMode):
    """While open, sums what operations have allocated and is still referenced.

    Attributes
    ----------
    peak_bytes : int
        Most at any one time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak_bytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._most = 0  # what was alive when it was last looked at, and all that has come since
        # A reference, if a weak one, keeps the address: it would be given to new storage otherwise.
        self._known: dict[int, StorageWeakRef] = {}

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        for leaf in tree_leaves((args, kwargs)):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._live:  # weights and inputs, there before
                    self._known.setdefault(storage._cdata, StorageWeakRef(storage))
        result = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(result):
            if isinstance(leaf, torch.Tensor):
                storage = leaf.untyped_storage()
                if storage._cdata not in self._known and storage._cdata not in self._live:
                    self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
                    self._most += storage.nbytes()
        if self._most > self.peak_bytes:  # else it cannot be a peak, whatever has gone since
            self.peak_bytes = max(self.peak_bytes, self.bytes)
        return result

    @property
    def bytes(self) -> int:
        """Alive now."""
        self._live = {key: item for key, item in self._live.items() if not item[0].expired()}
        self._most = sum(size for _, size in self._live.values())
        return self._most


def peak_bytes(run: Callable[[], Any]) -> int:
    """Most bytes alive at any time while ``run()`` runs, what was there before left out."""
    with LiveStorage() as storage:
        run()
    return storage.peak_bytes
