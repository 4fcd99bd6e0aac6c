"""Profiling: retention curves of a model on text."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

import numpy as np

from kvalloc.accounting import IntArray
from kvalloc.engine.contract import MEASURED_WITH, Advance, Engine, LocalEngine, engine_of
from kvalloc.errors import InputError, option
from kvalloc.files import provenance
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure.checkpoint import Checkpoint, kept_work
from kvalloc.measure.curves import check_finite, checked_widths, on_grid, retention_curves
from kvalloc.measure.job import (
    Job,
    LossLevel,
    LossMethod,
    LossPlan,
    Measured,
    Steps,
    measured_samples,
)
from kvalloc.measure.mini_prefill import mini_prefill
from kvalloc.measure.sampling import Sample, SampleSet, choose_samples, read_shard
from kvalloc.models.loading import require_run_packages
from kvalloc.models.structure import input_device
from kvalloc.prompts.texts import Document, Prompt
from kvalloc.scorers import Scorer, get_scorer
from kvalloc.scorers.repeats import repeat_counts, with_repeats
from kvalloc.shape import ModelShape
from kvalloc.units import Option, keywords_of

if TYPE_CHECKING:
    from kvalloc.models.attention import AttentionStates, Observed

Progress = Callable[[int, int], None]


SCORES, LOSSES, MORE = "What is measured", "Losses", "Other measurements"
"""Headings in the command's help."""


class ProfileOptions(TypedDict, total=False):
    """Settings of a score profile, beside model and text."""

    samples: Annotated[int | None, Option("N", SCORES)]
    """Samples to measure; by default a tenth of the text's samples. With `tasks` two of each."""

    context: int
    """Reference context, tokens; 1024 by default."""

    scorer: Annotated[str | Scorer, Option("NAME", SCORES)]
    """Scorer to measure; see 'kvalloc list scorers'. Its options follow colons, such as
    snapkv:window=32:pool=7; xkv by default."""

    sinks: Annotated[int, Option("N", SCORES)]
    """First tokens that are never evicted, and left out of the curves; 4 by default. 0, as in
    XKV, counts them."""

    seed: int
    """Seed of the choice of samples; 0 by default."""

    loss: Annotated[LossMethod | LossPlan | None, Option("[measured|fast]", LOSSES)]
    """Also measure how reducing each unit alone changes the next-token distribution: by a forward
    for every unit and level, or a second-order estimate for the price of a few prefills. It is
    measured on the prompts' answers, or on the model's own continuation."""

    loss_level: Annotated[LossLevel, Option("", LOSSES)]
    """Unit that is reduced alone for `loss`; layer by default."""

    bits: Annotated[str | Sequence[int] | None, Option("16,8,4", MORE)]
    """With `loss`, also measure the loss at each of these bit widths and each budget, for 'kvalloc
    solve --bits'; 16 is always measured."""

    chunk: Annotated[int | None, Option("N", MORE, minimum=1)]
    """Tokens of a sample that run through a layer at once; memory grows with it. By default all up
    to 4,096 tokens, and 1,024 of longer samples. Losses take the whole sample."""

    shard: Annotated[str | None, Option("I/N", SCORES)]
    """Measure only every N-th sample, such as 2/8. From all N shards, on any machines,
    'kvalloc merge' makes the file of one call."""


