"""``kvalloc inspect``: what a file of kvalloc holds."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvalloc.cli.options import Json, Quiet
from kvalloc.cli.output import model_text, note, print_fields, print_json, size
from kvalloc.errors import InputError, ProfileFileError

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile, Policy
    from kvalloc.formats.score_profile import ScoreProfile

EXAMPLES = """\
  kvalloc inspect p.json
  kvalloc inspect s.safetensors --json
  kvalloc inspect doc.kv
"""

LEVELS = (0.5, 0.9, 0.99)
"""Retentions for which a score profile's tokens are told."""


def inspect(
    file: Annotated[
        str,
        typer.Argument(
            metavar="FILE",
            help="A score profile, a budget profile or the name of a shipped one, or a saved "
            "cache.",
        ),
    ],
    json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what a score profile, a budget profile or a saved cache holds.

    A budget profile is drawn as one bar a layer; of a score profile the tokens are shown that each
    layer needs to keep 50%, 90% and 99% of its score mass.
    """
    from kvalloc.formats.saved_cache import is_saved_cache, read_header

    if is_saved_cache(file):
        from kvalloc.cli.saved import show_saved

        show_saved(file, read_header(file), json=json)
        return
    found = _load(file)
    from kvalloc.formats.score_profile import ScoreProfile

    if isinstance(found, ScoreProfile):
        _show_scores(file, found, json=json)
        if not json:
            note(
                "tokens per KV head that keep 50%, 90% and 99% of a layer's score mass, sinks and "
                "window included",
                quiet=quiet,
            )
    else:
        _show_budgets(file, found, json=json)


def tokens_for(profile: ScoreProfile, retention: float) -> list[int | None]:
    """Tokens per KV head with which each layer keeps this share of its score mass.

    Parameters
    ----------
    profile : ScoreProfile
    retention : float
        0..1.

    Returns
    -------
    list of int or None, (n_layers,)
        Sinks and window included; None for sliding layers.
    """
    import numpy as np

    curves = profile.contributions().sum(axis=1)
    needed: list[int | None] = [None] * profile.shape.n_layers
    for layer in profile.shape.full_layers:
        # A hair below, so that summing the heads' shares cannot cost a token.
        rank = float(np.interp(retention - 1e-12, curves[layer], profile.ranks))
        needed[layer] = profile.protected_tokens + int(np.ceil(rank - 1e-6))
    return needed


def _load(file: str) -> ScoreProfile | BudgetProfile:
    """By content: JSON is a budget profile, everything else has to be a score profile."""
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.formats.score_profile import ScoreProfile
    from kvalloc.formats.shipped_profiles import load_profile, shipped_profiles

    path = Path(file)
    if not path.exists():
        shipped = shipped_profiles()
        if file in shipped:
            return load_profile(file)
        raise InputError(
            f"there is no file {file} and no shipped profile of that name; check the path, or "
            f"choose from: {', '.join(shipped) or 'none is shipped'}"
        )
    if path.is_file():
        try:
            with open(path, "rb") as handle:
                start = handle.read(64)
        except OSError as error:
            raise InputError(f"cannot read {file} ({error.strerror})") from error
        if not start:
            raise ProfileFileError(
                file,
                field="file",
                found="empty",
                expected="a score profile or a budget profile",
                way_out="make it again with 'kvalloc profile' or 'kvalloc solve'",
            )
        if start.lstrip()[:1] == b"{" or path.suffix.lower() == ".json":
            return BudgetProfile.load(path)
    try:
        return ScoreProfile.load(path)
    except ProfileFileError as error:
        if error.field != "file" or not str(error.found).startswith("not readable"):
            raise
        raise ProfileFileError(  # it may have been any of them
            file,
            field="file",
            found=error.found,
            expected="a score profile, a budget profile or a saved cache",
            way_out="make it again with 'kvalloc profile', 'kvalloc solve' or 'kvalloc generate "
            "--save-cache'; a truncated file cannot be repaired",
        ) from error


def _show_budgets(file: str, profile: BudgetProfile, *, json: bool) -> None:
    if json:
        from kvalloc.formats.schema import budget_profile_dict

        least, mean, most = _spread(profile)
        spread = {"min_tokens": least, "mean_tokens": mean, "max_tokens": most}
        known = {"predicted_loss": profile.predicted_loss}  # null, where the file leaves it out
        print_json({"file": file, **known, **budget_profile_dict(profile), **spread})
        return
    from kvalloc.cli.picture import budget_picture

    print_fields(_budget_fields(file, profile))
    print()
    print("\n".join(budget_picture(profile)))
    if profile.evaluation is not None:
        _print_evaluation(profile.evaluation)


def _budget_fields(file: str, profile: BudgetProfile) -> dict[str, str]:
    """What is told of a budget profile, for people."""
    from kvalloc.cli.refining import refinement_fields
    from kvalloc.cli.solve import (
        LOSS_NOTE,
        bits_text,
        bound_text,
        cost_text,
        objective_text,
        policies_text,
        price_text,
        ranks_text,
        retention_text,
        solver_text,
        why_text,
    )

    least, mean, most = _spread(profile)
    kept, whole = profile.retained_bytes, profile.full_bytes
    options = ", ".join(f"{key}={value}" for key, value in profile.solver_options.items())
    chosen = policies_text(profile)
    others = "; ".join(_policy_text(other) for other in profile.other_policies)
    return {
        "budget profile": file,
        "model": model_text(profile.shape),
        "asked": _asked(profile),
        "solver": f"{solver_text(profile)}{f' with {options}' if options else ''}, "
        f"{profile.termination}, {profile.level} level, {profile.created}",
        **({"why": why_text(profile)} if profile.detail else {}),
        "retention": retention_text(profile),
        "predicted loss": "unknown, no loss curves"
        if profile.predicted_loss is None
        else f"{profile.predicted_loss:.6f} nats per token; {_loss_source(profile, LOSS_NOTE)}",
        **({} if profile.refinement is None else refinement_fields(profile)),
        "objective": objective_text(profile.objective, profile),
        "bound": bound_text(profile),
        "bytes": f"{size(kept)} of {size(whole)} ({kept / whole:.1%})",
        "bits": "16 (the model's dtype)" if profile.bits is None else bits_text(profile),
        **({} if profile.cost_bytes is None else {"cost": cost_text(profile)}),
        **({} if profile.ranks is None else {"ranks": ranks_text(profile)}),
        **({"sharing": _sharing_text(profile)} if profile.share_groups else {}),
        **({"price": price} if (price := price_text(profile)) else {}),
        "budgets": f"{least:,} to {most:,} tokens per KV head, {mean:,.1f} on average"
        + ("; handed out by each prompt, this is their mean" if profile.by_prompt else ""),
        "other lengths": "the same number of entries"
        if profile.length_rule == "fixed"
        else "the same share of the evictable entries",
        "policy": f"{_policy_text(profile.policy)}, {profile.policy.sinks} sinks, window "
        f"{profile.policy.window}",
        **({"other policies": others, "chosen": chosen} if chosen else {}),
    }


def _print_evaluation(evaluation: dict[str, Any]) -> None:
    """What was measured with these budgets, a row a task; what a file leaves out is a dash."""
    from kvalloc.cli.output import print_table

    settings = evaluation.get("settings")
    told = settings if isinstance(settings, dict) else {}
    rows = evaluation.get("rows")
    shown = [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    if not shown:
        return
    headings = ("evaluated", "tokens", "question", "KL", "95% of KL", "agree", "score", "full", "n")
    print()
    print_table(headings, [_evaluation_cells(row, told) for row in shown])
    split, seed = told.get("split", "unknown"), told.get("seed", "unknown")
    print(f"measured on prompts of the split {split}, seed {seed}; KL in nats per token")


def _evaluation_cells(row: dict[str, Any], settings: dict[str, Any]) -> list[str]:
    ends = row.get("ci95")
    two = isinstance(ends, list) and len(ends) == 2
    return [
        str(row.get("task", "-")),
        _number(row.get("context"), ","),
        str(row.get("question", settings.get("question", "-"))),
        _number(row.get("kl"), ".4f"),
        "..".join(_number(end, ".4f") for end in ends) if two and ends else "-",
        _number(row.get("top1_agreement"), ".0%"),
        _number(row.get("score"), ".0%"),
        _number(row.get("full_score"), ".0%"),
        _number(row.get("n"), ","),
    ]


def _number(value: Any, form: str) -> str:
    return format(value, form) if isinstance(value, int | float) else "-"


def _asked(profile: BudgetProfile) -> str:
    """What was asked for, of a descent on which text, too; older profiles do not say."""
    from kvalloc.cli.solve import request_text

    share, text = profile.requested.get("budget"), profile.requested.get("text")
    if profile.solver == "descent" and share is not None and text is not None:
        return f"least loss of the whole reduced cache in {share:.1%} of all entries, on {text}"
    return request_text(profile) if "target" in profile.requested else "not recorded"


def _loss_source(profile: BudgetProfile, usual: str) -> str:
    """What the predicted loss is of: a descent measures the whole cache, others add up."""
    count = profile.requested.get("predicted_on_prompts")
    if count is None:
        return usual
    ends = profile.requested.get("predicted_interval")
    said = "no interval from one prompt" if ends is None else "95% {:.6f} to {:.6f}".format(*ends)
    return (
        f"{said}; of the whole reduced cache on {count} prompts that only chose among the "
        f"descent's stages, of {profile.requested.get('text', 'a text that is not recorded')}"
    )


def _policy_text(policy: Policy) -> str:
    label = f"{policy.label}: " if policy.label else ""
    by = f"{policy.scorer}{_parameters(policy.scorer_parameters)}"
    return f"{label}{policy.name}{_parameters(policy.parameters)} by {by}"


def _show_scores(file: str, profile: ScoreProfile, *, json: bool) -> None:
    needed = {level: tokens_for(profile, level) for level in LEVELS}
    if json:
        print_json(
            {"file": file, "kind": "kvalloc.score_profile", **_score_facts(profile)}
            | {"tokens_for_retention": {f"{level:g}": tokens for level, tokens in needed.items()}}
        )
        return
    shortest, longest = int(profile.sample_tokens.min()), int(profile.sample_tokens.max())
    lengths = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    exact = (
        "every rank"
        if profile.is_exact
        else (
            f"{profile.ranks.size:,} ranks, interpolation error {profile.interpolation_error:.1e}"
        )
    )
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    print_fields(
        {
            "score profile": file,
            "model": model_text(profile.shape),
            "scorer": f"{profile.scorer}{_parameters(profile.scorer_parameters)}, "
            f"{profile.sinks} sinks, window {profile.window}",
            "context": f"{profile.context_tokens:,} tokens, {profile.evictable_tokens:,} of them "
            f"evictable; {exact}",
            "samples": f"{profile.n_samples} of {lengths} tokens",
            "loss curves": losses_text(profile),
            "bits": _bits_text(profile),
            "text": profile.text_description or "not recorded",
            "made": f"{profile.created} with {versions}",
        }
    )
    print()
    print("\n".join(_needed_table(profile, needed)))


def _needed_table(profile: ScoreProfile, needed: dict[float, list[int | None]]) -> list[str]:
    from kvalloc.cli.output import terminal_width
    from kvalloc.cli.picture import bar, bar_scale, can_print_bars

    unicode = can_print_bars()
    most = max(count for count in needed[0.9] if count is not None)
    full_bar = bar_scale(most / profile.context_tokens)
    heading = f"   90%; a whole line is {full_bar:.0%} of {profile.context_tokens:,} tokens"
    lines = ["layer" + "".join(f"{f'{level:.0%}':>8}" for level in LEVELS) + heading]
    for layer in range(profile.shape.n_layers):
        tokens = [needed[level][layer] for level in LEVELS]
        if any(count is None for count in tokens):
            lines.append(f"{layer:>5}" + "       -" * len(LEVELS) + "   sliding: nothing to decide")
            continue
        text = f"{layer:>5}" + "".join(f"{count:>8,}" for count in tokens) + "   "
        share = (needed[0.9][layer] or 0) / profile.context_tokens / full_bar
        lines.append((text + bar(share, terminal_width() - len(text), unicode=unicode)).rstrip())
    return lines


def _score_facts(profile: ScoreProfile) -> dict[str, Any]:
    return {
        "shape": profile.shape.to_dict(),
        "scorer": profile.scorer,
        "scorer_parameters": profile.scorer_parameters,
        "context_tokens": profile.context_tokens,
        "sinks": profile.sinks,
        "window": profile.window,
        "evictable_tokens": profile.evictable_tokens,
        "n_samples": profile.n_samples,
        "sample_tokens": profile.sample_tokens.tolist(),
        "n_ranks": int(profile.ranks.size),
        "interpolation_error": profile.interpolation_error,
        "loss_tokens": None if profile.loss_tokens is None else profile.loss_tokens.tolist(),
        "losses_per": _losses_per(profile),
        "loss_method": profile.loss_method or None,
        "loss_policies": [policy.title for policy in profile.policies]
        if profile.losses is not None
        else None,
        "bit_widths": None if profile.bit_widths is None else profile.bit_widths.tolist(),
        "text_description": profile.text_description,
        "text_digest": profile.text_digest,
        "versions": profile.versions,
        "created": profile.created,
        "digest": profile.digest(),
    }


def _losses_per(profile: ScoreProfile) -> str | None:
    if profile.losses is None:
        return None
    return "layer" if profile.losses.shape[2] == 1 else "head"


def losses_text(profile: ScoreProfile) -> str:
    """What losses a score profile holds, in a few words."""
    if profile.loss_tokens is None:
        return "not measured"
    levels = profile.loss_tokens
    titles = ", ".join(policy.title for policy in profile.policies)
    several = f", with each of {titles}" if profile.loss_policies else ""
    return (
        f"{_loss_origin(profile)} one {_losses_per(profile)} at a time, at {levels.size} budgets "
        f"from {int(levels[0]):,} to {int(levels[-1]):,} tokens{several}"
    )


def _loss_origin(profile: ScoreProfile) -> str:
    """Whether losses were measured or estimated, as far as the file tells."""
    if profile.loss_probed is not None:
        probed = int(profile.loss_probed.sum())
        return f"estimated, {probed:,} of {profile.loss_probed.size:,} figures measured,"
    known = {"measured": "measured", "fast": "estimated to second order (--loss fast)"}
    return known.get(profile.loss_method, "measured or estimated (this older file does not say)")


def _bits_text(profile: ScoreProfile) -> str:
    if profile.bit_widths is None:
        return "not measured"
    means = [
        (width, float(profile.fidelity(width)[:, list(profile.shape.full_layers)].mean()))
        for width in profile.bit_widths.tolist()
    ]
    return "mean fidelity " + ", ".join(f"{mean:.4f} at {width} bits" for width, mean in means)


def _sharing_text(profile: BudgetProfile) -> str:
    from kvalloc.formats.sharing_groups import shared_text

    text = shared_text(profile.share_groups)
    if profile.grouping_bound is None:
        return text
    bound = (
        f"{profile.grouping_bound:.6f}"
        if profile.sense == "max_value"
        else f"{round(profile.grouping_bound):,} bytes"
    )
    return f"{text}; bound over all groupings {bound}"


def _parameters(parameters: dict[str, Any]) -> str:
    listed = ", ".join(f"{key}={value}" for key, value in parameters.items())
    return f" ({listed})" if listed else ""


def _spread(profile: BudgetProfile) -> tuple[int, float, int]:
    from kvalloc.cli.picture import budget_spread

    return budget_spread(profile)
