"""``kvalloc fit-scorer``: from a model and text to a surrogate scorer."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

from kvalloc.cli.measuring import PromptOptions, measure
from kvalloc.cli.options import EngineFlags, ModelFlags, takes
from kvalloc.cli.output import print_result
from kvalloc.formats.score_profile import shards_text
from kvalloc.formats.surrogate import SurrogatePart
from kvalloc.measure.scorer_fitting import FitOptions
from kvalloc.report.wording import surrogate_fields
from kvalloc.units import Option

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
    r"""Fit a scorer that predicts what a second read of a prompt would look up.

    MODEL is a hub id, a local folder, a .gguf file, or 'demo' (SmolLM2-135M-Instruct). The result
    is for this model alone, and for the scorer 'surrogate'. What was done is kept in
    OUT.safetensors.partial until it is complete. Without any text or prompts, prompts are made as
    by --tasks needle,pairs,kl,code.

    Parameters
    ----------
    output : Path
        The file to write.

    Examples
    --------
    kvalloc fit-scorer demo -o surrogate.safetensors
    kvalloc generate demo --profile p.json --policy surrogate:file=surrogate.safetensors \
        --prompt-file prompt.txt
    kvalloc profile demo --scorer surrogate:file=surrogate.safetensors -o s.safetensors
    """
    from kvalloc.measure.scorer_fitting import fit_scorer as fitted_scorer
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    given |= {"output": output, "resume": resume}
    fitted, facts, shown = measure(fitted_scorer, FitOptions, model, given, each=EACH_TASK)
    if isinstance(fitted, SurrogatePart):
        stated = {"part": shards_text(fitted.shards), "samples": fitted.sample_places.size}
    else:
        names = "samples context_tokens ridge r_squared rank_correlation text_description set_aside"
        stated = {name: getattr(fitted, name) for name in names.split()}
        stated["model"] = fitted.shape.model_id
    print_result({**stated, **facts}, {**surrogate_fields(fitted), **shown})