@keywords_of(ProfileOptions)
def profile(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt],
    *,
    output: str | Path | None = None,
    resume: bool = False,
    progress: Progress | None = None,
    model_id: str | None = None,
    **options: Unpack[ProfileOptions],
) -> ScoreProfile:
    """Measure the concentration of every layer's and KV head's attention.

    Each sample runs through the decoder once, without a KV cache. Curves are exact up to 4096
    tokens of context, and above on a grid, with the measured interpolation error.

    Parameters
    ----------
    model : transformers.PreTrainedModel or Engine
        A causal language model, or workers with one, see
        `kvalloc.engine.ray.RayEngine`.
    tokenizer : transformers.PreTrainedTokenizerBase
    texts : iterable of str, Document or Prompt
        Running text, also a string, is cut into samples of exactly `context` tokens. A prompt is
        one sample: longer ones lose their middle, shorter ones' curves are stretched.
    output : str or Path, optional
        Score profile to write; until then ``OUTPUT.partial`` has finished samples.
    resume : bool
        Continue a killed call.
    progress : callable, optional
        Called with (layers done, layers in all); a layer's losses count as several.
    model_id : str, optional
        Replaces the config's id.
    **options
        See `ProfileOptions`.

    Returns
    -------
    ScoreProfile
        Sliding layers have curve 1 and mass 0. A sample fails if scores are not finite, memory is
        too small, or it kills its worker twice; ``set_aside`` names it.

    Raises
    ------
    InputError
        If text, prompts or options are invalid, the context is beyond the model's limit, every
        sample fails, or the output cannot be written or has another job's unfinished work beside
        it.
    UnsupportedModelError
        If the model's attention cannot be seen.
    MissingDependencyError
        If torch or transformers is missing.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction, Section IV, Eq. 4.
    """
    require_run_packages()
    engine = engine_of(model)
    facts = engine.facts(model_id)
    job = job_of(tokenizer, texts, facts.shape, options)
    with kept_work(output, partial(job.record, facts), resume=resume) as kept:
        result = measure_job(job, engine, kept, progress)
        if kept is not None:
            kept.finish(result)
    return result


