"""``kvalloc profile``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Unpack

from kvalloc.accounting.engine_formats import formats_of
from kvalloc.cli.inspect import format_facts, score_facts
from kvalloc.cli.measuring import MeasuringOptions, measure
from kvalloc.cli.options import takes
from kvalloc.cli.output import print_result
from kvalloc.errors import InputError, option
from kvalloc.measure.profiling import MORE, ProfileOptions, read_options
from kvalloc.report.terminal import table_text
from kvalloc.report.wording import format_fields, format_table, score_fields
from kvalloc.units import Option

EACH_TASK = 2
"""Prompts of each kind that are made."""


@dataclass(frozen=True, kw_only=True)
class ProfilingOptions(MeasuringOptions):
    """Texts and the file to write."""

    output: Annotated[Path, Option("OUT.safetensors")]
    """The profile to write."""

    formats: Annotated[Sequence[str] | None, Option("ENGINE", MORE)] = None
    """Instead, measure the loss of K and V in an engine's formats: llama.cpp, mlx-lm, q4_0, ..."""


@takes()
def profile(options: ProfilingOptions, **keywords: Unpack[ProfileOptions]) -> None:
    r"""Measure on text what each layer and KV head can do without.

    MODEL is a hub id, a local folder, a .gguf file, or 'demo' (SmolLM2-135M-Instruct). Finished
    samples are stored in OUT.safetensors.partial until the profile is complete. Without any text,
    shipped public-domain texts are used; with --loss, prompts are made as by --tasks
    needle,pairs,kl,code.

    Examples
    --------
    kvalloc profile demo --samples 4 --context 1024 -o s.safetensors
    kvalloc profile ./my-model --text docs/ --context 8192 --resume -o s.safetensors
    kvalloc profile Qwen/Qwen3-0.6B --prompts prompts.jsonl --scorer snapkv -o s.safetensors
    kvalloc profile demo --samples 8 --loss fast --loss-level head -o s.safetensors
    kvalloc profile demo --formats llama.cpp -o demo.formats.safetensors
    """
    if options.formats:
        _profile_formats(options, options.formats, keywords)
        return
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


def _profile_formats(
    options: ProfilingOptions, engines: Sequence[str], keywords: Mapping[str, Any]
) -> None:
    formats_of(engines)
    if about := sorted({*keywords} - {"samples"}):
        raise InputError(f"{option(about[0])} is about scores, which --formats does not measure")
    from kvalloc.measure import default_texts
    from kvalloc.measure.format_profile import CONTEXT_TOKENS, SAMPLES, profile_formats

    losses, facts, shown = measure(
        partial(profile_formats, formats=engines),
        options,
        keywords,
        per_kind=SAMPLES,
        default=default_texts,
        context=CONTEXT_TOKENS,
    )
    print_result(
        {**format_facts(losses), **facts},
        {**format_fields(losses), **shown},
        lines=["", table_text(*format_table(losses))],
    )
