"""``kvalloc fit``."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Unpack

from kvalloc.cli.measuring import MeasuringOptions, measure
from kvalloc.cli.options import takes
from kvalloc.cli.output import note, print_result
from kvalloc.measure.scorer_fitting import FitOptions
from kvalloc.report.wording import fitted_fields
from kvalloc.units import Option


@dataclass(frozen=True, kw_only=True)
class FittingOptions(MeasuringOptions):
    """Texts to fit on, and the file."""

    output: Annotated[Path | None, Option("OUT.safetensors")] = None
    """The file to write, for `fitted`; in the cache folder by default."""


@takes()
def fit(options: FittingOptions, **keywords: Unpack[FitOptions]) -> None:
    r"""Measure a model once, so that each prompt is read once and reduced well.

    MODEL is a hub id, a local folder, a .gguf file, or 'demo' (SmolLM2-135M-Instruct). The file
    goes into kvalloc's cache folder under the digest of the weights. There generate, chat, eval and
    kvalloc.apply find it for this model, and solve from it for any --budget. Finished work is
    stored beside it until it is complete. Without any text or prompts, prompts are made.

    Examples
    --------
    kvalloc fit demo
    kvalloc generate demo --budget 20% --prompt-file prompt.txt
    kvalloc fit ./my-model --text docs/ -o own.safetensors
    kvalloc generate ./my-model --budget 20% --fitted own.safetensors --prompt-file prompt.txt
    """
    from kvalloc.online.fitting import EACH_KIND
    from kvalloc.online.fitting import fit as measured_model

    function = partial(measured_model, notify=note)
    fitted, facts, shown = measure(function, options, keywords, per_kind=EACH_KIND, unit="prompts")
    words = ["kvalloc", "generate", options.model, "--budget", "20%", "--prompt-file", "prompt.txt"]
    words += [] if options.output is None else ["--fitted", str(options.output)]
    shown["next"] = shlex.join(words)
    names = "samples context_tokens ridge r_squared text_description set_aside"
    stated = {name: getattr(fitted.surrogate, name) for name in names.split()}
    stated |= {"model": fitted.shape.model_id, "errors": fitted.scores.record()["errors"]}
    print_result({**stated, **facts}, {**fitted_fields(fitted), **shown})
