"""The contract of a scorer: one method."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Hashable
from typing import TYPE_CHECKING, ClassVar

from kvalloc.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from kvalloc.models.attention import AttentionStates, Observed
    from kvalloc.scorers.later_pass import Later, LaterStep


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
    follows : bool
        Whether it takes over the pooling and the reduction of query heads of the scorer beside
        which it is an option, unless told otherwise; not where they are part of the method.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    reference: ClassVar[str]
    window: int
    follows: ClassVar[bool] = True

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

    def query_rows(self, n_tokens: int) -> int:
        """How many of a prompt's last queries `score` wants to see.

        Where a prompt arrives in chunks, the cache holds so many of them back for it.

        Parameters
        ----------
        n_tokens : int
            Length of the prompt.

        Returns
        -------
        int
            The window by default; 0 for a scorer that needs none, or takes them in `observe`.
        """
        return self.window

    def observe(self, states: AttentionStates, *, sinks: int) -> Observed | None:
        """What to remember of a chunk of the prompt that is not the last one.

        Scorers that look at all queries need it: `score` sees those of the last chunk, and finds
        what this returned as ``states.observed``. The scorer itself holds nothing.

        Parameters
        ----------
        states : AttentionStates
            One layer, one chunk; its ``observed`` is what the chunk before left.
        sinks : int
            First tokens of the prompt that are never evicted.

        Returns
        -------
        Observed or None
            None, as by default, for a scorer that needs nothing of it.
        """
        return None

    @property
    def later(self) -> Later | None:
        """The pass over tokens after the prompt that `score` needs; None, as by default, for none.

        Where it is not None, the cache holds the whole prompt until that pass has been made.
        """
        return None

    @property
    def later_key(self) -> Hashable:
        """What `observe_later` depends on: scorers of equal keys share what one of them noted."""
        return (self.name, *sorted(self.parameters().items()))

    def observe_later(self, states: AttentionStates, step: LaterStep, *, sinks: int) -> Observed:
        """What to remember of a piece of the later pass, for `score`.

        Only called where `later` is not None; `score` finds the last one returned under
        `later_key` in ``states.later``.

        Parameters
        ----------
        states : AttentionStates
            One layer: the queries of the later tokens, and all keys up to the last of them. Its
            ``observed`` is what the piece before left.
        step : LaterStep
            What these tokens are.
        sinks : int
            First tokens of the prompt that are never evicted.

        Returns
        -------
        Observed
            Its columns are those of the prompt, (batch, n_kv_heads or n_query_heads, n_prompt).
        """
        raise NotImplementedError(f"the scorer {self.name} asks for a later pass and sees none")

    @abstractmethod
    def parameters(self) -> dict[str, int | float | str | bool]:
        """What builds this scorer again: ``get_scorer(self.name, **self.parameters())``."""


def check_at_least(
    name: str, value: object, least: int, owner: str, *, kind: str = "scorer"
) -> int:
    """Return `value` when it is an integer of at least `least`.

    Parameters
    ----------
    name, value, owner
        Named in the error.
    least : int
    kind : str
        What the owner is: a scorer, or a policy.

    Raises
    ------
    InputError
        Otherwise; names scorer and parameter.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise InputError(f"{kind} {owner}: {name} is {value!r}, expected a number >= {least}")
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


def check_number(name: str, value: object, owner: str, *, least: float) -> float:
    """Return `value` as a float when it is a finite number of at least `least`.

    Raises
    ------
    InputError
        Otherwise; names owner and parameter.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not least <= float(value) < float("inf"):  # type: ignore[arg-type]
        raise InputError(f"{owner}: {name} is {value!r}, expected a number >= {least:g}")
    return float(value)  # type: ignore[arg-type]


def check_share(name: str, value: object, owner: str, *, least_above: bool = False) -> float:
    """Return `value` as a float when it is a number from 0 to 1.

    Parameters
    ----------
    name, value, owner
        Named in the error.
    least_above : bool
        Refuse 0 itself.

    Raises
    ------
    InputError
        Otherwise; names owner and parameter.
    """
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= float(value) <= 1 or (least_above and value == 0):  # type: ignore[arg-type]
        expected = "a number above 0 and at most 1" if least_above else "a number from 0 to 1"
        raise InputError(f"{owner}: {name} is {value!r}, expected {expected}")
    return float(value)  # type: ignore[arg-type]
