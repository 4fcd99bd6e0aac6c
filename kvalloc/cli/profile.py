"""``kvalloc profile``: from a model and text to a score profile."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from kvalloc.cli.calibrating import PromptOptions, read_prompt_options
from kvalloc.cli.options import EngineFlags, ModelFlags, takes
from kvalloc.cli.output import duration, print_fields, print_result
from kvalloc.cli.progress import ProgressBar, note_set_aside, running
from kvalloc.errors import InputError
from kvalloc.measure.profiling import ProfileOptions, read_options
from kvalloc.units import Option, size

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


@takes(ProfileOptions, PromptOptions, ModelFlags, EngineFlags)
def profile(
    model: str,
    *,
    output: Annotated[Path, Option("OUT.safetensors")],
    resume: bool = False,
    **given: Any,
) -> None:
    """Measure on text what each layer and KV head can do without.

    MODEL is a hub id, a local folder, a .gguf file, or 'demo' (SmolLM2-135M-Instruct). Finished
    samples are kept in OUT.safetensors.partial until the profile is complete. Without any text,
    public-domain texts that ship with kvalloc are taken; with --loss, and no text or prompts given,
    prompts are made as by --tasks needle,pairs,kl,code.

    Parameters
    ----------
    output : Path
        The score profile to write.
    """
    from kvalloc.measure import default_texts
    from kvalloc.measure import profile as measured_profile

    # Everything that can be refused without the model is refused before it is loaded.
    wanted = _wanted(given, output, resume=resume)
    default = DEFAULT_KINDS if "loss" in given else ()
    prompts, made = read_prompt_options(given, each=EACH_TASK, default=default)
    if made and "sampling_ratio" in given:
        raise InputError(
            "--sampling-ratio is a share of the text that is given, and prompts are made here; "
            "say how many with --samples"
        )
    start = time.perf_counter()
    with running(model, given) as loaded:
        texts = prompts(loaded.tokenizer) or [*default_texts()]
        if made:
            wanted["samples"] = len(texts)
        # losses are counted as the layers of a prefill that take as long
        unit = "steps" if "loss" in wanted else "layers"
        with ProgressBar("profiling", unit=unit) as progress:
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
    note_set_aside(measured.set_aside)
    measurement = measured, output, time.perf_counter() - start
    print_result(_facts(*measurement), lambda: _show(*measurement))


def _wanted(given: Mapping[str, Any], output: Path, *, resume: bool) -> ProfileOptions:
    """Return the options of `kvalloc.profile`; refuse wrong ones, and a wrong output."""
    from kvalloc.measure.checkpoint import check_output
    from kvalloc.models.loading import require_run_packages

    typed: Any = {name: given[name] for name in ProfileOptions.__annotations__ if name in given}
    wanted: ProfileOptions = typed
    if "sinks" in wanted and "count_sinks" in wanted:
        raise InputError("--sinks and --count-sinks contradict each other; give one of them")
    require_run_packages()
    read_options(wanted)
    check_output(output, resume=resume)
    return wanted


def _facts(measured: ScoreProfile, output: Path, seconds: float) -> dict[str, Any]:
    """Return what was measured, as plain values."""
    stated = (
        "scorer scorer_parameters context_tokens sinks window interpolation_error "
        "text_description loss_tokens loss_widths set_aside"
    )
    policies = [policy.title for policy in measured.policies]
    return {
        "output": output,
        "model": measured.shape.model_id,
        "samples": measured.n_samples,
        **{name: getattr(measured, name) for name in stated.split()},
        "loss_policies": policies if measured.has_losses else None,
        "shards": None if measured.shards is None else measured.shards.tolist(),
        "seconds": seconds,
        "file_bytes": output.stat().st_size,
    }


def _show(measured: ScoreProfile, output: Path, seconds: float) -> None:
    from kvalloc.report.wording import losses_text

    print_fields(
        {
            "model": measured.shape.model_id,
            "measured": f"{measured.samples_text} of up to {measured.context_tokens:,} tokens with "
            f"{measured.scorer}, {measured.sinks} sinks, window {measured.window}",
            "losses": losses_text(measured) if measured.has_losses else "",
            "text": measured.text_description,
            "part": measured.part_text.removesuffix(", "),
            "time": f"{duration(seconds)}, loading included",
            "written": f"{output} ({size(output.stat().st_size)})",
        }
    )
