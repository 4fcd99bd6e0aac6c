"""KL divergence of next-token predictions."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvalloc.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Distance of a reduced cache's teacher-forced predictions from the full cache's.

    Attributes
    ----------
    kls : tuple of float, (n_predictions,)
        Nats.
    agrees : tuple of bool, (n_predictions,)
        Whether the most likely token is the same.
    """

    kls: tuple[float, ...]
    agrees: tuple[bool, ...]

    @property
    def kl(self) -> float:
        """Mean of `kls`, nats per token."""
        return sum(self.kls) / len(self.kls)

    @property
    def top1_agreement(self) -> float:
        """Share of agreeing predictions, 0..1."""
        return sum(self.agrees) / len(self.agrees)


def divergence(full_logits: Tensor, reduced_logits: Tensor) -> Divergence:
    """Return KL(full cache ‖ reduced cache) of predictions for the same tokens, in float32.

    Parameters
    ----------
    full_logits, reduced_logits : Tensor of any float type, (n_predictions, vocabulary)

    Raises
    ------
    InputError
        If shapes differ or there is no prediction.

    Examples
    --------
    >>> from torch import zeros
    >>> divergence(zeros(1, 2), zeros(1, 2)).kl
    0.0
    """
    if full_logits.shape != reduced_logits.shape or full_logits.ndim != 2:
        raise InputError(
            f"logits shaped {tuple(full_logits.shape)} and {tuple(reduced_logits.shape)} cannot be "
            "compared; give (n_predictions, vocabulary) for the same tokens"
        )
    if full_logits.shape[0] < 1:
        raise InputError("there is no prediction to compare; give an answer of two tokens or more")
    full = Predictions(full_logits)
    kls, agree = full.divergences(reduced_logits), full.agrees(reduced_logits)
    return Divergence(kls=tuple(kls.tolist()), agrees=tuple(agree.tolist()))


class Predictions:
    """Predictions of the full cache, from logits or log probabilities, (n_predictions, vocabulary).

    `probabilities` are float32, of the same shape.
    """

    def __init__(self, logits: Tensor) -> None:
        self._logs = logits.float().log_softmax(dim=-1)
        self.probabilities = self._logs.exp()
        impossible = self.probabilities == 0
        self._impossible = impossible if impossible.any() else None

    def divergences(self, reduced_logits: Tensor) -> Tensor:
        """Return KL(full cache ‖ reduced cache), nats, float64 (..., n_predictions).

        Logits are (..., n_predictions, vocabulary).
        """
        terms = (self._logs - reduced_logits.float().log_softmax(dim=-1)).mul_(self.probabilities)
        if self._impossible is not None:  # 0 * inf: a token that the full cache rules out adds 0
            terms.masked_fill_(self._impossible, 0.0)
        return terms.sum(dim=-1).double()  # a sum in float64 takes five times as long

    def agrees(self, reduced_logits: Tensor) -> Tensor:
        """Return whether the most likely tokens are the same."""
        return reduced_logits.argmax(dim=-1) == self._logs.argmax(dim=-1)
