"""``kvalloc.fit``: measure a model once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.engine.contract import Advance, Engine, engine_of, result_of
from kvalloc.errors import InputError, KVAllocError, option
from kvalloc.files import make_folder
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.fitted import FittedModel
from kvalloc.formats.score_profile import ShareError
from kvalloc.formats.shipped_profiles import fitted_file, load_fitted
from kvalloc.measure.cache_loss import CONTINUATION_TOKENS, CacheLosses
from kvalloc.measure.checkpoint import Checkpoint
from kvalloc.measure.job import Job, LossPlan, Steps, measured_samples
from kvalloc.measure.mini_prefill import layers_of
from kvalloc.measure.profiling import ProfileOptions, measure_job, read_options
from kvalloc.measure.sampling import Sample, SampleSet, choose_samples
from kvalloc.measure.scorer_fitting import FitOptions, fit_surrogate
from kvalloc.models.attention import probe_of
from kvalloc.models.loading import require_run_packages
from kvalloc.models.rope import UNKNOWN
from kvalloc.online.methods import SecondRead, Setting
from kvalloc.online.solved import (
    MATCHED,
    SINKS,
    STEP,
    WIDTHS,
    WINDOW,
    fits_values,
    solve_share,
)
from kvalloc.online.solving import loss_summary
from kvalloc.prompts.calibration import KINDS, calibration_prompts
from kvalloc.prompts.intervals import tails
from kvalloc.prompts.texts import Document, Prompt
from kvalloc.scorers.surrogate import surrogate_rotation
from kvalloc.shape import ModelShape
from kvalloc.units import duration, keywords_of

EACH_KIND = 4
"""Prompts of each kind that are made to fit the surrogate."""

LOSS_KINDS, LOSS_CONTEXT, MAX_LOSS_PROMPTS = ("kl", "own", "facts", "needle"), 600, 16
"""Kinds of the prompts that losses are measured on, their longest (half are half as long), and how
many of given texts are taken at most."""

ERROR_PROMPTS, ERROR_SEED, ERROR_SHARES = 24, 1_000, (0.05, 0.1, 0.2)
"""Other prompts, on which whole caches of these shares are measured; fewer shorter ones."""

SECOND_READ_SHARES, ADD_UP = (0.05, 0.1), 2.0
"""Shares at which a second read of each prompt decides whole caches, too: if at one of them these
lose more than so many times the sum of single losses, which then do not add up."""


@keywords_of(FitOptions)
def fit(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt] | None = None,
    *,
    output: str | Path | None = None,
    resume: bool = False,
    progress: Callable[[int, int], None] | None = None,
    notify: Callable[[str], None] | None = None,
    model_id: str | None = None,
    **options: Unpack[FitOptions],
) -> FittedModel:
    """Measure a model once for the default, so that each prompt is read once.

    ``kvalloc.apply(model, budget=...)`` and commands find the file by the weights' digest, and
    solve for each share. It holds:

    1. a surrogate of a prompt's second read;
    2. each head's loss curves over entries and widths, other heads unreduced, with the surrogate's
       best entries;
    3. losses of whole caches on other prompts, solved from these curves at three shares, and by a
       second read of each prompt where single losses do not add up.

    Parameters
    ----------
    model : transformers.PreTrainedModel or Engine
    tokenizer : transformers.PreTrainedTokenizerBase
    texts : iterable of str, Document or Prompt, optional
        As for `kvalloc.profile`; by default made prompts of five kinds.
    output : str or Path, optional
        By default in the cache folder. ``OUTPUT.partial`` has finished measurements meanwhile.
    resume, model_id : optional
        As for `kvalloc.profile`.
    progress : callable, optional
        Called with (prompts done, prompts in all).
    notify : callable, optional
        Called with lines on its time, unless resumed, and second reads.
    **options
        See `kvalloc.measure.scorer_fitting.FitOptions`.

    Raises
    ------
    KVAllocError
        As `kvalloc.profile`, or for too little text.

    Examples
    --------
    >>> kvalloc.fit(model, tokenizer)  # doctest: +SKIP
    """
    require_run_packages()
    engine = engine_of(model)
    facts = engine.facts(model_id)
    rotates = result_of(engine, partial(_check_rotation, facts.shape.full_layers))
    output = _output_in_cache(facts.shape) if output is None else output
    context, seed = options.get("context", 1024), options.get("seed", 0)
    second, losses, other_samples = _samples(
        tokenizer, texts, context, options.get("samples"), seed
    )
    record = {
        **facts.record(),
        **options,
        "context": context,
        "seed": seed,
        "text_digest": [one.digest() for one in (second, losses, other_samples)],
    }
    layers = len(facts.shape.full_layers)
    prompts = [len(one.samples) for one in (second, losses, other_samples)]
    passes = (
        2 * layers,
        layers * (2 + len(WIDTHS)),
        layers * (1 + len(ERROR_SHARES)),
    )
    all_passes = sum(n * each for n, each in zip(prompts, passes, strict=True))
    begun = perf_counter()
    unsaid = [] if resume or notify is None else [notify]  # a resumed job takes less

    def stage(number: int) -> Callable[[int, int], None]:
        def count(done: int, total: int) -> None:
            measured = prompts[number] * done // max(total, 1)
            if measured and unsaid:
                seconds = (perf_counter() - begun) / (measured * passes[0]) * all_passes
                unsaid.pop()(
                    f"measuring takes about {duration(seconds)}: {sum(prompts)} prompts through "
                    f"{layers} layers"
                )
            if progress is not None:
                progress(sum(prompts[:number]) + measured, sum(prompts))

        return count

    with Checkpoint(output, record, resume=resume) as kept:
        surrogate = fit_surrogate(
            facts.shape, second, context, engine, kept.stage("second"), stage(0)
        )
        file = kept.folder / "surrogate.safetensors"
        surrogate.save(file)
        plan = LossPlan(method="fast", level="head", interval=STEP)
        if fits_values(facts.shape, rotates):
            plan = replace(plan, matched=MATCHED)
        how: ProfileOptions = {
            "context": min(context, LOSS_CONTEXT),
            "sinks": SINKS,
            "scorer": f"surrogate:file={file}:window={WINDOW}",
            "loss": plan,
            "bits": (16, *WIDTHS),
        }
        job = Job(shape=facts.shape, samples=losses, **read_options(how))
        scores = measure_job(job, engine, kept.stage("losses"), stage(1))
        parameters = {**scores.scorer_parameters, "file": ""}  # which is a part of this one
        fitted = FittedModel.of(surrogate, scores.replace(scorer_parameters=parameters))
        fitted.save(file)
        errors = _errors(engine, str(file), rotates, other_samples, kept, stage(2), notify)
        fitted = fitted.with_errors(errors)
        kept.finish(fitted)
    return fitted


def _check_rotation(layers: Sequence[int], model: Any, item: None, advance: Advance) -> bool:
    """Return whether queries can be moved; refuse layers that cannot be fitted."""
    probe = probe_of(model)
    for layer in layers:
        surrogate_rotation(probe.rotations.get(layer, UNKNOWN))
    layers_of(model)
    return probe.moves_queries


def _samples(
    tokenizer: Any,
    inputs: Iterable[str | Document | Prompt] | None,
    context: int,
    count: int | None,
    seed: int,
) -> tuple[SampleSet, SampleSet, SampleSet]:
    """Return samples for surrogate, losses and whole caches; given texts' last two are disjoint."""
    short = min(context, LOSS_CONTEXT)
    choose = partial(choose_samples, tokenizer=tokenizer, least_tokens=SINKS + WINDOW + 1)
    if inputs is None:
        count, lengths = count or EACH_KIND * len(KINDS), (short, short // 2)
        how: dict[str, Any] = {"kinds": LOSS_KINDS, "question": "both"}
        made = partial(calibration_prompts, tokenizer)
        # shorter prompts have room for fewer different ones; in each form and kind the same number
        n_others = max(ERROR_PROMPTS * short // LOSS_CONTEXT // 8, 1) * 8
        second = made(count, context, seed=seed)
        losses = made(count, lengths, seed=seed, **how)
        other_samples = made(n_others, lengths, seed=ERROR_SEED, **how)
        return (
            choose(second, context_tokens=context, seed=seed, samples=count),
            choose(losses, context_tokens=short, seed=seed, samples=count),
            choose(other_samples, context_tokens=short, seed=seed, samples=n_others),
        )
    texts = [inputs] if isinstance(inputs, str) else list(inputs)
    fitted = choose(texts, context_tokens=context, seed=seed, samples=count)
    count = len(fitted.samples)
    n_measured, n_drawn = min(count, MAX_LOSS_PROMPTS), min(count, ERROR_PROMPTS)
    measured = choose(texts, context_tokens=short, seed=seed, samples=n_measured)
    used = {one.token_ids.tobytes() for one in measured.samples}
    drawn = choose(texts, context_tokens=short, seed=ERROR_SEED, samples=n_drawn)
    unused = [one for one in drawn.samples if one.token_ids.tobytes() not in used]
    return fitted, measured, replace(drawn, samples=tuple(unused))


def _output_in_cache(shape: ModelShape) -> Path:
    file = fitted_file(shape)
    try:
        make_folder(file.parent)
    except InputError as error:
        raise InputError(
            f"{error}; set KVALLOC_CACHE to another one, or name the file with {option('output')}"
        ) from error
    return file


def _errors(
    engine: Engine,
    file: str,
    rotates: bool,
    samples: SampleSet,
    kept: Checkpoint,
    progress: Callable[[int, int], None] | None,
    notify: Callable[[str], None] | None,
) -> tuple[ShareError, ...]:
    tokens = max((one.token_ids.size for one in samples.samples), default=0)
    decided = {one: solve_share(file, one, tokens, rotates) for one in ERROR_SHARES if tokens}
    profiles = {share: one for share, one in decided.items() if one is not None}
    count = partial(_losses_of_caches, engine, samples)
    errors = dict[float, ShareError]()
    for share, kls in count(profiles, kept.stage("solved"), progress).items():
        summary, predicted = _summary(samples, kls), profiles[share].predicted_loss or 0.0
        if min(summary["loss"], predicted) > 0:
            errors[share] = ShareError(
                share=share,
                predicted=predicted,
                loss=summary["loss"],
                interval=summary["interval"] and tuple(summary["interval"]),
                prompts=len(kls),
                p99=tails(np.concatenate([*kls.values()]))["p99"],
            )
    setting = Setting(shape=load_fitted(file).shape, share=1.0, rotates=rotates)
    second = [one for share, one in errors.items() if share in SECOND_READ_SHARES]
    read_twice = {
        one.share: SecondRead(setting=replace(setting, share=one.share)).profile(tokens)
        for one in second
        if any(one.loss > ADD_UP * one.predicted for one in second)
    }
    if read_twice and notify is not None:
        notify(
            f"single losses do not add up: second reads of {len(samples.samples)} prompts are "
            "measured, too"
        )
    for share, kls in count(read_twice, kept.stage("second_reads"), None).items():
        loss = _summary(samples, kls)["loss"] if all(one.size for one in kls.values()) else 0.0
        errors[share] = errors[share].replace(second_read=loss if loss > 0 else None)
    return tuple(errors.values())


def _summary(samples: SampleSet, kls: Mapping[int, FloatArray]) -> dict[str, Any]:
    return loss_summary(samples, {index: float(each.mean()) for index, each in kls.items()})


def _losses_of_caches(
    engine: Engine,
    samples: SampleSet,
    profiles: Mapping[float, BudgetProfile],
    kept: Checkpoint,
    progress: Callable[[int, int], None] | None,
) -> dict[float, dict[int, FloatArray]]:
    """Return each token's KL by share and prompt; none if a second read fails."""
    measured, _ = measured_samples(
        engine,
        partial(_whole_losses, samples.samples, [*profiles.values()]),
        range(len(samples.samples) if profiles else 0),
        kept,
        Steps(len(samples.samples), progress),
        sample_steps=1,
        sizes={"losses": (len(profiles), 1 + CONTINUATION_TOKENS)},
    )
    of_prompts = {index: arrays["losses"] for index, arrays in measured.items()}
    return {
        share: {index: kls[place][np.isfinite(kls[place])] for index, kls in of_prompts.items()}
        for place, share in enumerate(profiles)
        if of_prompts
    }


def _whole_losses(
    samples: Sequence[Sample],
    profiles: Sequence[BudgetProfile],
    model: Any,
    index: int,
    advance: Advance,
) -> dict[str, FloatArray]:
    measured = CacheLosses(model, samples)
    losses = np.full((len(profiles), 1 + CONTINUATION_TOKENS), np.nan)
    for row, profile in zip(losses, profiles, strict=True):
        try:
            kls = measured.losses(index, profile)
        except KVAllocError:
            if profile.predicted_loss is not None:
                raise
            continue  # the fit is done without a second read
        row[: len(kls)] = kls
    advance(1)
    return {"losses": losses}
