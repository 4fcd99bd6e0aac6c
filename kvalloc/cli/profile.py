"""``kvalloc profile``: from a model and text to a score profile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

import typer

from kvalloc.allocation.request import Option
from kvalloc.cli import targets
from kvalloc.cli.calibrating import PromptOptions, Recipe, read_given, read_recipe
from kvalloc.cli.options import Device, Dtype, Json, ModelName, Quiet
from kvalloc.cli.output import duration, print_fields, print_json, size
from kvalloc.cli.progress import ProgressBar, load
from kvalloc.errors import InputError
from kvalloc.units import parse_bits

if TYPE_CHECKING:
    from kvalloc.formats.score_profile import ScoreProfile

EXAMPLES = """\
  kvalloc profile demo --samples 4 --context 1024 -o s.safetensors
  kvalloc profile ./my-model --text docs/ --context 8192 --resume -o s.safetensors
  kvalloc profile Qwen/Qwen3-0.6B --prompts prompts.jsonl --scorer snapkv -o s.safetensors
  kvalloc profile demo --samples 8 --loss fast --loss-level head -o s.safetensors
  kvalloc profile demo --scorer snapkv --window 32 --loss fast --loss-level head \\
      --loss-policies usual -o s.safetensors
"""

DEFAULT_KINDS = ("needle", "pairs", "kl", "code")
"""`kvalloc.prompts.calibration.KINDS`, which is not imported without need."""
EACH_TASK = 2
"""Prompts of each kind that are made."""


SCORER_OPTIONS = ("window", "pool", "group_reduce")
SCORES, LOSSES, MORE = "What is measured", "Losses", "Other measurements"


class ProfileFlags(TypedDict, total=False):
    """What ``kvalloc profile`` measures; see `kvalloc.measure.profiling.ProfileOptions`.

    Parameters
    ----------
    samples : int
        Samples to measure; see `sampling_ratio`. With `tasks` two of each by default.
    sampling_ratio : float, default 0.1
        Without `samples`: share of all samples there are.
    scorer : str, default "xkv"
        What is measured; see 'kvalloc scorers'.
    window : int
        The scorer's window, tokens; its own by default.
    pool : int
        The scorer's pooling width, tokens; its own by default.
    group_reduce : str
        How query heads that share a KV head are reduced.
    sinks : int, default 4
        First tokens that are never evicted.
    count_sinks : bool
        Count the sinks as evictable, as XKV does.
    loss : str
        Also measure what reducing each unit alone does to the next-token distribution: a forward
        for every unit and level, or a second-order estimate at the price of a few prefills.
    loss_level : str, default "layer"
        What is reduced alone for `loss`.
    probes : int
        With `loss` measured: estimate everything first, then measure only the N figures a sample
        whose measurement may change the solution; all by default.
    loss_policies : str
        Policies or scorers whose losses are measured beside the scorer's, so that 'kvalloc solve'
        chooses one for each unit with its budget; options after a colon, such as
        tova,critical,snapkv:window=4:pool=1; 'usual' for a set that does well.
    bits : str
        Measure what these bit widths do to the attention output too, for 'kvalloc solve --bits'.
    share_length : int, default 1
        Also measure what runs of 2 to N adjacent layers keep when they share the kept entries, for
        'kvalloc solve --share-groups'; 4 at most, 1 measures nothing.
    """

    samples: Annotated[int | None, Option("N", SCORES)]
    sampling_ratio: Annotated[float | None, Option("SHARE", SCORES)]
    scorer: Annotated[str | None, Option("NAME", SCORES)]
    window: Annotated[int | None, Option("N", SCORES)]
    pool: Annotated[int | None, Option("N", SCORES)]
    group_reduce: Annotated[str | None, Option("mean|max", SCORES)]
    sinks: Annotated[int | None, Option("N", SCORES)]
    count_sinks: Annotated[bool | None, Option("", SCORES)]
    loss: Annotated[str | None, Option("[measured|fast]", LOSSES)]
    loss_level: Annotated[str | None, Option("layer|head", LOSSES)]
    probes: Annotated[int | None, Option("N", LOSSES)]
    loss_policies: Annotated[str | None, Option("NAME,NAME", LOSSES)]
    bits: Annotated[str | None, Option("16,8,4", MORE)]
    share_length: Annotated[int | None, Option("N", MORE)]


Output = Annotated[
    Path,
    typer.Option("--output", "-o", metavar="OUT.safetensors", help="The score profile to write."),
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with what a killed command had finished.")
]


@targets.takes(ProfileFlags)
@targets.takes(PromptOptions)
def profile(
    model: ModelName,
    output: Output,
    dtype: Dtype = "float32",
    device: Device = None,
    resume: Resume = False,
    json: Json = False,
    quiet: Quiet = False,
    **asked: Any,
) -> None:
    """Measure on text what each layer and KV head can do without.

    MODEL is a hub id, a local folder, a .gguf file, or 'demo' (SmolLM2-135M-Instruct). Finished
    samples are kept in OUT.safetensors.partial until the profile is complete. Without any text,
    public-domain texts that ship with kvalloc are taken; with --loss, and no text or prompts given,
    prompts are made as by --tasks needle,pairs,kl,code.
    """
    from kvalloc.measure import default_texts
    from kvalloc.measure import profile as measured_profile

    given = {name: value for name, value in asked.items() if value is not None}
    # Everything that can be refused without the model is refused before it is loaded.
    wanted = _wanted(given)
    _check(output, wanted, resume=resume)
    recipe = _recipe(given)
    texts = [] if recipe else read_given(given) or [*default_texts()]
    start = time.perf_counter()
    loaded = load(model, dtype=dtype, device=device, quiet=quiet)
    if recipe:
        texts = [*recipe.make(loaded.tokenizer, given, each=EACH_TASK)]
        wanted["samples"] = len(texts)
    # losses are counted as the layers of a prefill that take as long
    unit = "steps" if "loss" in wanted else "layers"
    with ProgressBar("profiling", unit=unit, quiet=quiet) as progress:
        measured = measured_profile(
            loaded.model,
            loaded.tokenizer,
            texts,
            output=output,
            resume=resume,
            progress=progress,
            model_id=loaded.model_id,
            **wanted,
        )
    _report(measured, output, time.perf_counter() - start, json=json, quiet=quiet)


def _wanted(given: Mapping[str, Any]) -> dict[str, Any]:
    """What `kvalloc.profile` is asked."""
    names = (*ProfileFlags.__annotations__, "context", "seed")
    wanted = {name: given[name] for name in names if name in given}
    if "bits" in wanted:
        wanted["bits"] = parse_bits(wanted["bits"])
    if "loss_policies" in wanted:
        wanted["loss_policies"] = tuple(wanted["loss_policies"].split(","))
    return wanted


def _check(output: Path, wanted: Mapping[str, Any], *, resume: bool) -> None:
    """Refuse an output that cannot be written, and options that contradict each other."""
    from kvalloc.files import check_writable
    from kvalloc.measure.checkpoint import check_unfinished, checkpoint_folder
    from kvalloc.measure.loss_plan import LossPlan
    from kvalloc.measure.profiling import DEFAULTS
    from kvalloc.models.loading import require_run_packages
    from kvalloc.scorers import get_scorer

    check_writable(output)
    parameters = {name: wanted[name] for name in SCORER_OPTIONS if name in wanted}
    scorer = get_scorer(wanted.get("scorer", DEFAULTS["scorer"]), **parameters)
    require_run_packages()
    check_unfinished(checkpoint_folder(output), resume=resume)
    if "sinks" in wanted and "count_sinks" in wanted:
        raise InputError("--sinks and --count-sinks contradict each other; give one of them")
    policies, probes = wanted.get("loss_policies", ()), wanted.get("probes")
    if "loss" in wanted:
        plan = LossPlan(
            method=wanted["loss"],
            level=wanted.get("loss_level", DEFAULTS["loss_level"]),
            probes=probes,
            policies=policies,
        )
        plan.named_policies(scorer, sinks=wanted.get("sinks", DEFAULTS["sinks"]))
    elif probes is not None:
        raise InputError("--probes are of measured losses; add --loss")
    elif policies:
        raise InputError("--loss-policies are measured by their losses; add --loss measured|fast")


def _recipe(given: Mapping[str, Any]) -> Recipe | None:
    """Which prompts are to be made, if any."""
    recipe = read_recipe(given, default=DEFAULT_KINDS if "loss" in given else ())
    if recipe is not None and "sampling_ratio" in given:
        raise InputError(
            "--sampling-ratio is a share of the text that is given, and prompts are made here; "
            "say how many with --samples"
        )
    return recipe


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
