"""``kvalloc.fit``: measure once what the default needs of a model.

It stands in this room because it solves: how far the sum of single losses is from what whole
caches lose is measured with budgets that were decided by it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any, Unpack

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.engine.contract import Advance, Engine, Failed, engine_of, none_failed
from kvalloc.errors import InputError, option
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.fitted import FittedModel
from kvalloc.formats.score_profile import ShareError
from kvalloc.formats.shipped_profiles import fitted_file
from kvalloc.measure.cache_loss import CacheLosses
from kvalloc.measure.checkpoint import Checkpoint
from kvalloc.measure.job import Job, Steps, measured_samples
from kvalloc.measure.profiling import ProfileOptions, measure_job, read_options
from kvalloc.measure.sampling import Sample, SampleSet, choose_samples
from kvalloc.measure.scorer_fitting import FitOptions, SurrogateFit
from kvalloc.models.attention import rotary_frequencies
from kvalloc.models.loading import require_run_packages
from kvalloc.online.solved import SINKS, WIDTHS, WINDOW, solve_share
from kvalloc.online.solving import loss_summary
from kvalloc.prompts.calibration import KINDS, calibration_prompts
from kvalloc.prompts.texts import Document, Prompt
from kvalloc.scorers.surrogate import surrogate_frequencies
from kvalloc.units import duration, keywords_of

EACH_KIND = 4
"""Prompts of each kind that are made to fit the surrogate."""

LOSS_KINDS, LOSS_CONTEXT, MAX_LOSS_PROMPTS = ("kl", "own", "facts", "needle"), 600, 16
"""Kinds of the prompts that losses are measured on, their longest (half are half as long), and how
many of given texts are taken at most."""

ERROR_PROMPTS, ERROR_SEED, ERROR_SHARES = 24, 1_000, (0.05, 0.1, 0.2)
"""Other prompts, on which whole caches of these shares are measured; fewer shorter ones."""


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
    """Measure once what the default needs of a model, so that each prompt is read once.

    The file goes into kvalloc's cache folder under the digest of the weights.
    ``kvalloc.apply(model, budget=...)``, ``generate``, ``chat`` and ``eval`` take it from there,
    and solve for each share that they are given. Three things are measured:

    1. a surrogate: what a second read of a prompt would look up;
    2. loss curves of every head over entries and widths, one head reduced at a time, with the
       entries that the surrogate ranks highest;
    3. what whole caches lose that were decided by these curves, at three shares, on other prompts.

    Parameters
    ----------
    model : transformers.PreTrainedModel or Engine
        A causal language model, the same afterwards; or workers, as for `kvalloc.profile`.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    texts : iterable of str, Document or Prompt, optional
        As `kvalloc.profile` takes them. By default prompts that kvalloc makes: prose, lists, code,
        facts and the model's own answers.
    output : str or Path, optional
        The file to write, atomically, instead of the one in the cache folder. What is finished is
        kept in ``OUTPUT.partial`` until then.
    resume : bool
        Go on with what an earlier, killed call left there.
    progress : callable, optional
        Called with (prompts done, prompts in all).
    notify : callable, optional
        Called once with a line that says how long it takes, as measured on the first prompt.
    model_id : str, optional
        Instead of what the model's config says.
    **options
        See `kvalloc.measure.scorer_fitting.FitOptions`.

    Returns
    -------
    FittedModel

    Raises
    ------
    KVAllocError
        As `kvalloc.profile`; or if there is too little text.

    Examples
    --------
    >>> demo = kvalloc.load_model("demo")  # doctest: +SKIP
    >>> kvalloc.fit(demo.model, demo.tokenizer)  # doctest: +SKIP
    """
    require_run_packages()
    engine = engine_of(model)
    facts = engine.facts(model_id)
    check = partial(_check_rotation, facts.shape.full_layers)
    none_failed(engine.run(check, {0: None}, lambda steps: None))
    output = _output(output, fitted_file(facts.shape))
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
    each = (2 * layers, layers * (2 + len(WIDTHS)), layers * (1 + len(ERROR_SHARES)))
    prompts = [len(one.samples) for one in (second, losses, other_samples)]
    begun, unsaid = perf_counter(), [] if resume else [notify]  # a resumed job takes less

    def stage(number: int) -> Callable[[int, int], None]:
        """Return the progress of one stage as the job's."""

        def count(done: int, total: int) -> None:
            measured = prompts[number] * done // max(total, 1)
            if measured and unsaid and (say := unsaid.pop()) is not None:
                a_prompt = (perf_counter() - begun) / measured / each[0]
                seconds = a_prompt * sum(n * work for n, work in zip(prompts, each, strict=True))
                say(
                    f"measuring takes about {duration(seconds)}: {sum(prompts)} prompts through "
                    f"{layers} layers"
                )
            if progress is not None:
                progress(sum(prompts[:number]) + measured, sum(prompts))

        return count

    with Checkpoint(output, record, resume=resume) as kept:
        fitting = SurrogateFit(shape=facts.shape, samples=second, context=context)
        surrogate = fitting.run(engine, kept.stage("second"), stage(0))
        file = kept.folder / "surrogate.safetensors"
        surrogate.save(file)
        how: ProfileOptions = {
            "context": min(context, LOSS_CONTEXT),
            "sinks": SINKS,
            "scorer": f"surrogate:file={file}:window={WINDOW}",
            "loss": "fast",
            "loss_level": "head",
            "bits": (16, *WIDTHS),
        }
        job = Job(shape=facts.shape, samples=losses, **read_options(how))
        scores = measure_job(job, engine, kept.stage("losses"), stage(1))
        parameters = {**scores.scorer_parameters, "file": ""}  # which is a part of this one
        fitted = FittedModel.of(surrogate, scores.replace(scorer_parameters=parameters))
        fitted.save(file)
        errors = _errors(engine, str(file), other_samples, kept.stage("error"), stage(2))
        fitted = fitted.with_errors(errors)
        fitted.save(output)
        kept.finish()
    return fitted


