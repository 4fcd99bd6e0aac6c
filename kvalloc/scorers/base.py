"""The contract of a scorer: one method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from kvalloc.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.attention_hook import AttentionStates


class Scorer(ABC):
    """Computes the importance of every entry of one layer.

    Attributes
    ----------
    name : str
        Name in the registry.
    summary : str
        One line for ``kvalloc scorers``.
    reference : str
        Where the method comes from.
    window : int
        Last tokens of the prompt that are never evicted, tokens.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str]
    window: int

    @abstractmethod
    def score(self, states: AttentionStates, *, sinks: int) -> Tensor:
        """Importance of each entry for what comes next; higher is kept.

        Parameters
        ----------
        states : AttentionStates
            What one layer's attention sees.
        sinks : int
            First tokens of the prompt that are never evicted, and so get no score.

        Returns
        -------
        Tensor of float32, (batch, n_kv_heads, n_tokens)
            Finite and >= 0; 0 in the columns of padding, of the sinks and of the last `window`
            tokens.
        """

    @abstractmethod
    def parameters(self) -> dict[str, int | float | str | bool]:
        """What builds this scorer again: ``get_scorer(self.name, **self.parameters())``."""


def check_at_least(name: str, value: object, least: int, scorer: str) -> int:
    """Return `value` when it is an integer of at least `least`.

    Raises
    ------
    InputError
        Otherwise; names scorer and parameter.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"scorer {scorer}: {name} is {value!r}, expected a number >= {least}")
    return value


def check_odd(name: str, value: object, scorer: str) -> int:
    """Return `value` when it is an odd positive integer.

    Raises
    ------
    InputError
        Otherwise: an even pooling width has no middle, so it would shift every score by half a
        token.
    """
    size = check_at_least(name, value, 1, scorer)
    if size % 2 == 0:
        raise InputError(f"scorer {scorer}: {name} is {size}, expected an odd number, such as 7")
    return size


def check_choice(name: str, value: object, choices: tuple[str, ...], scorer: str) -> str:
    """Return `value` when it is one of `choices`.

    Raises
    ------
    InputError
        Otherwise; lists the choices.
    """
    if not isinstance(value, str) or value not in choices:
        listed = ", ".join(choices)
        raise InputError(f"scorer {scorer}: {name} is {value!r}, choose from: {listed}")
    return value
