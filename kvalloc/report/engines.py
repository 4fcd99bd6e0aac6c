"""Engine choices in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from kvalloc.formats.engine_choice import EngineChoice, EngineSetting
from kvalloc.interop.engines import SYNTAX, by_format
from kvalloc.report.terminal import table_text
from kvalloc.report.wording import model_text
from kvalloc.units import gap_text, share_text, size

HEADINGS = ("bits", "bytes", "KL mean", "99%", "top-1")
"""Headings of the cells of a setting."""

KL_NOTE = (
    "KL: of the next token's probabilities from those at 16 bits, predicted, nats per token: the "
    "mean, and what 99% of the tokens stay below; top-1: tokens whose most likely next one stays"
)


def size_cells(stored: int, full: int) -> list[str]:
    """Return cells of bits and bytes."""
    return [f"{16 * stored / max(full, 1):.2f}", size(stored)]


def cells(setting: EngineSetting, full: int) -> list[str]:
    """Return a setting's cells, as of `HEADINGS`."""
    losses = f"{setting.mean:.2g}", f"{setting.p99:.2g}", f"{setting.top1:.1%}"
    return [*size_cells(setting.cache_bytes, full), *losses]


def choice_fields(choice: EngineChoice) -> dict[str, str]:
    """Return a choice's fields."""
    rows = f", {choice.batch} rows" if choice.batch > 1 else ""
    proof = "" if choice.bound_source == "dual" else f" ({choice.bound_source}'s word)"
    formats, run = by_format(choice), SYNTAX[choice.engine].line(choice)
    return {
        "engine": choice.engine,
        "model": model_text(choice.shape),
        "request": f"{choice.requested}, {choice.context_tokens:,} tokens{rows}",
        "formats": formats,
        "run": "" if run == formats else run,
        "bytes": share_text(choice.cache_bytes, choice.full_bytes),
        "predicted KL": f"mean {choice.mean:.3g}, 99% {choice.p99:.3g}, 99.9% {choice.p999:.3g} "
        f"nats per token; {choice.top1:.1%} of the most likely tokens stay",
        "model error": f"measured whole caches: within a factor of {choice.model_error:.2f} of "
        "their predictions",
        "solver": f"{choice.decided_by}, gap {gap_text(choice.gap)}{proof}",
    }


def choice_facts(choice: EngineChoice) -> dict[str, Any]:
    """Return plain values of a choice; ``run`` is None where a file runs it."""
    formats, run = by_format(choice), SYNTAX[choice.engine].line(choice)
    return {**choice.record(), "formats": formats, "run": None if run == formats else run}


def frontier_lines(choice: EngineChoice) -> Iterator[str]:
    """Yield a table of settings, the chosen one marked."""
    rows = [
        [mark, *cells(setting, choice.full_bytes), by_format(setting, brief=True)]
        for setting in choice.frontier
        for mark in [">" if setting.pairs == choice.pairs else ""]
    ]
    yield from ("", table_text(["", *HEADINGS, "formats"], rows))
