"""``kvalloc inspect``."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from kvalloc.accounting.costs import full_bytes
from kvalloc.cli.options import takes
from kvalloc.cli.output import is_verbose, print_result
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.engine_choice import EngineChoice
from kvalloc.formats.fitted import FittedModel
from kvalloc.formats.format_losses import FormatLosses
from kvalloc.formats.hub import local_file
from kvalloc.formats.record import kind_of
from kvalloc.formats.saved_cache import SavedCacheHeader
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.shipped_profiles import KINDS, load_file
from kvalloc.report import wording
from kvalloc.report.engines import choice_facts, choice_fields, frontier_lines
from kvalloc.report.terminal import budget_picture, layer_bars, table_text
from kvalloc.units import Option

LEVELS = (0.5, 0.9, 0.99)
"""Retentions for which a score profile's tokens are shown."""

TOKENS_NOTE = (
    "tokens per KV head that keep 50%, 90% and 99% of a layer's score mass, sinks and window "
    "included"
)

Content = tuple[dict[str, Any], dict[str, str], Iterable[str], Iterable[str]]


@dataclass(frozen=True)
class InspectOptions:
    """The file to show."""

    file: Annotated[str, Option()]
    """A score profile, a format profile, a budget profile, the name of a shipped one, or an engine
    choice; a file of 'kvalloc fit' or 'kvalloc eval -o'; or a saved cache. Also
    hf://owner/repo/FILE."""


@takes()
def inspect(options: InspectOptions) -> None:
    """Show what a profile, a fitted file, an evaluation or a cache holds.

    A budget profile is drawn as one bar a layer, below its measurements. A score profile is shown
    by the tokens that each layer needs to keep 50%, 90% and 99% of its score mass.

    Examples
    --------
    kvalloc inspect p.json
    kvalloc inspect s.safetensors --json
    kvalloc inspect doc.kv
    """
    file = options.file
    with local_file(file) as path:
        if kind_of(path) == "saved cache":
            _show_saved(file, path, SavedCacheHeader.read(path)[0])
            return
        kinds = (FittedModel, FormatLosses, EngineChoice, SavedCacheHeader)
        record = load_file(path, (*KINDS, *kinds))
    facts, fields, lines, notes = _content(record)
    shown = {record.NAME: file, **fields}
    print_result({"file": file, **facts}, shown, lines=lines, notes=notes, always=True)


def _content(record: Any) -> Content:
    if record.NAME == "budget profile":
        return _budgets(record)
    if record.NAME == "score profile":
        return _scores(record)
    if record.NAME == "format profile":
        lines = ["", table_text(*wording.format_table(record))]
        return format_facts(record), wording.format_fields(record), lines, ()
    if record.NAME == "engine choice":
        return choice_facts(record), choice_fields(record), frontier_lines(record), ()
    if record.NAME == "fitted file":
        facts = {**record.header(), "digest": record.digest}
        return facts, wording.fitted_fields(record), (), ()
    tables = [table_text(*table, keys=2) for table in wording.evaluation_tables(record.rows)]
    facts = {**record.record(), "prompts": None}
    return facts, wording.evaluation_fields(record), ["", *tables], ()


def _budgets(profile: BudgetProfile) -> Content:
    low, mean, high = wording.budget_spread(profile)
    spread = {"min_tokens": low, "mean_tokens": mean, "max_tokens": high}
    lines = ["", *wording.cap_lines(profile), *budget_picture(profile)]
    notes = [] if is_verbose() else ["parameters of solver, policy and scorer: --verbose"]
    fields = wording.budget_fields(profile, brief=not is_verbose())
    return {**profile.record(), **spread}, fields, lines, notes


def _scores(profile: ScoreProfile) -> Content:
    needed = {level: wording.tokens_for(profile, level) for level in LEVELS}
    rows = [
        [str(layer), *("-" if count is None else f"{count:,}" for count in counts)]
        for layer, *counts in zip(range(profile.shape.n_layers), *needed.values(), strict=True)
    ]
    headings = ("layer", *(f"{level:.0%}" for level in LEVELS))
    drawn = [(count or 0) / profile.context_tokens for count in needed[0.9]]
    tokens = {f"{level:g}": tokens for level, tokens in needed.items()}
    facts = {**score_facts(profile), "tokens_for_retention": tokens}
    lines = ["", *layer_bars(headings, rows, drawn, profile, "90%, ")]
    return facts, wording.score_fields(profile), lines, [TOKENS_NOTE]


def score_facts(profile: ScoreProfile) -> dict[str, Any]:
    """Return a score profile's values without its curves."""
    stated = (
        "shape scorer scorer_parameters context_tokens sinks window evictable_tokens "
        "interpolation_error text_description text_digest set_aside versions created sample_tokens "
        "loss_tokens loss_widths shard digest kind"
    )
    return {
        **{name: getattr(profile, name) for name in stated.split()},
        "model": profile.shape.model_id,
        "samples": profile.n_samples,
        "losses_per": wording.losses_per(profile),
        "loss_method": profile.loss_method or None,
    }


def format_facts(losses: FormatLosses) -> dict[str, Any]:
    """Return measured losses of engine formats."""
    facts = {"model": losses.shape.model_id, "model_error": losses.model_error}
    facts["by_format"] = wording.format_rows(losses)
    return {**losses.header(), **facts, "digest": losses.digest}


def _show_saved(file: str, path: Path, header: SavedCacheHeader) -> None:
    profile, notes = header.profile, header.notes
    one_row = header.batch == 1  # rows of a batch may be padded, which the header does not tell
    if one_row:
        prompt = header.prompt_tokens
        profile = profile.replace(context_tokens=prompt, budgets=profile.budgets_for(prompt))
    facts: dict[str, Any] = {
        "document": notes.get("document"),
        "rows": header.batch,
        **{name: getattr(header, name) for name in ("seen_tokens", "prompt_tokens", "dtype")},
        "file_bytes": path.stat().st_size,
        "full_bytes": full_bytes(profile.shape, header.seen_tokens) if one_row else None,
        "read_seconds": header.read_seconds,
        "bits": profile.bits,
    }
    shown = {"saved cache": file, **wording.saved_fields(file, facts, profile)}
    print_result({"file": file, "kind": "kvalloc.cache", **facts}, shown, always=True)
