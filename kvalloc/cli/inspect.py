"""``kvalloc inspect``: what a file of kvalloc holds."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.cli.options import takes
from kvalloc.cli.output import (
    duration,
    hanging,
    is_verbose,
    note,
    print_fields,
    print_json,
    print_table,
    wants_json,
)
from kvalloc.errors import InputError, ProfileFileError, nearest
from kvalloc.files import near_file
from kvalloc.report.terminal import bar, bar_scale, number_text, sparks, terminal_width
from kvalloc.report.wording import (
    bits_text,
    budget_fields,
    budget_spread,
    evaluation_fields,
    losses_per,
    model_text,
    policies_text,
    score_fields,
    tokens_for,
)
from kvalloc.units import size

if TYPE_CHECKING:
    from kvalloc.accounting import IntArray
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.formats.evaluation import Evaluation
    from kvalloc.formats.saved_cache import SavedCacheHeader, StoredTensor
    from kvalloc.formats.score_profile import ScoreProfile

EXAMPLES = """\
  kvalloc inspect p.json
  kvalloc inspect s.safetensors --json
  kvalloc inspect doc.kv
"""

LEVELS = (0.5, 0.9, 0.99)
"""Retentions for which a score profile's tokens are shown."""


@takes()
def inspect(file: str) -> None:
    """Show what a score profile, a budget profile, an evaluation or a saved cache holds.

    A budget profile is drawn as one bar a layer, below what was measured with it; of a score
    profile the tokens are shown that each layer needs to keep 50%, 90% and 99% of its score mass.

    Parameters
    ----------
    file : str
        A score profile, a budget profile, the name of a shipped one, what 'kvalloc eval -o' wrote,
        or a saved cache; also
        hf://owner/repo/FILE.
    """
    from kvalloc.formats.hub import local_file

    with local_file(file) as path:
        kind = _kind(str(path))
        if kind == "budget profile":
            from kvalloc.formats.shipped_profiles import load_profile

            _show_budgets(file, load_profile(path))
        elif kind == "evaluation":
            from kvalloc.formats.evaluation import Evaluation

            _show_evaluation(file, Evaluation.load(path))
        elif kind == "saved cache":
            from kvalloc.formats.saved_cache import SavedCacheHeader

            _show_saved(file, *SavedCacheHeader.read(path))
        else:
            from kvalloc.formats.shipped_profiles import load_scores

            _show_scores(file, load_scores(path))


def _kind(file: str) -> str:
    """Tell what a file is by its first bytes: JSON is a profile, safetensors say what they are.

    Raises
    ------
    KVAllocError
        If it is none of them.
    """
    from kvalloc.formats.record import kind_of
    from kvalloc.formats.shipped_profiles import shipped_profiles, shipped_scores

    path, shipped = Path(file), [*shipped_scores(), *shipped_profiles()]
    if not os.path.exists(path):
        if file in shipped_profiles():
            return "budget profile"
        if file in shipped_scores():
            return "score profile"
        raise InputError(
            f"there is no file {file} and no shipped profile of that name; "
            f"{nearest(file, shipped) or near_file(file)}check the path, or choose from: "
            f"{', '.join(shipped) or 'none is shipped'}"
        )
    if kind := kind_of(path):
        return kind
    empty = False
    if path.is_file():
        try:
            with open(path, "rb") as handle:
                start = handle.read(64)
        except OSError as error:
            raise InputError(f"cannot read {file} ({error.strerror})") from error
        empty = not start
        if start.lstrip()[:1] == b"{" or (start and path.suffix.lower() == ".json"):
            return "budget profile"
    from kvalloc.formats.saved_cache import SavedCacheHeader  # budget profiles do without it

    try:
        with SavedCacheHeader.opened(path) as tensors:
            saved = SavedCacheHeader.METADATA in (tensors.metadata() or {})
            return "saved cache" if saved else "score profile"
    except ProfileFileError as error:
        raise ProfileFileError(  # it may have been any of them
            file,
            field="file",
            found="empty" if empty else error.found,
            expected="a score profile, a budget profile or a saved cache",
            way_out="make it again with 'kvalloc profile', 'kvalloc solve' or 'kvalloc chat "
            "--save-cache'; a truncated file cannot be repaired",
        ) from error


def _show_budgets(file: str, profile: BudgetProfile) -> None:
    least, mean, most = budget_spread(profile)
    if wants_json():
        spread = {"min_tokens": least, "mean_tokens": mean, "max_tokens": most}
        known = {"predicted_loss": profile.predicted_loss}  # null, where the file leaves it out
        print_json({"file": file, **known, **profile.record(), **spread})
        return
    fields = {"budget profile": file, **budget_fields(profile, brief=not is_verbose())}
    if profile.evaluation is not None:
        _print_evaluation(file, profile.evaluation)
    print_fields(fields)
    print()
    print("\n".join(budget_picture(profile)))
    if not is_verbose():
        note("parameters of the solver, the policies and the scorers: --verbose")


