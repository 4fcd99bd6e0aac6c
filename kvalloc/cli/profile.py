"""``kvalloc profile``: from a model and text to a score profile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalloc.cli import profile_options as options
from kvalloc.cli.calibrating import Recipe, read_recipe
from kvalloc.cli.options import (
    Device,
    Dtype,
    Json,
    Lengths,
    ModelName,
    Question,
    Quiet,
    ReferenceContext,
    TaskNames,
)
from kvalloc.cli.output import duration, print_fields, print_json, size
from kvalloc.cli.progress import load
from kvalloc.errors import InputError
from kvalloc.units import parse_bits

if TYPE_CHECKING:
    from kvalloc.formats.score_profile import ScoreProfile
    from kvalloc.measure import Document, Prompt
    from kvalloc.models.loading import LoadedModel
    from kvalloc.scorers import Scorer

EXAMPLES = """\
  kvalloc profile demo --samples 4 --context 1024 -o s.safetensors
  kvalloc profile ./my-model --text docs/ --context 8192 --resume -o s.safetensors
  kvalloc profile Qwen/Qwen3-0.6B --prompts prompts.jsonl --scorer snapkv -o s.safetensors
  kvalloc profile demo --samples 8 --loss fast --loss-level head -o s.safetensors
  kvalloc profile demo --scorer snapkv --window 32 --loss fast --loss-level head \\
      --loss-policies usual -o s.safetensors
"""

DEFAULT_SINKS = 4
DEFAULT_RATIO = 0.1
DEFAULT_KINDS = ("needle", "pairs", "kl", "code")
"""`kvalloc.prompts.calibration.KINDS`, which is not imported without need."""
EACH_TASK = 2
"""Prompts of each kind that are made."""


def profile(
    model: ModelName,
    output: options.Output,
    text: options.Text = None,
    prompts: options.Prompts = None,
    tasks: TaskNames = None,
    question: Question = None,
    lengths: Lengths = None,
    samples: options.Samples = None,
    sampling_ratio: options.SamplingRatio = None,
    context: ReferenceContext = 1024,
    scorer: options.Scorer = "xkv",
    window: options.Window = None,
    pool: options.Pool = None,
    group_reduce: options.GroupReduce = None,
    sinks: options.Sinks = None,
    count_sinks: options.CountSinks = False,
    bits: options.Bits = None,
    share_length: options.ShareLength = 1,
    seed: options.Seed = 0,
    loss: options.Loss = None,
    loss_level: options.LossLevel = "layer",
    probes: options.Probes = None,
    loss_policies: options.LossPolicies = None,
    dtype: Dtype = "float32",
    device: Device = None,
    resume: options.Resume = False,
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure on text what each layer and KV head can do without.

    MODEL is a hub id, a local folder, a .gguf file, or 'demo' (SmolLM2-135M-Instruct). Finished
    samples are kept in OUT.safetensors.partial until the profile is complete. With --loss, and no
    text or prompts given, prompts are made as by --tasks needle,pairs,kl,code.
    """
    given = dict(locals())
    # Everything that can be refused without the model is refused before it is loaded.
    _check(given)
    recipe = _recipe(given)
    texts = [] if recipe else _read(text or [], prompts or [])
    wanted = _wanted(given)
    start = time.perf_counter()
    loaded = load(model, dtype=dtype, device=device, quiet=quiet)
    if recipe:
        texts = [
            *recipe.make(
                loaded.tokenizer, samples=samples, each=EACH_TASK, context=context, seed=seed
            )
        ]
        wanted["samples"] = len(texts)
    measured = _measure(loaded, texts, output, wanted, quiet=quiet)
    _report(measured, output, time.perf_counter() - start, json=json, quiet=quiet)


def _check(given: Mapping[str, Any]) -> None:
    """Refuse options that contradict each other."""
    chosen = _check_output(
        given["output"], given["scorer"], _scorer_options(given), resume=given["resume"]
    )
    if given["sinks"] is not None and given["count_sinks"]:
        raise InputError("--sinks and --count-sinks contradict each other; give one of them")
    _check_probes(given["probes"], given["loss"])
    _check_loss(given["loss"], given["loss_level"], _policies(given), chosen, _sinks(given))


def _recipe(given: Mapping[str, Any]) -> Recipe | None:
    """Which prompts are to be made, if any."""
    recipe = read_recipe(
        *(given["tasks"], given["question"], given["lengths"]),
        context=given["context"],
        given=bool(given["text"] or given["prompts"]),
        default=DEFAULT_KINDS if given["loss"] is not None else (),
    )
    if recipe is not None and given["sampling_ratio"] is not None:
        raise InputError(
            "--sampling-ratio is a share of the text that is given, and prompts are made here; "
            "say how many with --samples"
        )
    return recipe


