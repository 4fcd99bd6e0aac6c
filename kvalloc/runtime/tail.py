"""What followed the latest eviction of a layer: storage of fixed room, and how much is there."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_TOKENS = 64
"""Tokens that a tail gets room for at a time: until then none is copied, and no address changes."""


FIRST_TOKENS = 8
"""So many of the first that come one by one take no room to spare: a short answer to a short prompt
would store more than that prompt."""


IN_PLACE_TOKENS = 256
"""So many get room at once where they are written in place: tables are written for each room."""


def room_for(tokens: int, every: int) -> int:
    """Return the tokens that there is room for where so many have come, one after the other.

    Those alone at first, then whole blocks, but no more than come before the next eviction.

    Parameters
    ----------
    tokens : int
    every : int
        Tokens between two evictions.
    """
    if tokens <= FIRST_TOKENS:
        return tokens
    return min(-(-tokens // one) * one for one in (BLOCK_TOKENS, every))


class Place:
    """Where the newest token stands in the layer that runs, on its device, where kernels read it.

    One tensor a device for all layers, whose tails are mostly equally long: it is written where the
    number is another one, in the order in which kernels read it, and nobody waits.
    """

    def __init__(self) -> None:
        self._written: dict[torch.device, tuple[Tensor, int]] = {}

    def __deepcopy__(self, memo: object) -> Place:
        return Place()  # a copy may share tensors, and is as long as it was

    def on(self, device: torch.device, number: int) -> Tensor:
        """Return the tensor, int64, (1,), with this number in it."""
        if device not in self._written:
            with torch.inference_mode(False):  # it may be written to outside of that mode
                fresh = torch.empty(1, dtype=torch.int64, device=device)
            self._written[device] = fresh, -1
        tensor, written = self._written[device]
        if written != number:
            tensor.fill_(number)
            self._written[device] = tensor, number
        return tensor

    def tensors(self) -> list[Tensor]:
        """Return what is allocated."""
        return [tensor for tensor, _ in self._written.values()]


class Tail:
    """Keys and values in storage with some room, to which a token is added in place.

    Attributes
    ----------
    buffers : tuple of Tensor, each (batch, n_kv_heads, room, head_dim)
        Contiguous.
    tokens : int
        So many of the first ones are there.
    """

    def __init__(self, keys: Tensor, values: Tensor, newest: Place) -> None:
        self.buffers, self.tokens = (keys, values), int(keys.shape[2])
        self._newest, self._alone = newest, 0  # how many have come one by one

    @property
    def newest(self) -> Tensor:
        """Where the newest token stands, int64, (1,), on the device.

        It holds until another layer's is asked for.
        """
        return self._newest.on(self.buffers[0].device, self.tokens - 1)

    @property
    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values, (batch, n_kv_heads, tokens, head_dim) each, as views."""
        keys, values = self.buffers
        return keys.narrow(2, 0, self.tokens), values.narrow(2, 0, self.tokens)

    def tensors(self) -> list[Tensor]:
        """Return all that is allocated, room to spare included."""
        return [*self.buffers, *self._newest.tensors()]

    def add(self, *states: Tensor, every: int) -> tuple[Tensor, Tensor]:
        """Add keys and values, (batch, n_kv_heads, n_new, head_dim) each; return all `states`.

        Several at once take what they take: a turn may be as long as memory has room for.

        Parameters
        ----------
        *states : Tensor
        every : int
            Tokens between two evictions.
        """
        n_new, frozen = int(states[0].shape[2]), self._frozen(states)
        end, self._alone = self.tokens + n_new, self._alone + (n_new == 1)
        if frozen or end > int(self.buffers[0].shape[2]):
            few = n_new > 1 or self._alone <= FIRST_TOKENS
            room = end if frozen or few else room_for(end, every)
            shape = (*states[0].shape[:2], room - end)
            keys, values = (
                torch.cat([old, new, new.new_empty(*shape, new.shape[-1])], dim=2)
                for old, new in zip(self.states, states, strict=True)
            )
            self.buffers = keys, values
        else:
            for buffer, new in zip(self.buffers, states, strict=True):
                buffer.narrow(2, self.tokens, n_new).copy_(new)
        self.tokens = end
        return self.states

    def reserve(self, every: int) -> None:
        """Get room for one more token to be written: twice as many, but no more than ``every``."""
        room, least = int(self.buffers[0].shape[2]), min(IN_PLACE_TOKENS, every)
        if max(self.tokens + 1, least) <= room and not self.buffers[0].is_inference():
            return
        room = max(min(2 * self.tokens, every), least, self.tokens + 1)
        with torch.inference_mode(False):  # it may be written to outside of that mode
            keys, values = (
                own.new_empty(*own.shape[:2], room, own.shape[3]) for own in self.buffers
            )
        for old, new in zip(self.states, (keys, values), strict=True):
            new.narrow(2, 0, self.tokens).copy_(old)
        self.buffers = keys, values

    def write(self, *states: Tensor) -> None:
        """Write the newest token, whose place stands on the device; nothing is for the host."""
        for buffer, new in zip(self.buffers, states, strict=True):
            buffer.index_copy_(2, self.newest, new)

    def _frozen(self, states: tuple[Tensor, ...]) -> bool:
        """Whether the storage must not change: gradients go through it, or torch forbids it."""
        if self.buffers[0].is_inference() and not torch.is_inference_mode_enabled():
            return True
        keys, values = self.buffers
        needs = torch.is_grad_enabled() and any(one.requires_grad for one in states)
        return needs or keys.requires_grad or values.requires_grad
