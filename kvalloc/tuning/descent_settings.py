"""What every descent on the loss of the whole reduced cache is told."""

from __future__ import annotations

from dataclasses import dataclass

from kvalloc.errors import InputError


@dataclass(frozen=True, kw_only=True)
class DescentSettings:
    """How long a descent goes, on how much, and what it is judged by.

    Attributes
    ----------
    steps : int
        Steps of Adam.
    batch : int
        Prompts a step, in turn.
    continuation_tokens : int
        Tokens after each prompt on which the distributions are compared, at most.
    learning_rate : float
        Of what is descended on.
    softness : tuple of float
        At the beginning and at the end: how far the threshold between kept and evicted entries is
        smeared.
    held_out : float
        Share of the prompts that no step sees; they choose among the stages of the descent.
    checks : int
        How often the held-out prompts are asked.

    Raises
    ------
    InputError
        If a value is out of range.
    """

    steps: int
    batch: int
    continuation_tokens: int
    learning_rate: float
    softness: tuple[float, float]
    held_out: float = 0.2
    checks: int

    def __post_init__(self) -> None:
        least = min(self.steps, self.batch, self.continuation_tokens, self.checks)
        if least < 1 or not 0 < self.held_out < 1:
            raise InputError(
                "a descent needs at least one step, prompt, token and check, and a share of held "
                "out prompts between 0 and 1"
            )
        if min(*self.softness, self.learning_rate) <= 0:
            raise InputError("softness and learning rate must be above 0")

    def softness_at(self, step: int) -> float:
        """Between both ends, linear in the steps."""
        return between(self.softness, 1 - step / self.steps)

    @property
    def check_steps(self) -> set[int]:
        """After how many steps the held-out prompts are asked."""
        return {self.steps * number // self.checks for number in range(1, self.checks + 1)}


def between(ends: tuple[float, float], rest: float) -> float:
    """Between a value at the beginning, with all the way left (1), and one at the end (0)."""
    return ends[1] + (ends[0] - ends[1]) * rest