def _check_rotation(layers: Sequence[int], model: Any, item: None, advance: Advance) -> None:
    """Refuse a model whose layers no surrogate can be fitted to, before prompts are made."""
    frequencies = rotary_frequencies(model)
    for layer in layers:
        surrogate_frequencies(frequencies[layer])


def _samples(
    tokenizer: Any,
    inputs: Iterable[str | Document | Prompt] | None,
    context: int,
    count: int | None,
    seed: int,
) -> tuple[SampleSet, SampleSet, SampleSet]:
    """Return what the surrogate is fitted on, what losses and what whole caches are measured on.

    Of given texts whole caches are measured on samples that no loss was measured on, if any.
    """
    short = min(context, LOSS_CONTEXT)

    def choose(
        texts: Sequence[str | Document | Prompt], longest: int, seed: int, count: int | None
    ) -> SampleSet:
        return choose_samples(
            texts,
            tokenizer,
            context_tokens=longest,
            least_tokens=SINKS + WINDOW + 1,
            samples=count,
            seed=seed,
        )

    if inputs is None:
        count, lengths = count or EACH_KIND * len(KINDS), (short, short // 2)
        how: dict[str, Any] = {"kinds": LOSS_KINDS, "question": "both"}
        made = partial(calibration_prompts, tokenizer)
        # shorter prompts have room for fewer different ones; in each form and kind the same number
        n_others = max(ERROR_PROMPTS * short // LOSS_CONTEXT // 8, 1) * 8
        other_samples = made(n_others, lengths, seed=ERROR_SEED, **how)
        return (
            choose(made(count, context, seed=seed), context, seed, count),
            choose(made(count, lengths, seed=seed, **how), short, seed, count),
            choose(other_samples, short, seed, n_others),
        )
    texts = [inputs] if isinstance(inputs, str) else list(inputs)
    second = choose(texts, context, seed, count)
    count = len(second.samples)
    measured = choose(texts, short, seed, min(count, MAX_LOSS_PROMPTS))
    used = {one.token_ids.tobytes() for one in measured.samples}
    drawn = choose(texts, short, ERROR_SEED, min(count, ERROR_PROMPTS))
    unused = [one for one in drawn.samples if one.token_ids.tobytes() not in used]
    return second, measured, replace(drawn, samples=tuple(unused))


def _output(output: str | Path | None, default: Path) -> Path:
    """Return the file to write; make the cache folder where none is named."""
    if output is not None:
        return Path(output)
    try:
        default.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {default.parent} ({error.strerror}); set KVALLOC_CACHE to one "
            f"that can be written to, or name the file with {option('output')}"
        ) from error
    return default


def _errors(
    engine: Engine,
    file: str,
    samples: SampleSet,
    kept: Checkpoint,
    progress: Callable[[int, int], None] | None,
) -> tuple[ShareError, ...]:
    """Return what whole caches of some shares lose beside what the file's curves predict."""
    tokens = max((one.token_ids.size for one in samples.samples), default=0)
    decided = {share: solve_share(file, share, tokens) for share in ERROR_SHARES if tokens}
    profiles = {share: one for share, one in decided.items() if one is not None}
    steps = Steps(len(samples.samples), progress)
    work = partial(_whole_losses, samples.samples, [*profiles.values()])
    places = range(len(samples.samples) if profiles else 0)
    losses = {
        index: result["losses"]
        for index, result in measured_samples(engine, work, places, kept, steps, sample_steps=1)
        if not isinstance(result, Failed)
    }
    errors = []
    for place, (share, profile) in enumerate(profiles.items() if losses else ()):
        measured = loss_summary(
            samples, {index: sample_losses[place] for index, sample_losses in losses.items()}
        )
        predicted = profile.predicted_loss or 0.0
        if min(measured["loss"], predicted) > 0:
            ends = measured["interval"]
            errors.append(
                ShareError(
                    share=share,
                    predicted=predicted,
                    loss=measured["loss"],
                    interval=ends and tuple(ends),
                    prompts=len(losses),
                )
            )
    return tuple(errors)


def _whole_losses(
    samples: Sequence[Sample],
    profiles: Sequence[BudgetProfile],
    model: Any,
    index: int,
    advance: Advance,
) -> dict[str, FloatArray]:
    """Return the loss of one prompt's whole cache by each profile."""
    measured = CacheLosses(model, samples)
    losses = np.array([measured.loss(index, profile) for profile in profiles])
    advance(1)
    return {"losses": losses}
