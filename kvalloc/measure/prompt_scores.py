"""The score profile of one prompt, for budgets of its own (XKV's mini-prefill before prefill)."""

from __future__ import annotations

from typing import Any

from kvalloc.accounting import IntArray
from kvalloc.engine.contract import LocalEngine
from kvalloc.errors import InputError
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.job import Job
from kvalloc.measure.profiling import measure_job
from kvalloc.measure.sampling import Sample, SampleSet
from kvalloc.scorers import Scorer
from kvalloc.shape import ModelShape


def prompt_scores(
    model: Any,
    token_ids: IntArray,
    *,
    scorer: Scorer,
    sinks: int,
    shape: ModelShape,
) -> ScoreProfile:
    """Return the retention curves of one prompt.

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
    if n_tokens <= protected:
        raise InputError(
            f"a prompt of {n_tokens} tokens leaves nothing to decide beside {sinks} sinks and a "
            f"window of {scorer.window}"
        )
    job = Job(
        shape=shape,
        scorer=scorer,
        sinks=sinks,
        context_tokens=n_tokens,
        samples=SampleSet(
            samples=(Sample(token_ids=token_ids),),
            description=f"one prompt of {n_tokens} tokens",
        ),
    )
    return measure_job(job, LocalEngine(model))
