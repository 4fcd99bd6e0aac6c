"""``kvalloc profile``: from a model and text to a score profile."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Unpack

from kvalloc.cli.inspect import score_facts
from kvalloc.cli.measuring import MeasuringOptions, measure
from kvalloc.cli.options import takes
from kvalloc.cli.output import print_result
from kvalloc.measure.profiling import ProfileOptions, read_options
from kvalloc.report.wording import score_fields
from kvalloc.units import Option

EACH_TASK = 2
"""Prompts of each kind that are made."""


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions(MeasuringOptions):
    """Texts to measure, and the file to write."""

    output: Annotated[Path, Option("OUT.safetensors")]
    """The score profile to write."""


@takes()
def profile(options: ProfilingOptions, **keywords: Unpack[ProfileOptions]) -> None:
    r"""Measure on text what each layer and KV head can do without.

    MODEL is a hub id, a local folder, a .gguf file, or 'demo' (SmolLM2-135M-Instruct). Finished
    samples are kept in OUT.safetensors.partial until the profile is complete. Without any text,
    public-domain texts that ship with kvalloc are taken; with --loss, and no text or prompts given,
    prompts are made as by --tasks needle,pairs,kl,code.

    Examples
    --------
    kvalloc profile demo --samples 4 --context 1024 -o s.safetensors
    kvalloc profile ./my-model --text docs/ --context 8192 --resume -o s.safetensors
    kvalloc profile Qwen/Qwen3-0.6B --prompts prompts.jsonl --scorer snapkv -o s.safetensors
    kvalloc profile demo --samples 8 --loss fast --loss-level head -o s.safetensors
    """
    from kvalloc.measure import default_texts
    from kvalloc.measure import profile as measured_profile

    read_options(keywords)
    measured, facts, shown = measure(
        measured_profile,
        options,
        keywords,
        per_kind=EACH_TASK,
        makes_prompts="loss" in keywords,
        default=default_texts,
    )
    fields = {**score_fields(measured), **shown}
    print_result({**score_facts(measured), **facts}, fields)