def prompt_scores(
    model: Any,
    token_ids: IntArray,
    *,
    scorer: Scorer,
    sinks: int,
    shape: ModelShape,
) -> ScoreProfile:
    """Return the retention curves of one prompt, (n_tokens,), at its length as the context.

    The model, also a decoder, is unchanged afterwards.

    Raises
    ------
    InputError
        If the prompt is not longer than sinks and window, or a score is not finite.
    UnsupportedModelError
        If attention cannot be seen.
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


def read_options(options: ProfileOptions) -> dict[str, Any]:
    """Return options as keywords of `Job`.

    Raises
    ------
    InputError
        If they are invalid for all models.
    """
    scorer, losses = options.get("scorer", "xkv"), options.get("loss")
    if not isinstance(scorer, Scorer):
        scorer = get_scorer(scorer)
    if not isinstance(losses, LossPlan | None):
        losses = LossPlan(method=losses, level=options.get("loss_level", "layer"))
    scorer.check_prompt_only()
    if (chunk := options.get("chunk")) is not None and chunk < 1:
        raise InputError(f"the chunk is {chunk} tokens, expected at least 1")
    shard = None if (text := options.get("shard")) is None else read_shard(text)
    if (bits := checked_widths(options.get("bits"))) and losses is None:
        raise InputError(
            f"{option('bits')} is about what is lost: add {option('loss', 'fast')} or "
            f"{option('loss', 'measured')}"
        )
    return {
        "shard": shard,
        "chunk": chunk,
        "scorer": scorer,
        "sinks": options.get("sinks", 4),
        "context_tokens": options.get("context", 1024),
        "losses": losses,
        "bits": bits,
    }


def job_of(
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt],
    shape: ModelShape,
    options: ProfileOptions,
) -> Job:
    """Return the options as a job; refuse impossible ones."""
    decided = read_options(options)
    context, sinks, window = decided["context_tokens"], decided["sinks"], decided["scorer"].window
    _check_sizes(shape, context, sinks, window)
    samples = choose_samples(
        texts,
        tokenizer,
        context_tokens=context,
        least_tokens=sinks + window + 1,
        samples=options.get("samples"),
        seed=options.get("seed", 0),
    )
    job = Job(shape=shape, samples=samples, **decided)
    job.scorer.check_model(shape)
    return job


def measure_job(
    job: Job,
    engine: Engine,
    kept: Checkpoint | None = None,
    progress: Progress | None = None,
) -> ScoreProfile:
    """Measure all samples of a job."""
    steps = Steps(len(job.places) * job.sample_steps, progress)
    measured, failed = measured_samples(
        engine,
        partial(_measure_sample, job),
        job.places,
        kept,
        steps,
        sample_steps=job.sample_steps,
        sizes=job.sizes(),
    )
    if not measured:
        raise failed[min(failed)].of_every_sample(job.shape.model_id)
    if failed:
        steps.advance(steps.total)  # the steps that the failed samples had left
    profile = _assemble(job, measured)
    return profile.replace(set_aside=job.samples.set_aside(failed))


def _measure_sample(job: Job, model: Any, index: int, advance: Advance) -> Measured:
    import torch

    ids = job.samples.samples[index].token_ids
    arrays = {name: np.zeros(size) for name, size in job.sizes().items() if name != "losses"}
    arrays["curves"].fill(1.0)  # of sliding layers, which keep what they always keep
    masses, error = arrays["masses"], arrays["interpolation_error"]
    first, end, counts = job.sinks, ids.size - job.scorer.window, repeat_counts(ids)

    observed: Observed | None = None

    def look(states: AttentionStates) -> None:
        nonlocal observed
        layer, states = states.layer, replace(states, observed=observed)
        if states.keys.shape[2] < ids.size:  # a chunk, and not the last one
            observed = job.scorer.observe(states, sinks=job.sinks)
            return
        observed = None
        states = with_repeats(states, counts)
        scores = job.scorer.score(states, sinks=job.sinks)[0, :, first:end].float().cpu().numpy()
        what = f"the scores of {job.shape.model_id} in layer {layer}, sample {index}"
        check_finite(what, scores, low=0)
        curves, masses[layer] = retention_curves(scores)
        arrays["curves"][layer], off = on_grid(curves, job.ranks)
        error[0] = max(error[0], off)
        advance(1)

    inputs = torch.from_numpy(ids)[None].to(input_device(model))
    mini_prefill(model, inputs, look, layers=job.shape.full_layers, chunk=job.chunk_of(ids.size))
    if job.losses is None:
        return arrays
    from kvalloc.measure.loss_curves import sample_losses  # loads torch

    losses = sample_losses(model, job, index, layer_done=lambda: advance(job.loss_layers))
    return arrays | losses


def _assemble(job: Job, samples: Mapping[int, Measured]) -> ScoreProfile:
    stacked = {name: np.stack([one[name] for one in samples.values()]) for name in job.sizes()}
    losses: dict[str, Any] = {}
    if job.losses is not None:
        losses = {
            "loss_tokens": job.loss_levels,
            "loss_method": job.losses.method,
            "loss_bits": np.array(job.loss_bits, dtype=np.int64),
            "losses": stacked["losses"],
        }
    n_tokens = [job.samples.samples[place].token_ids.size for place in samples]
    return ScoreProfile(
        **losses,
        curves=stacked["curves"],
        masses=stacked["masses"],
        sample_tokens=np.array(n_tokens, dtype=np.int64),
        interpolation_error=float(stacked["interpolation_error"].max()),
        shape=job.shape,
        scorer=job.scorer.name,
        scorer_parameters=job.scorer.parameters(),
        context_tokens=job.context_tokens,
        sinks=job.sinks,
        window=job.scorer.window,
        ranks=job.ranks,
        shard=job.shard,
        text_digest=job.samples.digest(),
        text_description=job.samples.description,
        **provenance(*MEASURED_WITH),
    )


def _check_sizes(shape: ModelShape, context: int, sinks: int, window: int) -> None:
    if sinks < 0:
        raise InputError(f"sinks is {sinks}, expected a number of tokens >= 0")
    if context <= sinks + window:
        raise InputError(
            f"a context of {context} tokens leaves nothing to evict beside {sinks} sinks and a "
            f"window of {window}; choose at least {sinks + window + 1} tokens"
        )
    shape.check_context(context)