def _wanted(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `kvalloc.measure.profile` is told."""
    ratio = given["sampling_ratio"]
    same = (
        *("samples", "context", "scorer", "count_sinks", "share_length", "seed", "loss"),
        *("loss_level", "probes", "resume"),
    )
    return {
        **_scorer_options(given),
        **{name: given[name] for name in same},
        "sampling_ratio": DEFAULT_RATIO if ratio is None else ratio,
        "sinks": _sinks(given),
        "loss_policies": _policies(given),
        "bits": None if given["bits"] is None else parse_bits(given["bits"]),
    }


def _scorer_options(given: Mapping[str, Any]) -> dict[str, Any]:
    names = ("window", "pool", "group_reduce")
    return {name: given[name] for name in names if given[name] is not None}


def _sinks(given: Mapping[str, Any]) -> int:
    return DEFAULT_SINKS if given["sinks"] is None else int(given["sinks"])


def _policies(given: Mapping[str, Any]) -> tuple[str, ...]:
    names = given["loss_policies"]
    return tuple(names.split(",")) if names else ()


def _check_output(output: Path, scorer: str, parameters: dict[str, Any], *, resume: bool) -> Scorer:
    """Refuse what is wrong with output and scorer."""
    from kvalloc.files import check_writable
    from kvalloc.measure.checkpoint import check_unfinished, checkpoint_folder
    from kvalloc.models.loading import require_run_packages
    from kvalloc.scorers import get_scorer

    check_writable(output)
    chosen = get_scorer(scorer, **parameters)
    require_run_packages()
    check_unfinished(checkpoint_folder(output), resume=resume)
    return chosen


def _check_probes(probes: int | None, loss: str | None) -> None:
    from kvalloc.measure.loss_plan import LossPlan

    if probes is None:
        return
    if loss is None:
        raise InputError("--probes are of measured losses; add --loss")
    LossPlan(method=loss, probes=probes)  # type: ignore[arg-type]  # it checks them


def _check_loss(
    loss: str | None, level: str, policies: tuple[str, ...], scorer: Scorer, sinks: int
) -> None:
    from kvalloc.measure.loss_plan import LossPlan

    if loss is not None:
        plan = LossPlan(method=loss, level=level, policies=policies)  # type: ignore[arg-type]
        plan.named_policies(scorer, sinks=sinks)
    elif policies:
        raise InputError("--loss-policies are measured by their losses; add --loss measured|fast")


def _measure(
    loaded: LoadedModel,
    texts: list[Document | Prompt],
    output: Path,
    options: dict[str, Any],
    *,
    quiet: bool,
) -> ScoreProfile:
    from kvalloc.cli.progress import ProgressBar
    from kvalloc.measure import profile

    # losses are counted as the layers of a prefill that take as long
    unit = "layers" if options["loss"] is None else "steps"
    with ProgressBar("profiling", unit=unit, quiet=quiet) as progress:
        return profile(
            loaded.model,
            loaded.tokenizer,
            texts,
            output=output,
            progress=progress,
            model_id=loaded.model_id,
            **options,
        )


def _read(text: list[Path], prompts: list[Path]) -> list[Document | Prompt]:
    from kvalloc.measure import default_texts, read_prompts, read_texts

    texts: list[Document | Prompt] = [*read_texts(text)]
    for file in prompts:
        texts += read_prompts(file)
    return texts or [*default_texts()]


def _report(
    measured: ScoreProfile, output: Path, seconds: float, *, json: bool, quiet: bool
) -> None:
    file_bytes = output.stat().st_size
    facts: dict[str, Any] = {
        "output": str(output),
        "model": measured.shape.model_id,
        "scorer": measured.scorer,
        "scorer_parameters": measured.scorer_parameters,
        "samples": measured.n_samples,
        "context_tokens": measured.context_tokens,
        "sinks": measured.sinks,
        "window": measured.window,
        "interpolation_error": measured.interpolation_error,
        "text_description": measured.text_description,
        "loss_policies": [policy.title for policy in measured.policies]
        if measured.has_losses
        else None,
        "loss_tokens": None if measured.loss_tokens is None else measured.loss_tokens.tolist(),
        "loss_probes": None if measured.loss_probed is None else int(measured.loss_probed.sum()),
        "seconds": seconds,
        "file_bytes": file_bytes,
    }
    if json:
        print_json(facts)
        return
    if quiet:
        return
    from kvalloc.cli.inspect import losses_text

    print_fields(
        {
            "model": measured.shape.model_id,
            "measured": f"{_counted(measured.n_samples)} of up to {measured.context_tokens:,} "
            f"tokens with {measured.scorer}, {measured.sinks} sinks, window {measured.window}",
            **({"losses": losses_text(measured)} if measured.has_losses else {}),
            "text": measured.text_description,
            "time": f"{duration(seconds)}, loading included",
            "written": f"{output} ({size(file_bytes)})",
        }
    )


def _counted(samples: int) -> str:
    return "1 sample" if samples == 1 else f"{samples} samples"
