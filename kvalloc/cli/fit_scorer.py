"""``kvalloc fit-scorer``: from a model and text to a surrogate scorer."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated, Any

from kvalloc.cli.calibrating import PromptOptions, read_prompt_options
from kvalloc.cli.options import EngineFlags, ModelFlags, takes
from kvalloc.cli.output import duration, print_fields, print_result
from kvalloc.cli.profile import DEFAULT_KINDS
from kvalloc.cli.progress import ProgressBar, note_set_aside, running
from kvalloc.formats.score_profile import shards_text
from kvalloc.formats.surrogate import SurrogatePart
from kvalloc.measure.scorer_fitting import FitOptions
from kvalloc.units import Option, size

EXAMPLES = """\
  kvalloc fit-scorer demo -o surrogate.safetensors
  kvalloc generate demo --profile p.json --policy surrogate \\
      --policy-option file=surrogate.safetensors --prompt-file prompt.txt
  kvalloc profile demo --scorer surrogate:file=surrogate.safetensors -o s.safetensors
"""

EACH_TASK = 4
"""Prompts of each kind that are made where no text is given."""


@takes(FitOptions, PromptOptions, ModelFlags, EngineFlags)
def fit_scorer(
    model: str,
    *,
    output: Annotated[Path, Option("OUT.safetensors")],
    resume: bool = False,
    **given: Any,
) -> None:
    """Fit a scorer that predicts what a second read of a prompt would look up.

    MODEL is a hub id, a local folder, a .gguf file, or 'demo' (SmolLM2-135M-Instruct). The result
    is for this model alone, and for the scorer 'surrogate'. What was done is kept in
    OUT.safetensors.partial until it is complete. Without any text or prompts, prompts are made as
    by --tasks needle,pairs,kl,code.

    Parameters
    ----------
    output : Path
        The file to write.
    """
    from kvalloc.measure.checkpoint import check_output
    from kvalloc.measure.scorer_fitting import fit_scorer as fitted_scorer
    from kvalloc.models.loading import require_run_packages

    # Everything that can be refused without the model is refused before it is loaded.
    require_run_packages()
    check_output(output, resume=resume)
    wanted: Any = {name: given[name] for name in FitOptions.__annotations__ if name in given}
    prompts, made = read_prompt_options(given, each=EACH_TASK, default=DEFAULT_KINDS)
    start = time.perf_counter()
    with running(model, given) as loaded:
        texts = prompts(loaded.tokenizer)
        if made:
            wanted["samples"] = len(texts)
        with ProgressBar("fitting", unit="layers") as progress:
            fitted = fitted_scorer(
                loaded.model,
                loaded.tokenizer,
                texts,
                output=output,
                resume=resume,
                progress=progress,
                model_id=loaded.model_id,
                **wanted,
            )
    note_set_aside(fitted.set_aside)
    seconds = time.perf_counter() - start
    written = f"{output} ({size(output.stat().st_size)})"
    if isinstance(fitted, SurrogatePart):
        measured, part = fitted.sample_places.size, shards_text(fitted.shards)
        facts: dict[str, Any] = {"output": output, "samples": measured, "part": part}
        shown_part = {"part": part, "measured": f"{measured} samples", "written": written}
        print_result(facts, lambda: print_fields(shown_part))
        return
    facts = {
        "output": output,
        "model": fitted.shape.model_id,
        "samples": fitted.samples,
        "context_tokens": fitted.context_tokens,
        "ridge": fitted.ridge,
        "r_squared": fitted.r_squared.tolist(),
        "rank_correlation": fitted.rank_correlation.tolist(),
        "text_description": fitted.text_description,
        "set_aside": fitted.set_aside,
        "seconds": seconds,
        "file_bytes": output.stat().st_size,
    }
    shown = {
        "model": fitted.shape.model_id,
        "fitted": f"to {fitted.target} on {fitted.samples} samples of up to "
        f"{fitted.context_tokens:,} tokens, ridge {fitted.ridge:g}",
        "explained": f"{_spread(fitted.r_squared)} of the variance of the half left out, by layer",
        "ranks": f"{_spread(fitted.rank_correlation)} rank correlation with it",
        "text": fitted.text_description,
        "time": f"{duration(seconds)}, loading included",
        "written": written,
    }
    print_result(facts, lambda: print_fields(shown))


def _spread(by_layer: Any) -> str:
    return f"{by_layer.mean():.2f} ({by_layer.min():.2f} to {by_layer.max():.2f})"
