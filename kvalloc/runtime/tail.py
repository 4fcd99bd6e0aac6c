"""What followed the latest eviction of a layer: storage of fixed room, and how much is there."""

from __future__ import annotations

import torch
from torch import Tensor

BLOCK_TOKENS = 64
"""Tokens that a tail gets room for at a time: until then none is copied, and no address changes."""


FIRST_TOKENS = 8
"""So many of the first that come one by one take no room to spare: a short answer to a short prompt
would store more than that prompt."""


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


class Tail:
    """Keys and values in storage with some room, to which a token is added in place.

    Attributes
    ----------
    buffers : tuple of Tensor, each (batch, n_kv_heads, room, head_dim)
        Contiguous.
    tokens : int
        So many of the first ones are there.
    """

    def __init__(self, keys: Tensor, values: Tensor) -> None:
        self.buffers, self.tokens = (keys, values), int(keys.shape[2])
        self._alone = 0  # how many have come one by one

    @property
    def states(self) -> tuple[Tensor, Tensor]:
        """Keys and values, (batch, n_kv_heads, tokens, head_dim) each, as views."""
        keys, values = self.buffers
        return keys.narrow(2, 0, self.tokens), values.narrow(2, 0, self.tokens)

    def tensors(self) -> list[Tensor]:
        """Return all that is allocated, room to spare included."""
        return [*self.buffers]

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

    def _frozen(self, states: tuple[Tensor, ...]) -> bool:
        """Whether the storage must not change: gradients go through it, or torch forbids it."""
        if self.buffers[0].is_inference() and not torch.is_inference_mode_enabled():
            return True
        keys, values = self.buffers
        needs = torch.is_grad_enabled() and any(one.requires_grad for one in states)
        return needs or keys.requires_grad or values.requires_grad
