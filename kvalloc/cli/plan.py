"""``kvalloc plan``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from kvalloc.cli.options import MODEL, FittedOptions, LoadOptions, ModelArgument, takes
from kvalloc.cli.output import ProgressBar, print_result
from kvalloc.report.terminal import table_text
from kvalloc.units import Option, size

if TYPE_CHECKING:
    from kvalloc.online.planning import BatchPlan


@dataclass(frozen=True, kw_only=True)
class PlanOptions(FittedOptions, LoadOptions, ModelArgument):
    """Work and memory."""

    memory: Annotated[str, Option("SIZE")]
    """Bytes of the cache at its peak, of all rows; the weights are not included."""

    prompt: Annotated[int, Option("N", minimum=1)]
    """Length of each prompt, tokens."""

    answer: Annotated[int, Option("N", minimum=1)]
    """Length of each answer, tokens."""

    target_loss: Annotated[str, Option("NATS")] = "0.01"
    """Largest predicted loss, nats per token: the mean, or with 0.05@99% of 99% of the tokens."""

    device: Annotated[str | None, Option("NAME", MODEL)] = None
    """Device to measure on, such as cuda:0; or a100, h100 or h200, by published figures: a bound
    for a machine that is not here. The CPU by default."""


@takes()
def plan(options: PlanOptions) -> None:
    r"""Show how many prompts at once, at which budget, give the most tokens a second.

    Losses are predicted from the model's fitted file: sums of single losses, times the model error.
    Seconds are predicted from steps of the model and of its caches, which are measured first, in
    about half a minute. Tokens a second count all rows while they answer; reading the prompts, 1.5
    times a plain prefill at any budget, is not included.

    Examples
    --------
    kvalloc plan demo --memory 64MiB --prompt 1000 --answer 200
    kvalloc plan demo --memory 2GiB --prompt 4000 --answer 500 --target-loss 0.02 --json
    kvalloc plan ./my-model --memory 40GiB --prompt 30000 --answer 500 --dtype bfloat16 \
        --device h100
    """
    from kvalloc.measure.step_times import DEVICES
    from kvalloc.online.planning import plan_batch

    named = options.device if options.device in DEVICES else None
    loaded = (replace(options, device=None) if named else options).load(options.model)
    with ProgressBar("measuring steps"):
        planned = plan_batch(
            loaded.model,
            memory=options.memory,
            prompt=options.prompt,
            answer=options.answer,
            target_loss=options.target_loss,
            times=named,
            fitted=options.fitted,
            allow_other_model=options.allow_other_model,
        )
    best = planned.best[0]
    notes = [f"losses: {planned.fitted}; seconds: {planned.times.source}"]
    if planned.plain is None:
        notes.append("not one row of a plain cache fits")
    call = f"kvalloc.apply(model, budget={best.share:g}), {best.rows:,} prompts a call"
    print_result(planned, lines=_lines(planned), notes=[*notes, f"run it: {call}"])


def _lines(planned: BatchPlan) -> Iterator[str]:
    plain, best = planned.plain, planned.best
    rows = [
        [
            f"{one.rows:,}",
            "plain cache" if one is plain else f"{one.share:.1%}",
            f"{one.predicted_loss:.2g}",
            size(one.peak_bytes),
            f"{one.tokens_per_second:,.1f}",
            f"{one.tokens_per_second / plain.tokens_per_second:.1f}" if plain else "-",
        ]
        for one in [*best, *([plain] if plain else [])]
    ]
    headings = ["rows", "budget", "predicted loss", "at its peak", "tokens/s", "times plain"]
    yield table_text(headings, rows)
