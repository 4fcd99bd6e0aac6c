"""KL: distance of a reduced cache's next-token distribution from the full cache's."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from kvalloc.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Divergence:
    """Teacher-forced distance of a reduced cache's predictions from the full cache's.

    Attributes
    ----------
    kls : tuple of float, (n_predictions,)
        KL(full cache ‖ reduced cache) of each prediction, nats.
    agrees : tuple of bool, (n_predictions,)
        Whether its most likely token is the same.
    """

    kls: tuple[float, ...]
    agrees: tuple[bool, ...]

    @property
    def kl(self) -> float:
        """Mean over the predictions, nats per token."""
        return sum(self.kls) / len(self.kls)

    @property
    def top1_agreement(self) -> float:
        """Share of predictions with the same most likely token, 0..1."""
        return sum(self.agrees) / len(self.agrees)


def divergence(full_logits: Tensor, reduced_logits: Tensor) -> Divergence:
    """Compare two rows of next-token predictions for the same tokens.

    ``KL(p ‖ q) = sum_v p(v) * (log p(v) - log q(v))`` with p from the full cache and q from the
    reduced one, in float32.

    Parameters
    ----------
    full_logits, reduced_logits : Tensor, (n_predictions, vocabulary)
        Logits of any float type.

    Returns
    -------
    Divergence
        Exactly 0 for equal logits.

    Raises
    ------
    InputError
        If the shapes differ or there is no prediction.

    Examples
    --------
    >>> import math, torch
    >>> full, reduced = torch.tensor([[0.0, 0.0]]), torch.tensor([[math.log(3.0), 0.0]])
    >>> round(divergence(full, reduced).kl, 6)  # 0.5 ln(0.5/0.75) + 0.5 ln(0.5/0.25)
    0.143841
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
    """Predictions of the full cache, with which others are compared.

    Parameters
    ----------
    logits : Tensor, (n_predictions, vocabulary)
        Of any float type, or log probabilities.

    Attributes
    ----------
    probabilities : Tensor of float32, (n_predictions, vocabulary)
    """

    def __init__(self, logits: Tensor) -> None:
        self._logs = logits.float().log_softmax(dim=-1)
        self.probabilities = self._logs.exp()
        impossible = self.probabilities == 0
        self._impossible = impossible if impossible.any() else None

    def divergences(self, reduced_logits: Tensor) -> Tensor:
        """Return KL(full cache ‖ reduced cache) of each prediction.

        Parameters
        ----------
        reduced_logits : Tensor, (..., n_predictions, vocabulary)
            Logits with reduced caches, of any float type.

        Returns
        -------
        Tensor of float64, (..., n_predictions)
            Nats.
        """
        terms = (self._logs - reduced_logits.float().log_softmax(dim=-1)).mul_(self.probabilities)
        if self._impossible is not None:  # 0 * inf: a token that the full cache rules out adds 0
            terms.masked_fill_(self._impossible, 0.0)
        return terms.sum(dim=-1).double()  # a sum in float64 takes five times as long

    def agrees(self, reduced_logits: Tensor) -> Tensor:
        """Return whether the most likely token of each prediction is the same."""
        return reduced_logits.argmax(dim=-1) == self._logs.argmax(dim=-1)
