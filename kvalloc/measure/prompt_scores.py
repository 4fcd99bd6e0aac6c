"""The score profile of one prompt, for budgets of its own (XKV's mini-prefill before prefill)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvalloc.accounting import IntArray
from kvalloc.engine.contract import LocalEngine
from kvalloc.errors import InputError, option
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.job import Job
from kvalloc.measure.profiling import measure_job
from kvalloc.measure.sampling import Sample, SampleSet, cut_middle
from kvalloc.scorers import Scorer
from kvalloc.shape import ModelShape

if TYPE_CHECKING:
    from kvalloc.models.attention import AttentionStates

__all__ = ["check_measured_tokens", "prompt_scores"]


def check_measured_tokens(measured_tokens: object, protected_tokens: int) -> None:
    """Refuse a length to measure on that leaves nothing but sinks and window.

    Raises
    ------
    InputError
    """
    if measured_tokens is None:
        return
    whole = isinstance(measured_tokens, int) and not isinstance(measured_tokens, bool)
    if not whole or int(measured_tokens) <= protected_tokens:  # type: ignore[call-overload]
        raise InputError(
            f"{option('measured_tokens')} is {measured_tokens!r}, but sinks and window alone are "
            f"{protected_tokens} tokens; measure on more, such as 1024, or on the whole prompt"
        )


def prompt_scores(
    model: Any,
    token_ids: IntArray,
    *,
    scorer: Scorer,
    sinks: int,
    shape: ModelShape,
    measured_tokens: int | None = None,
    states: Mapping[int, AttentionStates] | None = None,
) -> ScoreProfile:
    """Retention curves of one prompt.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model, or its decoder; the same afterwards.
    token_ids : ndarray of int64, (n_tokens,)
        The prompt, without padding.
    scorer : Scorer
        Whose scores count.
    sinks : int
        First tokens, never evicted.
    shape : ModelShape
        The model's sizes, under the name that the profile is to bear.
    measured_tokens : int, optional
        Of a longer prompt, run only so many tokens, the first half and the last half of them, and
        stretch the curves by the share kept. That bounds what the mini-prefill takes; by default
        the whole prompt runs, as in XKV.
    states : mapping of int to AttentionStates, optional
        What each full-attention layer saw of the whole prompt, where that is known already: no
        mini-prefill is run.

    Returns
    -------
    ScoreProfile
        Of one sample; its context is the prompt's length.

    Raises
    ------
    InputError
        If the prompt is not longer than sinks and window, or a score is not finite.
    UnsupportedModelError
        If the model's attention cannot be seen.

    References
    ----------
    XKV, Section IV-A.
    """
    protected, n_tokens = sinks + scorer.window, int(token_ids.size)
    check_measured_tokens(measured_tokens, protected)
    if n_tokens <= protected:
        raise InputError(
            f"a prompt of {n_tokens} tokens leaves nothing to decide beside {sinks} sinks and a "
            f"window of {scorer.window}"
        )
    measured = cut_middle(token_ids, n_tokens if measured_tokens is None else measured_tokens)
    part = "" if measured.size == n_tokens else f", {measured.size} of them measured"
    job = Job(
        shape=shape,
        scorer=scorer,
        sinks=sinks,
        context_tokens=n_tokens,
        samples=SampleSet(
            samples=(Sample(token_ids=measured),),
            description=f"one prompt of {n_tokens} tokens{part}",
        ),
        states=states,
    )
    return measure_job(job, LocalEngine(model))