def _print_evaluation(file: str, evaluation: Mapping[str, Any]) -> None:
    """Print what was measured with these budgets, a row a task; what is left out is a dash."""
    settings, rows = evaluation.get("settings"), evaluation.get("rows")
    known = settings if isinstance(settings, dict) else {}
    shown = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if not shown:
        return
    headings = ("evaluated", "tokens", "question", "KL", "95% of KL", "agree", "score", "full", "n")
    split, seed = known.get("split", "unknown"), known.get("seed", "unknown")
    text = f"{file}, measured on prompts of the split {split}, seed {seed}; KL in nats per token"
    print(hanging(text, 0))
    print_table(headings, [_evaluation_cells(row, known) for row in shown])
    print()


def _show_evaluation(file: str, evaluation: Evaluation) -> None:
    """Show what 'kvalloc eval' wrote, without the prompts."""
    if wants_json():
        print_json(
            {"file": file, **{k: v for k, v in evaluation.record().items() if k != "prompts"}}
        )
        return
    for name in dict.fromkeys(row["name"] for row in evaluation.rows):
        _print_evaluation(name, evaluation.of(name))
    print_fields({"evaluation": file, **evaluation_fields(evaluation)})


_SHARES = ("top1_agreement", "score", "full_score")


def _evaluation_cells(row: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    ends = row.get("ci95")
    two = isinstance(ends, list) and len(ends) == 2
    return [
        str(row.get("task", "-")),
        number_text(row.get("context"), ",", "-"),
        str(row.get("question", settings.get("question", "-"))),
        number_text(row.get("kl"), ".4f", "-"),
        "..".join(number_text(end, ".4f", "-") for end in ends) if two and ends else "-",
        *(number_text(row.get(name), ".0%", "-") for name in _SHARES),
        number_text(row.get("n"), ",", "-"),
    ]


def _show_scores(file: str, profile: ScoreProfile) -> None:
    needed = {level: tokens_for(profile, level) for level in LEVELS}
    if wants_json():
        tokens = {f"{level:g}": tokens for level, tokens in needed.items()}
        facts = {"file": file, "kind": "kvalloc.score_profile", **_score_facts(profile)}
        print_json({**facts, "tokens_for_retention": tokens})
        return
    print_fields({"score profile": file, **score_fields(profile)})
    print()
    print("\n".join(_needed_table(profile, needed)))
    note(
        "tokens per KV head that keep 50%, 90% and 99% of a layer's score mass, sinks and window "
        "included",
    )


def _needed_table(profile: ScoreProfile, needed: dict[float, list[int | None]]) -> list[str]:
    widest = max(count for count in needed[0.9] if count is not None)
    full_bar = bar_scale(widest / profile.context_tokens)
    heading = f"   90%; a whole line is {full_bar:.0%} of {profile.context_tokens:,} tokens"
    lines = ["layer" + "".join(f"{f'{level:.0%}':>8}" for level in LEVELS) + heading]
    for layer in range(profile.shape.n_layers):
        counts = [needed[level][layer] for level in LEVELS]
        cells = "".join(f"{'-' if count is None else f'{count:,}':>8}" for count in counts)
        text, share = f"{layer:>5}{cells}   ", (counts[1] or 0) / profile.context_tokens / full_bar
        drawn = bar(share, terminal_width() - len(text))
        lines.append(text + ("sliding: nothing to decide" if counts[1] is None else drawn))
    return [line.rstrip() for line in lines]


def _score_facts(profile: ScoreProfile) -> dict[str, Any]:
    stated = (
        "shape scorer scorer_parameters context_tokens sinks window evictable_tokens "
        "interpolation_error text_description text_digest set_aside versions created sample_tokens "
        "loss_tokens loss_widths bit_widths digest"
    )
    policies = [policy.title for policy in profile.policies]
    return {
        **{name: getattr(profile, name) for name in stated.split()},
        "n_samples": profile.n_samples,
        "n_ranks": profile.ranks.size,
        "losses_per": losses_per(profile),
        "loss_method": profile.loss_method or None,
        "loss_policies": policies if profile.has_losses else None,
    }


def _show_saved(file: str, header: SavedCacheHeader, tensors: Mapping[str, StoredTensor]) -> None:
    """Return what a saved cache holds, without a model."""
    profile, notes = header.profile, header.notes
    alone = header.batch == 1  # rows of a batch may be padded, which their number does not tell
    if alone:
        prompt = header.prompt_tokens
        kept = profile.budgets_for(prompt)
        if profile.by_prompt:
            kept = _handed_out(tensors, profile, header)
        profile = profile.replace(context_tokens=prompt, budgets=kept)
    facts: dict[str, Any] = {
        "document": notes.get("document"),
        "rows": header.batch,
        **{name: getattr(header, name) for name in ("seen_tokens", "prompt_tokens", "dtype")},
        "file_bytes": Path(file).stat().st_size,
        "full_bytes": profile.full_bytes_at(header.seen_tokens) if alone else None,
        "read_seconds": header.read_seconds,
        "bits": profile.bits,
        "share_groups": profile.share_groups,
    }
    if wants_json():
        budgets = {"context_tokens": profile.context_tokens, "budgets": profile.budgets}
        print_json({"file": file, "kind": "kvalloc.cache", **facts, **budgets})
        return
    print_fields({"saved cache": file, **_saved_fields(file, facts, profile)})
    print()
    print("\n".join(budget_picture(profile)))


def _saved_fields(file: str, facts: dict[str, Any], profile: BudgetProfile) -> dict[str, str]:
    """Describe a saved cache for people; what does not apply is left out."""
    from kvalloc.formats.sharing_groups import shared_text

    followed = facts["seen_tokens"] - facts["prompt_tokens"]
    after = f", {followed:,} of them after the prompt" if followed else ""
    rows = f" in each of {facts['rows']} rows" if facts["rows"] != 1 else ""
    full, took, policy = facts["full_bytes"], facts["read_seconds"], profile.policy
    beside = "" if full is None else f"; a full cache takes {size(full)}"
    return {
        "model": model_text(profile.shape),
        "document": str(facts["document"] or ""),
        "tokens": f"{facts['seen_tokens']:,}{rows}{after}, {facts['dtype']}",
        "reading took": "" if took is None else duration(took),
        "bytes": f"{size(facts['file_bytes'])} on disk{beside}",
        "bits": bits_text(profile),
        "sharing": shared_text(profile.share_groups) if profile.share_groups else "",
        "policy": f"{policy.name} by {policy.scorer}, {policy.sinks} sinks, window {policy.window}",
        "chosen": policies_text(profile),
        "ask": f"kvalloc chat MODEL --cache {file} --question TEXT",
    }


def _handed_out(
    tensors: Mapping[str, StoredTensor], profile: BudgetProfile, header: SavedCacheHeader
) -> IntArray:
    """Count what each KV head really keeps of one prompt that handed its entries out itself.

    The budgets of such a profile are what heads had in the mean over other prompts.
    """
    kept = profile.budgets.copy()
    widths = np.full_like(kept, 16) if profile.bits is None else profile.bits
    for layer in profile.shape.full_layers:
        dense = tensors[f"{layer}.keys"].shape[2]
        followed = max(header.seen_tokens - header.prompt_tokens - dense, 0)  # packed as well
        kept[layer] = dense  # of a layer that keeps everything
        for width in np.unique(widths[layer]).tolist():
            if (lengths := tensors.get(f"{layer}.bits_{width}.lengths")) is not None:
                kept[layer, widths[layer] == width] = lengths.numbers()[0] - followed
    return np.clip(kept, 0, header.prompt_tokens)


def budget_picture(
    profile: BudgetProfile, *, width: int | None = None, unicode: bool | None = None
) -> list[str]:
    """Return a line a layer: index, tokens per KV head, share of the context, and a bar.

    Parameters
    ----------
    profile : BudgetProfile
        At head level a line shows the mean over the layer's heads, the smallest and largest, and
        how high each is.
    width : int, optional
        Columns; those of the terminal by default.
    unicode : bool, optional
        As in `bar`.

    Returns
    -------
    list of str
        The first one is the heading.
    """
    width = terminal_width() if width is None else width
    heads = profile.shape.n_kv_heads if profile.level == "head" else 1
    digits = max(6, len(f"{profile.context_tokens:,}"))
    heading = f"layer  {'tokens':>{digits}}  "
    if heads > 1:
        each = max(5, heads)
        heading += f"min..max over heads  {'heads':<{each}}  "
    full_bar = bar_scale(float(profile.budgets.max()) / profile.context_tokens)
    scale = f"line: {full_bar:.0%} of {profile.context_tokens:,} tokens"
    lines = [f"{heading}  kept  {scale}"]
    for layer, row in enumerate(profile.budgets):
        tokens = float(row.mean())
        text = f"{layer:>5}  {tokens:>{digits},.0f}  "
        shares = row / profile.context_tokens / full_bar
        if heads > 1:
            spread = f"{int(row.min()):,}..{int(row.max()):,}"
            text += f"{spread:>19}  {sparks(shares.tolist(), unicode=unicode):<{each}}  "
        share = tokens / profile.context_tokens
        text += f"{share:>6.1%}  "
        sliding = "  sliding" if profile.shape.layer_types[layer] == "sliding" else ""
        room = max(10, width - len(text) - len(sliding))
        lines.append((text + bar(share / full_bar, room, unicode=unicode) + sliding).rstrip())
    return lines
