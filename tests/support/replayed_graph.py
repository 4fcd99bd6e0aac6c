"""What a CUDA graph does, without one: operations are noted once and repeated as they were.

Run as a program, with TRITON_INTERPRET=1, it decodes in place with the Triton kernel on the CPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any
from unittest import mock

import numpy as np
import runtime_oracle as tiny
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

import kvalloc
from kvalloc.runtime import hooks, in_place
from kvalloc.runtime.attention import backends, triton
from kvalloc.runtime.cache import BudgetCache


class Recording(TorchDispatchMode):
    """Notes operations and launches of Triton's that run inside, which `replay` repeats."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Callable[[], object]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Run it, and note it unless it makes a view or room alone."""
        out, named = func(*args, **(kwargs or {})), kwargs or {}
        given = {id(one) for one in tree_leaves((args, named))}
        made = [one for one in tree_leaves(out) if isinstance(one, Tensor) and id(one) not in given]

        def again() -> None:
            for old, new in zip(made, tree_leaves(func(*args, **named)), strict=False):
                old.copy_(new)

        if not func.is_view and "empty" not in func.overloadpacket.__name__:
            self.calls.append(again)
        return out

    def launch(self, kernel: str, grid: Any, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel of Triton's, and note it with its arguments."""

        def again() -> None:
            with _disable_current_modes():
                _launch(kernel, grid, *arguments, **constants)

        self.calls.append(again)
        again()

    def replay(self) -> None:
        """Repeat all that was noted."""
        for call in self.calls:
            call()


_launch = triton._launch


class Graphs:
    """In place of `in_place.decode`: runs its Python once for each handle and layer."""

    def __init__(self) -> None:
        self.recorded: dict[Any, Any] = {}
        self.replays = 0

    def decode(self, cache: Any, layer: int, *states: Tensor) -> Tensor:
        """Answer a layer, by what was noted where that was with the same handle."""
        key = cache.handle.data_ptr(), layer
        if key not in self.recorded:
            inputs, recording = [own.clone() for own in states], Recording()
            with recording, mock.patch.object(triton, "_launch", recording.launch):
                output = in_place.decode(cache.layers[layer], cache.handle[0, 0, layer], *inputs)
            self.recorded[key] = inputs, recording, output
            return output.clone()
        inputs, recording, output = self.recorded[key]
        for own, new in zip(inputs, states, strict=True):
            own.copy_(new)
        recording.replay()
        self.replays += 1
        return output.clone()


class OnTheCpu(triton.TritonBackend):
    """The kernel in Triton's interpreter."""

    def refusal(self, call: Any, kept: Any) -> None:
        """Serve all."""

    def attend(self, call: Any, kept: Any) -> Tensor:
        """Attend with few programs, which are slow there."""
        return triton.triton_attention(call, kept, programs=2)

    def repeat(self, call: Any, kept: Any, token: Any, table: Tensor) -> Tensor:
        """Write a token, and attend."""
        return triton.repeated(call, kept, token, table, programs=2)

    def table(self, call: Any, kept: Any) -> Any:
        """Return what is launched, and the numbers of a table."""
        return triton.table_of(call, kept, programs=2)


def check(*lengths: int, tokens: int, every: int) -> None:
    """Decode with repeated launches and as ever; raises where answers differ."""
    model, graphs = tiny.tiny_model(num_hidden_layers=1), Graphs()
    profile = tiny.by_head(tiny.make_profile(model, 60, 0.5), 6).replace(bits=np.array([[8, 5]]))
    with (
        torch.no_grad(),
        mock.patch.object(hooks, "GRAPHED", ("cpu",)),
        mock.patch.object(backends, "BACKENDS", (OnTheCpu(), *backends.BACKENDS)),
        mock.patch.object(BudgetCache, "decode", lambda *given: graphs.decode(*given)),
        mock.patch.object(in_place, "FIRST_TOKENS", 0),
    ):
        compiled, logits = torch.compile(model, fullgraph=True, backend="eager"), []
        for forward in (model, compiled):
            logits.append([])
            for length in lengths:
                cache = None
                gc.collect()  # what a cache has borrowed, the next one gets
                cache = kvalloc.make_cache(model, profile, decode_every=every)
                model(tiny.prompt(length), past_key_values=cache)
                for step in range(tokens):
                    token = tiny.prompt(1, seed=step)
                    logits[-1].append(forward(token, past_key_values=cache).logits)
    error = max(float((a - b).abs().max()) for a, b in zip(*logits, strict=True))
    print(f"error {error}, {len(graphs.recorded)} recordings, {graphs.replays} replays")
    assert error < 1e-4
    assert len(graphs.recorded) == 1  # whatever is kept where, of either prompt
    assert graphs.replays == len(lengths) * (tokens - 1) - 1  # the first prepares the others


if __name__ == "__main__":
    check(60, 41, tokens=6, every=4)
