"""The surrogate alone, of texts, as a file that a killed fit of it can be resumed for."""

from __future__ import annotations

from functools import partial
from typing import Any

from kvalloc.engine.contract import engine_of
from kvalloc.formats.fitted import FittedSurrogate
from kvalloc.measure.checkpoint import kept_work
from kvalloc.measure.sampling import choose_samples
from kvalloc.measure.scorer_fitting import SINKS
from kvalloc.measure.scorer_fitting import fit_surrogate as fit_samples


def fit_surrogate(
    model: Any,
    tokenizer: Any,
    texts: Any,
    *,
    samples: int,
    context: int,
    output: Any = None,
    resume: bool = False,
    progress: Any = None,
    model_id: str | None = None,
) -> FittedSurrogate:
    """Fit the scorer ``surrogate`` as `kvalloc.fit` does."""
    engine = engine_of(model)
    facts = engine.facts(model_id)
    chosen = choose_samples(
        texts, tokenizer, context_tokens=context, least_tokens=SINKS + 2, samples=samples
    )
    job = partial(dict, facts.record(), context_tokens=context, text_digest=chosen.digest())
    with kept_work(output, job, resume=resume) as kept:
        fitted = fit_samples(facts.shape, chosen, context, engine, kept, progress)
        if kept is not None:
            kept.finish(fitted)
    return fitted
