"""Profiling: retention curves of a model on some text (XKV's mini-prefill)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict, Unpack

import numpy as np
import numpy.typing as npt

from kvalloc.errors import InputError, option
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
from kvalloc.units import Option

if TYPE_CHECKING:
    from kvalloc.models.attention import AttentionStates

Progress = Callable[[int, int], None]


SCORES, LOSSES, MORE = "What is measured", "Losses", "Other measurements"
"""Headings in the command's help."""


class ProfileOptions(TypedDict, total=False):
    """What decides the numbers of a score profile, beside model and text.

    Parameters
    ----------
    samples : int
        Samples to measure; see `sampling_ratio`. With `tasks` two of each by default.
    sampling_ratio : float, default 0.1
        Without `samples`: share of all samples there are, rounded up.
    context : int
        Reference context, tokens.
    scorer : str or Scorer, default "xkv"
        What is measured; see 'kvalloc scorers'.
    window : int
        The scorer's window, tokens; its own by default.
    pool : int
        The scorer's pooling width, tokens; its own by default.
    group_reduce : str
        How query heads that share a KV head are reduced.
    sinks : int, default 4
        First tokens that are never evicted, and left out of the curves.
    count_sinks : bool
        Count the sinks as evictable, as XKV does.
    seed : int
        Of the choice of samples.
    batch : int
        Samples of equal length that run together. Peak memory grows with it.
    loss : {"measured", "fast"} or LossPlan
        Also measure what reducing each unit alone does to the next-token distribution: a forward
        for every unit and level, or a second-order estimate at the price of a few prefills. It is
        measured on the prompts' answers, or on what the model itself writes next.
    loss_level : {"layer", "head"}, default "layer"
        What is reduced alone for `loss`.
    probes : int
        With `loss` measured: estimate everything first, then measure only the N figures a sample
        whose measurement may change the solution, and scale the other estimates to them; all by
        default.
    loss_policies : str or sequence of str
        Policies or scorers whose losses are measured beside the scorer's, so that 'kvalloc solve'
        chooses one for each unit with its budget; options after a colon, such as
        tova,critical,snapkv:window=4:pool=1; 'usual' for a set that does well.
    bits : str or sequence of int
        Measure what these bit widths do to the attention output too, for 'kvalloc solve --bits'.
        Each width below 16 costs another pass over keys and values.
    share_length : int, default 1
        Also measure what runs of 2 to N adjacent layers keep when they share the kept entries
        (MPCache, Sec. 4.4), for 'kvalloc solve --share-groups'; 4 at most, 1 measures nothing.
    """

    samples: Annotated[int | None, Option("N", SCORES)]
    sampling_ratio: Annotated[float, Option("SHARE", SCORES)]
    context: int
    scorer: Annotated[str | Scorer, Option("NAME", SCORES)]
    window: Annotated[int | None, Option("N", SCORES)]
    pool: Annotated[int | None, Option("N", SCORES)]
    group_reduce: Annotated[str | None, Option("mean|max", SCORES)]
    sinks: Annotated[int, Option("N", SCORES)]
    count_sinks: Annotated[bool, Option("", SCORES)]
    seed: int
    batch: int
    loss: Annotated[LossMethod | LossPlan | None, Option("[measured|fast]", LOSSES)]
    loss_level: Annotated[LossLevel, Option("", LOSSES)]
    probes: Annotated[int | None, Option("N", LOSSES)]
    loss_policies: Annotated[str | Sequence[str], Option("NAME,NAME", LOSSES)]
    bits: Annotated[str | Sequence[int] | None, Option("16,8,4", MORE)]
    share_length: Annotated[int, Option("N", MORE)]


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


def read_options(
    options: ProfileOptions,
) -> tuple[ProfileOptions, Scorer, LossPlan | None, tuple[int, ...]]:
    """Options with their defaults, scorer, plan of the losses and bit widths.

    Raises
    ------
    InputError
        If an option cannot be used, or some contradict each other, whatever the model.
    """
    if unknown := sorted(options.keys() - DEFAULTS.keys()):
        raise TypeError(f"profile() got an unexpected keyword argument {unknown[0]!r}")
    given: ProfileOptions = {**DEFAULTS, **options}
    if given["count_sinks"]:
        given["sinks"] = 0
    scorer, losses = _scorer(given), _loss_plan(given)
    scorer.check_prompt_only()
    if losses is not None:
        losses.named_policies(scorer, sinks=given["sinks"])
    return given, scorer, losses, checked_widths(given["bits"])


def _job(
    model: Any,
    tokenizer: Any,
    texts: Iterable[str | Document | Prompt],
    shape: ModelShape,
    options: ProfileOptions,
) -> Job:
    """The options as a job; refuses what cannot be, before anything is measured."""
    given, scorer, losses, bits = read_options(options)
    context, sinks = given["context"], given["sinks"]
    _check_sizes(shape, context, sinks, scorer.window, given["batch"])
    check_share_length(given["share_length"], shape.full_layers)
    protected = sinks + scorer.window
    return Job(
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
        losses=losses,
        bits=bits,
        share_length=given["share_length"],
    )


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
    if isinstance(policies, str):
        policies = policies.split(",")
    if loss is not None and not isinstance(loss, LossPlan):
        level = given["loss_level"]
        return LossPlan(method=loss, level=level, probes=probes, policies=tuple(policies))
    name = "probes" if probes is not None else "loss_policies" if policies else ""
    if name and loss is None:
        fast = "" if name == "probes" else f" or {option('loss', 'fast')}"
        raise InputError(f"{option(name)} needs losses: add {option('loss', 'measured')}{fast}")
    if name:
        raise InputError(f"{option(name)} belongs into the LossPlan that is given; set it there")
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
