"""Profiling: retention curves of a model on some text (XKV's mini-prefill)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from kvalloc.errors import InputError
from kvalloc.files import utc_date, versions
from kvalloc.formats.score_profile import ScoreProfile, rank_grid
from kvalloc.measure.checkpoint import MEASURED_WITH, Checkpoint
from kvalloc.measure.curves import (
    SharedRuns,
    check_share_length,
    checked_widths,
    layer_fidelity,
    on_grid,
    retention_curves,
)
from kvalloc.measure.job import Job, MeasuredSample
from kvalloc.measure.loss_plan import LossLevel, LossMethod, LossPlan
from kvalloc.measure.mini_prefill import mini_prefill
from kvalloc.measure.probing import probed_samples
from kvalloc.measure.sampling import choose_samples
from kvalloc.models.loading import require_run_packages, shape_of
from kvalloc.prompts.texts import Document, Prompt
from kvalloc.scorers import Scorer, get_scorer
from kvalloc.shape import ModelShape

if TYPE_CHECKING:
    from kvalloc.models.attention import AttentionStates

Progress = Callable[[int, int], None]


class ProfileOptions(TypedDict, total=False):
    """What decides the numbers of a score profile, beside model and text.

    Attributes
    ----------
    samples : int, optional
        How many samples; by default the share `sampling_ratio` of all there are, rounded up.
    sampling_ratio : float
        XKV's default is 10%.
    context : int
        Reference context, tokens.
    scorer : str or Scorer
        A registered name, or a scorer.
    window, pool, group_reduce : optional
        The scorer's parameters, where they are given; its own defaults otherwise.
    sinks : int
        First tokens of a prompt that are never evicted and left out of the curves.
    count_sinks : bool
        Count the sinks as evictable, as the paper does.
    seed : int
        Of the choice of samples.
    batch : int
        Samples of equal length that run together. Peak memory grows with it.
    loss : {"measured", "fast"} or LossPlan, optional
        Also measure the harm of reducing each unit alone: by a forward for every unit and level,
        or by a second-order estimate. On the prompts' answers where they have one, else on what
        the model itself writes next. Off by default.
    loss_level : {"layer", "head"}
        What is reduced alone.
    probes : int, optional
        With measured losses: estimate all figures first, then measure so many of them a sample,
        those whose measurement is most likely to change what 10, 20 or 50% of all entries are
        spent on; the other estimates are scaled to them. All are measured by default.
    loss_policies : sequence of str
        Policies or scorers, with options such as ``"snapkv:window=4"``, whose losses are measured
        beside those of the scorer's best entries, so that `kvalloc.solve` can choose a policy for
        each unit together with its budget.
    share_length : int
        Also measure what each run of 2 to so many adjacent layers keeps when its layers keep the
        same entries, which sharing them needs (MPCache, Sec. 4.4); 1 for nothing, 4 at most.
    bits : sequence of int, optional
        Bit widths, of 16, 8 and 4, whose effect on the attention output of the window's rows is
        measured too (`kvalloc.runtime.quantization.output_fidelity`). Costs another pass over keys
        and values for each width below 16, so it is off by default.
    """

    samples: int | None
    sampling_ratio: float
    context: int
    scorer: str | Scorer
    window: int | None
    pool: int | None
    group_reduce: str | None
    sinks: int
    count_sinks: bool
    seed: int
    batch: int
    loss: LossMethod | LossPlan | None
    loss_level: LossLevel
    probes: int | None
    loss_policies: Sequence[str]
    share_length: int
    bits: Sequence[int] | None


DEFAULTS: ProfileOptions = {
    "samples": None,
    "sampling_ratio": 0.1,
    "context": 1024,
    "scorer": "xkv",
    "window": None,
    "pool": None,
    "group_reduce": None,
    "sinks": 4,
    "count_sinks": False,
    "seed": 0,
    "batch": 1,
    "loss": None,
    "loss_level": "layer",
    "probes": None,
    "loss_policies": (),
    "share_length": 1,
    "bits": None,
}


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
    """Measure how concentrated the attention of every layer and KV head is.

    Each sample runs through the decoder once, without a KV cache and without the head. In each
    full-attention layer the scorer's scores are turned into the head's retention curve at once
    and dropped. Curves are exact up to 4096 tokens of context; above that they are stored on a
    grid and the interpolation error is measured.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A causal language model; the same afterwards.
    tokenizer : transformers.PreTrainedTokenizerBase
        Its tokenizer.
    texts : iterable of str, Document or Prompt
        Running text (a string counts as such) is cut into samples of exactly `context` tokens;
        a prompt is one sample, its middle dropped when it is longer, its curve stretched over
        the reference ranks by the share kept when it is shorter.
    output : str or Path, optional
        The score profile to write, atomically. Each finished sample is kept in ``OUTPUT.partial``
        until then.
    resume : bool
        Go on with what an earlier, killed call left there; the arrays are bit-identical to an
        unbroken run.
    progress : callable, optional
        Called with (layers done, layers in all); measuring a layer's losses counts as several.
    model_id : str, optional
        Instead of what the model's config says.
    **options
        See `ProfileOptions`.

    Returns
    -------
    ScoreProfile
        Sliding layers have the curve 1 and mass 0: nothing is decided there.

    Raises
    ------
    InputError
        If text, prompts or options cannot be used, the context is beyond the model's limit, a score
        is not finite, or the output cannot be written or has unfinished work of another job beside
        it.
    UnsupportedModelError
        If the model has no attention that kvalloc can see.
    MissingDependencyError
        If torch or transformers is missing.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction for Long-Context LLM Inference, Section IV, Eq. 4.
    """
    if resume and output is None:
        raise InputError("there is nothing to resume from; name the output")
    require_run_packages()
    shape = shape_of(model, model_id=model_id)
    job = _job(model, tokenizer, texts, shape, options)
    if output is None:
        return measure_job(job, None, progress)
    with Checkpoint(output, job.record(), resume=resume) as kept:
        result = measure_job(job, kept, progress)
        result.save(output)
        kept.finish()
    return result


def _job(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt],
    shape: ModelShape,
    options: ProfileOptions,
) -> Job:
    """The options as a job; refuses what cannot be, before anything is measured."""
    if unknown := sorted(options.keys() - DEFAULTS.keys()):
        raise TypeError(f"profile() got an unexpected keyword argument {unknown[0]!r}")
    given: ProfileOptions = {**DEFAULTS, **options}
    scorer = _scorer(given)
    scorer.check_prompt_only()
    context, sinks = given["context"], 0 if given["count_sinks"] else given["sinks"]
    _check_sizes(shape, context, sinks, scorer.window, given["batch"])
    check_share_length(given["share_length"], shape.full_layers)
    protected = sinks + scorer.window
    job = Job(
        model=model,
        shape=shape,
        scorer=scorer,
        sinks=sinks,
        context_tokens=context,
        ranks=rank_grid(context - protected, context),
        samples=choose_samples(
            texts,
            tokenizer,
            context_tokens=context,
            least_tokens=protected + 1,
            samples=given["samples"],
            sampling_ratio=given["sampling_ratio"],
            seed=given["seed"],
        ),
        batch=given["batch"],
        losses=_loss_plan(given),
        bits=checked_widths(given["bits"]),
        share_length=given["share_length"],
    )
    _ = job.policies
    return job


def measure_job(
    job: Job, kept: Checkpoint | None = None, progress: Progress | None = None
) -> ScoreProfile:
    """Measure all samples of a job and put them together."""
    if job.losses is None or job.losses.probes is None:
        return _assemble(job, _measure_all(job, kept, progress))
    # Twice over the samples: estimates, then what they leave undecided, about as long again.
    n_samples = len(job.samples.token_ids)
    half = len(job.shape.full_layers) * (1 + job.loss_layers) * n_samples

    def first(done: int, total: int) -> None:
        if progress is not None:
            progress(done, 2 * half)

    def second(samples: int) -> None:
        if progress is not None:
            progress(half + samples * half // n_samples, 2 * half)

    found, where = probed_samples(job, _measure_all(job, kept, first), kept, second)
    return _assemble(job, found).replace(loss_probed=where.astype(np.int64))


def _measure_all(
    job: Job, kept: Checkpoint | None, progress: Progress | None
) -> list[MeasuredSample]:
    """All samples in order, those from the checkpoint without running them again."""
    n_layers = len(job.shape.full_layers) * (1 + job.loss_layers)
    total = n_layers * len(job.samples.token_ids)
    done = 0
    results: list[MeasuredSample] = []
    for group in job.groups():
        finished = [job.finished(kept, index) for index in group]
        found = [sample for sample in finished if sample is not None]
        if len(found) == len(group):
            results += found
        else:  # a part of a group runs again with its companions: the same sums, bit for bit
            start = done

            def layer_done(layers: int, start: int = start, size: int = len(group)) -> None:
                if progress is not None:
                    progress(start + layers * size, total)

            measured = _measure_group(job, group, layer_done)
            if job.losses is not None:
                measured = _with_losses(job, group, measured, layer_done)
            for index, sample in zip(group, measured, strict=True):
                job.keep(kept, index, sample)
            results += measured
        done += n_layers * len(group)
        if progress is not None:
            progress(done, total)
    return results


def _measure_group(
    job: Job, group: list[int], layer_done: Callable[[int], None]
) -> list[MeasuredSample]:
    """One mini-prefill over samples of equal length."""
    import torch

    ids = np.stack([job.samples.token_ids[index] for index in group])
    sizes = {name: (len(group), *size) for name, size in job.sizes().items()}
    curves, masses = np.ones(sizes["curves"]), np.zeros(sizes["masses"])
    fidelity = np.ones(sizes.get("fidelity", 0))
    shared, errors = np.zeros(sizes.get("shared", 0)), np.zeros(len(group))
    layers = job.shape.full_layers
    runs = SharedRuns(layers, job.share_length)
    first, end = job.sinks, ids.shape[1] - job.scorer.window

    def look(states: AttentionStates) -> None:
        layer = states.layer
        scores = job.scorer.score(states, sinks=job.sinks)[..., first:end].float().cpu().numpy()
        for row, index in enumerate(group):
            _check_finite(scores[row], layer, index, job.shape.model_id)
            exact, masses[row, layer] = retention_curves(scores[row])
            curves[row, layer], error = on_grid(exact, job.ranks)
            errors[row] = max(errors[row], error)
        if job.bits:
            fidelity[:, layer] = layer_fidelity(
                states, job.bits, window=job.scorer.window, model_id=job.shape.model_id
            )
        for run, together in runs.add(layer, scores, masses[:, layer]):
            for row in range(len(group)):
                shared[row, run], error = on_grid(together[row], job.ranks)
                errors[row] = max(errors[row], error)
        layer_done(layers.index(layer) + 1)

    if job.states is None:
        device = job.model.get_input_embeddings().weight.device
        mini_prefill(job.model, torch.from_numpy(ids).to(device), look, layers=layers)
    else:
        for layer in layers:
            look(job.states[layer])
    return [
        MeasuredSample(
            curves=curves[row],
            masses=masses[row],
            interpolation_error=float(errors[row]),
            fidelity=fidelity[row] if job.bits else None,
            shared=shared[row] if len(runs.runs) else None,
        )
        for row in range(len(group))
    ]


def _with_losses(
    job: Job, group: list[int], measured: list[MeasuredSample], layer_done: Callable[[int], None]
) -> list[MeasuredSample]:
    """The same samples with their loss curves, measured one by one."""
    from kvalloc.measure.loss_curves import sample_losses  # loads torch

    done = len(job.shape.full_layers) * len(group)  # the mini-prefills

    def one_more() -> None:
        nonlocal done
        done += job.loss_layers
        layer_done(done // len(group))

    complete = []
    for index, sample in zip(group, measured, strict=True):
        found = sample_losses(job, index, layer_done=one_more)
        complete.append(replace(sample, losses=found.losses, loss_stderr=found.stderr))
    return complete


def _loss_plan(given: ProfileOptions) -> LossPlan | None:
    loss, probes, policies = given["loss"], given["probes"], given["loss_policies"]
    if loss is not None and not isinstance(loss, LossPlan):
        return LossPlan(
            method=loss, level=given["loss_level"], probes=probes, policies=tuple(policies)
        )
    if probes is not None:
        raise InputError("probes are of measured losses: add loss='measured', or name them there")
    if policies:
        raise InputError(
            "loss_policies are measured by their losses: say how with loss='measured' or 'fast', "
            "or name the policies in the plan"
        )
    return loss


def _assemble(job: Job, results: list[MeasuredSample]) -> ScoreProfile:
    stacked = {name: np.stack([one.arrays()[name] for one in results]) for name in job.sizes()}
    losses: dict[str, Any] = {}
    if job.losses is not None:
        losses = {
            "loss_tokens": job.loss_levels,
            "loss_method": job.losses.method if job.losses.probes is None else "fast",
            "loss_policies": job.policies[1:],
        }
        for name in ("losses", "loss_stderr"):
            losses[name] = stacked[name][:, :, :, 0]
            if len(job.policies) > 1:
                losses[f"other_{name}"] = stacked[name][:, :, :, 1:]
    return ScoreProfile(
        **losses,
        shape=job.shape,
        scorer=job.scorer.name,
        scorer_parameters=job.scorer.parameters(),
        context_tokens=job.context_tokens,
        sinks=job.sinks,
        window=job.scorer.window,
        ranks=job.ranks,
        curves=stacked["curves"],
        masses=stacked["masses"],
        sample_tokens=np.array([ids.size for ids in job.samples.token_ids], dtype=np.int64),
        bit_widths=np.array(job.bits, dtype=np.int64) if job.bits else None,
        bit_fidelity=stacked.get("fidelity"),
        shared_runs=job.shared_runs if job.share_length > 1 else None,
        shared_curves=stacked.get("shared"),
        interpolation_error=max(result.interpolation_error for result in results),
        text_digest=job.samples.digest(),
        text_description=job.samples.description,
        versions=versions(*MEASURED_WITH),
        created=utc_date(),
    )


def _scorer(given: ProfileOptions) -> Scorer:
    scorer = given["scorer"]
    named = {"window": given["window"], "pool": given["pool"]}
    every: dict[str, Any] = {**named, "group_reduce": given["group_reduce"]}
    parameters = {name: value for name, value in every.items() if value is not None}
    if not isinstance(scorer, Scorer):
        return get_scorer(scorer, **parameters)
    if parameters:
        raise InputError(
            f"{', '.join(parameters)} cannot be given together with a ready scorer; set it there"
        )
    return scorer


def _check_sizes(shape: ModelShape, context: int, sinks: int, window: int, batch: int) -> None:
    if sinks < 0:
        raise InputError(f"sinks is {sinks}, expected a number of tokens >= 0")
    if batch < 1:
        raise InputError(f"batch is {batch}, expected a number of samples >= 1")
    if context <= sinks + window:
        raise InputError(
            f"a context of {context} tokens leaves nothing to evict beside {sinks} sinks and a "
            f"window of {window}; choose at least {sinks + window + 1} tokens"
        )
    limit = shape.max_context_tokens
    if limit is not None and context > limit:
        raise InputError(
            f"a context of {context} tokens is beyond the {limit} tokens that {shape.model_id} "
            f"was made for; choose at most {limit}"
        )


def _check_finite(scores: npt.NDArray[Any], layer: int, sample: int, model_id: str) -> None:
    if not np.isfinite(scores).all() or scores.min() < 0:
        raise InputError(
            f"the scores of {model_id} in layer {layer}, sample {sample} are not finite numbers "
            ">= 0; load the model in float32 or bfloat16, or check its weights"
        )
