"""What a scorer may ask to see that comes after the prompt, and what it is shown of it.

Most scorers look at the prompt alone. One that does not says so by `Scorer.later`: the cache then
holds the whole prompt, lets the model run on over some tokens, shows each layer's queries and keys
of them to `Scorer.observe_later`, takes these tokens away again, and evicts. Scorers that ask for
the same pass share it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from torch import Tensor

__all__ = ["CARRIED_TOKENS", "SMALLEST_CHUNK", "Later", "LaterStep", "merged_passes"]

CARRIED_TOKENS = 8
"""Last tokens of a repeated piece that lead over to the next one, as in KVzip."""

SMALLEST_CHUNK = 16
"""A prompt is repeated in pieces of at least so many tokens."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Later:
    """A pass over tokens that come after the prompt.

    Attributes
    ----------
    kind : {"draft", "repeat"}
        What the model itself would say next, greedily; or the prompt once more, teacher-forced.
    tokens : int
        Length of the draft; longest piece of the prompt that is repeated at once.
    instruction, continuation : tuple of int
        Token ids in front of the first repeated piece, and of each further one, where the last
        `CARRIED_TOKENS` tokens of the piece before come between.
    """

    kind: Literal["draft", "repeat"]
    tokens: int
    instruction: tuple[int, ...] = ()
    continuation: tuple[int, ...] = ()

    def serves(self, wanted: Later) -> bool:
        """Whether a scorer that asks for `wanted` finds what it needs in this pass."""
        if self.kind == "draft":
            return wanted.kind == "draft" and wanted.tokens <= self.tokens
        return self == wanted

    def furthest(self, n_tokens: int) -> int:
        """Tokens after a prompt of `n_tokens` that the pass cannot do without.

        All of the longest repetition, with what leads to it; the first token of a draft, which may
        be cut short after it.
        """
        if self.kind == "draft":
            return 1
        first = len(self.instruction) + min(self.tokens, n_tokens)
        rest = min(self.tokens, n_tokens - self.tokens)
        if rest <= 0:
            return first
        return max(first, len(self.continuation) + min(CARRIED_TOKENS, self.tokens) + rest)


@dataclass(frozen=True, kw_only=True, slots=True)
class LaterStep:
    """What belongs to the states of one layer in a later pass.

    Attributes
    ----------
    n_prompt : int
        Columns of the prompt: the first keys. All others are those of the later tokens, whose
        queries are the states' queries.
    counts : Tensor of bool, (batch, n_new_tokens), or None
        False for queries that have no say: what a draft says after its end. None where all have.
    repeated : Tensor of int64, (n_repeated,), or None
        Columns of the prompt that are repeated now, the same in all rows.
    leading : Tensor of int64, (n_leading,), or None
        Columns of the prompt's first tokens, its sinks, as far as they are not among `repeated`.
    """

    n_prompt: int
    counts: Tensor | None = None
    repeated: Tensor | None = None
    leading: Tensor | None = None


def merged_passes(wanted: Iterable[Later | None]) -> list[Later]:
    """The passes that serve all that are wanted.

    Parameters
    ----------
    wanted : iterable of Later or None
        What each scorer asks for.

    Returns
    -------
    list of Later
        At most one draft, the longest that is asked for; each repetition once.
    """
    passes = list(dict.fromkeys(later for later in wanted if later is not None))
    longest = max((one.tokens for one in passes if one.kind == "draft"), default=0)
    return [one for one in passes if one.kind != "draft" or one.tokens == longest]
