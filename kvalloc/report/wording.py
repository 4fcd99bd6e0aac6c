"""Profiles in words for people; texts that do not apply are empty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from kvalloc.accounting.costs import counts_of
from kvalloc.accounting.engine_formats import FORMATS
from kvalloc.allocation.decision import loss_outlook
from kvalloc.allocation.request import Request
from kvalloc.errors import SolverError, option
from kvalloc.formats.fitted import FittedModel
from kvalloc.formats.format_losses import FormatLosses, Predicted
from kvalloc.problem import GroupCap, cap_tree
from kvalloc.prompts.cases import POSITIONS
from kvalloc.report.terminal import number_text
from kvalloc.units import duration, gap_text, share_text, size

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile, Limit
    from kvalloc.formats.evaluation import Evaluation
    from kvalloc.formats.score_profile import ScoreProfile
    from kvalloc.shape import ModelShape

LOSS_NOTE = (
    "predicted loss is a sum of single-unit measurements: each unit was reduced alone, and "
    "together they may do more harm or less"
)
_LOSS_ORIGINS = {"measured": "measured", "fast": "estimated to second order (--loss fast)"}
RETENTION_NOTE = "retention predicts kept attention mass, not answer quality"


def model_text(shape: ModelShape) -> str:
    """Return a model on one line."""
    counts = Counter(layer.kind for layer in shape.by_layer)
    kinds = ", ".join(f"{n} of them {kind}" for kind, n in counts.items() if kind != "full")
    if kinds:
        window = f", window {shape.sliding_window}" if shape.sliding_window else ""
        kinds = f" ({kinds}{window})"
    return (
        f"{shape.model_id}: {shape.n_layers} layers{kinds} x {shape.n_kv_heads} KV "
        f"head{'s' if shape.n_kv_heads > 1 else ''}, {shape.bytes_per_entry:,} bytes an entry"
    )


def decision_fields(decided: BudgetProfile) -> dict[str, str]:
    """Return a decision's fields."""
    kept, whole, loss = decided.retained_bytes, decided.full_bytes, decided.predicted_loss
    granted = requested_bytes(decided)
    of_granted = "" if granted is None else f" (of {size(granted)} granted)"
    states = decided.shape.state_bytes * decided.batch
    of_states = f", of which states {size(states)}" if states else ""
    return {
        "request": request_text(decided),
        "solver": ", ".join(filter(None, (solver_text(decided), ended_text(decided)))),
        "why": decided.detail.removeprefix(f"{decided.decided_by}: "),
        "retention": number_text(decided.retention, ".6f"),
        "answers": loss_outlook(decided),
        "predicted loss": "" if loss is None else f"{loss:.6f} nats per token",
        "model error": _error_text(decided),
        **_measured_fields(decided),
        "objective": objective_text(decided.objective, decided),
        "bound": _bound_text(decided),
        "price": _price_text(decided),
        "limits": "; ".join(_limit_text(one, decided) for one in decided.limits),
        "bytes": f"{size(kept)}{of_granted} of {size(whole)} ({kept / whole:.1%}){of_states}",
        "peak": _peak_text(decided),
        "bits": bits_text(decided),
    }


def _peak_text(decided: BudgetProfile) -> str:
    if not decided.fits_a_peak:
        return ""
    peak = decided.peak_bytes_at(decided.context_tokens, decided.batch)
    return f"{size(peak)}: beside these bytes, one layer in full while a prompt is read"


def _error_text(decided: BudgetProfile) -> str:
    if decided.model_error is None or decided.predicted_loss is None:
        return ""
    return (
        f"whole caches decided so lost {decided.model_error:.2g} times the sum of single losses, "
        f"so about {decided.expected_loss:.2g} nats per token"
    )


def decision_cells(decided: BudgetProfile, seconds: float | None = None) -> dict[str, str]:
    """Return a decision's cells by column."""
    value_name = value_heading(Request.stated(decided))
    has_value = value_name and decided.sense == "max_value"
    value = {value_name: f"{abs(decided.objective):.4f}"} if has_value else {}
    bound = "unknown"
    if decided.bound is not None:
        is_loss = decided.requested.get("objective") == "loss"
        bound = f"{abs(decided.bound) if is_loss else decided.bound:.4f}"
        bound = size(decided.bound) if decided.sense == "min_cost" else bound
    return {
        "solver": solver_text(decided),
        "retention": number_text(decided.retention, ".4f", "?"),
        **value,
        "loss": number_text(decided.predicted_loss, ".4f", "?"),
        "bytes": size(decided.retained_bytes),
        "share": f"{decided.share:.1%}",
        "bound": bound,
        "gap": gap_text(decided.gap),
        **({} if seconds is None else {"seconds": f"{seconds:.3f}"}),
        "ended": ended_text(decided, brief=True),
    }


def budget_fields(profile: BudgetProfile, *, brief: bool = False) -> dict[str, str]:
    """Return a budget profile's fields; ``brief`` leaves out parameters."""
    policy, share = profile.policy, profile.share_of_16_bits
    listed = (profile.solver_options, policy.parameters, policy.scorer_parameters)
    options, parameters, of_scorer = ("" if brief else _parameters(one) for one in listed)
    same = "number of" if profile.length_rule == "fixed" else "share of the evictable"
    lengths = f"the same {same} entries"
    if share is not None:
        lengths = f"as many entries in every head as take {share:.1%} of a cache at 16 bits"
    low, mean, high = budget_spread(profile)
    handed_out = "; handed out by each prompt, this is their mean" if profile.by_prompt else ""
    stated = decision_fields(profile)
    made = f"{stated['solver'] or 'by hand'}{options}"
    stated["solver"] = ", ".join(filter(None, (made, f"{profile.level} level", profile.created)))
    if profile.predicted_loss is None:
        stated["predicted loss"] = "not in this file: no loss curves"
    else:
        stated["predicted loss"] += f", {LOSS_NOTE.removeprefix('predicted loss is ')}"
    stated["bits"] = stated["bits"] or "16 (the model's dtype)"
    return {
        "model": model_text(profile.shape),
        **stated,
        "budgets": f"{low:,} to {high:,} tokens per KV head, {mean:,.1f} on average{handed_out}",
        "other lengths": lengths,
        "policy": f"{policy.name}{parameters} by {policy.scorer}{of_scorer}, "
        f"{policy.sinks} sinks, window {policy.window}",
    }


def request_text(decided: BudgetProfile) -> str:
    """Return a decision's request."""
    request = Request.stated(decided)
    if request is None:
        way = " in a form that can be read" if decided.requested else ""
        return f"not recorded{way}"
    if decided.share_of_16_bits is not None:
        share = f"{decided.share_of_16_bits:.1%} of the bytes of a cache at 16 bits"
        return f"as many entries as take {share}, prompts of {decided.context_tokens:,} tokens"
    worst = " of the worst unit" if request.objective == "worst" else ""
    what = "predicted loss" if request.objective == "loss" else f"retention{worst}"
    text = request.target.describe(what)
    prompts = f"{decided.batch} prompts of " if decided.batch > 1 else "prompts of "
    return "; ".join(
        [f"{text}, {prompts}{decided.context_tokens:,} tokens", *_limit_texts(request)]
    )


def value_heading(request: Request | None) -> str:
    """Return the optimised value's name; empty for retention or loss."""
    return "worst unit" if request is not None and request.objective == "worst" else ""


def _limit_texts(request: Request) -> list[str]:
    caps = (cap.text.partition("=") for cap in request.cap)
    texts = [f"layers {which} within {limit}" for which, _, limit in caps]
    if request.max_tokens is not None:
        texts.append(f"no budget above {request.max_tokens:,} tokens")
    if request.max_distinct is not None:
        texts.append(f"at most {request.max_distinct} different budgets")
    return texts


def solver_text(decided: BudgetProfile) -> str:
    """Return the requested solver, and the one that decided if another."""
    if decided.decided_by in ("", decided.solver):
        return decided.solver
    return f"{decided.solver} ({decided.decided_by})"


def ended_text(decided: BudgetProfile, *, brief: bool = False) -> str:
    """Return the reason for stopping; if optimal, with goal and proof."""
    text, word = decided.termination.replace("_", " "), decided.optimal_by_word
    if text == "optimal" and not brief:
        text += _optimal_for(decided)
    if not word:
        return text
    return f"{text}, {word}'s word" if brief else f"{text}, not proven again: {word}'s word"


def _optimal_for(decided: BudgetProfile) -> str:
    by_loss = "loss" in (decided.requested.get("objective"), decided.requested.get("target"))
    return " for the sum of single losses" if by_loss else ""


def objective_text(value: float | None, decided: BudgetProfile) -> str:
    """Return an objective or bound with its unit; losses count from 0 up."""
    if value is None or not decided.solver:
        return "unknown"
    if decided.sense == "min_cost":
        return f"{round(value):,} bytes"
    if decided.requested.get("objective") == "loss":
        return f"{abs(value):.6f} nats per token"
    return f"{value:.6f}"


def _bound_text(decided: BudgetProfile) -> str:
    text = objective_text(decided.bound, decided)
    if decided.bound is None:
        return text
    return f"{text} ({decided.bound_source}), gap {gap_text(decided.gap)}"


def _limit_text(limit: Limit, decided: BudgetProfile) -> str:
    written = str if limit.value_per_mib is None and limit.name.endswith("budgets") else size
    text = f"{limit.name} {'binds' if limit.binds else 'does not bind'}"
    text += f" ({written(limit.used)} of {written(limit.allowed)})"
    if not limit.value_per_mib:
        return text
    if limit.name != "capacity" or decided.value_per_mib is None:  # whose price has its own line
        amount = small_amount(limit.used)
        worth = _worth_text(limit.value_per_mib, amount, decided)
        text += f", {size(amount)} more are worth {worth}"
    return text


def _worth_text(value_per_mib: float, amount_bytes: int, decided: BudgetProfile) -> str:
    gained = value_per_mib * amount_bytes / 2**20
    is_loss = decided.requested.get("objective") == "loss"
    return f"{gained:.3g} nats" if is_loss else f"{100 * gained:+.3g}%"


def cap_lines(decided: BudgetProfile) -> list[str]:
    """Return several caps as a tree; empty where they cross."""
    request = Request.stated(decided)
    if request is None or len(caps := request.cap) < 2:
        return []
    import networkx as nx

    try:
        tree = cap_tree(
            [GroupCap(name=cap.name, units=cap.layers, capacity_bytes=0) for cap in caps]
        )
    except SolverError:  # no tree
        return []
    for place, cap in enumerate(caps):
        tree.nodes[place]["label"] = f"{cap.name}: {size(cap.capacity_bytes)}"
    return list(nx.generate_network_text(tree, ascii_only=True))


def _price_text(decided: BudgetProfile) -> str:
    price, requested = decided.value_per_mib, decided.requested
    if price is None:
        return decided.price_source
    if price == 0 and decided.sense == "min_cost":
        return "nothing more to be had"
    source = f" ({decided.price_source})"
    is_loss = requested.get("objective") == "loss"
    what = "loss" if is_loss else "retention"
    what += " of the worst unit" if requested.get("objective") == "worst" else ""
    if decided.sense == "max_value":
        amount = small_amount(decided.retained_bytes)
        worth = f"{'save' if is_loss else 'buy'} {_worth_text(price, amount, decided)}"
        return f"{size(amount)} more {worth}{' of' if is_loss else ''} {what}{source}"
    step, gained = (0.001, "0.001 nats less") if is_loss else (0.01, f"0.01 more {what}")
    return f"{gained} costs {size(step * 2**20 / price)}{source}"


def small_amount(kept_bytes: int) -> int:
    """Return 1, 10 or 100 KiB, MiB or GiB, far below the kept bytes."""
    amounts = [10**digits * 1024**power for power in (1, 2, 3) for digits in (0, 1, 2)]
    return max((amount for amount in amounts if 20 * amount <= kept_bytes), default=amounts[0])


def requested_bytes(decided: BudgetProfile) -> int | None:
    """Return the whole cache's granted bytes; None without a size."""
    granted = decided.requested.get("bytes")
    known = isinstance(granted, int) and 0 <= granted < 2**63
    return granted if known else None


def bits_text(decided: BudgetProfile) -> str:
    """Return the share of kept entries at each chosen width."""
    if decided.bits is None:
        return ""
    kept, counts = decided.budgets.sum(), counts_of(decided.budgets, decided.bits)
    shares = ((width, int(count.sum()) / kept) for width, count in counts.items())
    widths = ", ".join(f"{share:.1%} at {width} bits" for width, share in shares if share)
    return f"{widths}, of the kept entries"


def _measured_fields(decided: BudgetProfile) -> dict[str, str]:
    measured = decided.measured_loss
    if measured is None:
        return {}
    sure = "no interval from one prompt a task"
    if measured.interval is not None:
        sure = "95% interval {:.4g} to {:.4g}".format(*measured.interval)
    met = "" if measured.target is None else f"; the target is at most {measured.target:g}"
    tries = "; ".join(
        f"{size(one.retained_bytes)} lost {one.loss:.4g}"
        + ("" if one.target is None else f", at {one.target:.4g} by the curves")
        for one in measured.tries
    )
    return {
        "measured loss": f"{measured.loss:.6f} nats per token ({sure}, {measured.prompts} "
        f"prompts){met}",
        "measured on": measured.text,
        "tries": tries,
    }


def score_fields(profile: ScoreProfile) -> dict[str, str]:
    """Return a score profile's fields."""
    shortest, longest = int(profile.sample_tokens.min()), int(profile.sample_tokens.max())
    lengths = f"{shortest:,}" if shortest == longest else f"{shortest:,} to {longest:,}"
    grid = f"{profile.ranks.size:,} ranks, interpolation error {profile.interpolation_error:.1e}"
    versions = ", ".join(f"{name} {version}" for name, version in profile.versions.items())
    return {
        "model": model_text(profile.shape),
        "scorer": f"{profile.scorer}{_parameters(profile.scorer_parameters)}, "
        f"{profile.sinks} sinks, window {profile.window}",
        "context": f"{profile.context_tokens:,} tokens, {profile.evictable_tokens:,} of them "
        f"evictable; {'every rank' if profile.is_exact else grid}",
        "samples": f"{profile.part_text}{profile.samples_text} of {lengths} tokens",
        "loss curves": losses_text(profile),
        "text": profile.text_description or "not recorded",
        "set aside": "; ".join(profile.set_aside.values()),
        "made": f"{profile.created} with {versions}",
    }


def tokens_for(profile: ScoreProfile, retention: float) -> list[int | None]:
    """Return each layer's tokens per KV head that keep a share (0..1) of its score mass.

    Sinks and window are included; layers with a sliding window have None.
    """
    curves = profile.contributions().sum(axis=1)
    needed: list[int | None] = [None] * profile.shape.n_layers
    for layer in profile.shape.full_layers:
        # A hair below, so that summing the heads' shares cannot cost a token.
        rank = float(np.interp(retention - 1e-12, curves[layer], profile.ranks))
        needed[layer] = profile.protected_tokens + int(np.ceil(rank - 1e-6))
    return needed


def losses_text(profile: ScoreProfile) -> str:
    """Return the losses that a score profile has."""
    if profile.loss_tokens is None:
        return "not measured"
    levels = profile.loss_tokens
    stored = ""
    if len(profile.loss_widths) > 1:
        stored = f", stored at {', '.join(map(str, profile.loss_widths))} bits each"
    origin = _LOSS_ORIGINS.get(profile.loss_method, "measured or estimated")
    return (
        f"{origin} one {losses_per(profile)} at a time, at {levels.size} budgets "
        f"from {int(levels[0]):,} to {int(levels[-1]):,} tokens{stored}"
    )


def losses_per(profile: ScoreProfile) -> str | None:
    """Return the unit of measured losses, layer or head."""
    if profile.losses is None:
        return None
    return "layer" if profile.losses.shape[2] == 1 else "head"


def _parameters(parameters: dict[str, Any]) -> str:
    files = {"file": Path(parameters["file"]).name} if parameters.get("file") else {}
    listed = ", ".join(f"{key}={value}" for key, value in {**parameters, **files}.items())
    return f" ({listed})" if listed else ""


def budget_spread(profile: BudgetProfile) -> tuple[int, float, int]:
    """Return the smallest, mean and largest decided budget, tokens."""
    decided = profile.budgets[list(profile.shape.full_layers)]
    return int(decided.min()), float(decided.mean()), int(decided.max())


def evaluation_fields(evaluation: Evaluation) -> dict[str, str]:
    """Return an evaluation's fields."""
    settings = {name: value for name, value in evaluation.settings.items() if value is not None}
    versions = ", ".join(f"{name} {version}" for name, version in evaluation.versions.items())
    return {
        "model": model_text(evaluation.shape),
        **{
            name: ", ".join(map(str, value)) if isinstance(value, list | tuple) else str(value)
            for name, value in settings.items()
        },
        "profiles": ", ".join(f"{name} ({one[:8]})" for name, one in evaluation.profiles.items()),
        "prompts": f"{len({str(one.get('name')) for one in evaluation.prompts})} caches, "
        f"{len(evaluation.prompts)} answers",
        "made": f"{evaluation.created} with {versions}",
    }


TAIL_COLUMNS = (
    *(("KL 99%", "p99", ".4f"), ("KL 99.9%", "p999", ".3f"), ("tokens", "n_tokens", ",.0f")),
    ("agree", "top1_agreement", ".1%"),
)
COLUMNS = (
    *(("from", "from", ""), ("task", "task", ""), ("cache", "name", "")),
    ("16-bit bytes", "bytes_at_16_bits", "bytes"),
    *(("share", "share_of_16_bits", ".1%"), ("exact", "exact_tokens", ".0f")),
    *(("KL", "kl", ".4f"), ("95%", "ci95", ".4f")),
    *((name, name, ".4f") for name in POSITIONS),
    *TAIL_COLUMNS,
    *(("score", "score", ".0%"), ("ppl", "perplexity", ".2f"), ("n", "n", ".0f")),
)
BY_POSITION = (
    *(("from", "from", ""), ("task", "task", ""), ("cache", "name", "")),
    *(("positions", "positions", ""), ("KL", "kl", ".4f"), *TAIL_COLUMNS),
)
PAIRED = (
    *(("task", "task", ""), ("cache", "name", ""), ("against", "against", "")),
    *(("KL ratio", "kl_ratio", ".3f"), ("95%", "kl_ratio_ci95", ".3f")),
    *(("KL difference", "kl_difference", "+.4f"), ("95%", "kl_difference_ci95", "+.4f")),
    *(("99% ratio", "p99_ratio", ".3f"), ("99.9% ratio", "p999_ratio", ".3f")),
    *(("tokens", "n_tokens", ",.0f"), ("agree difference", "top1_difference", "+.1%")),
    *(("score difference", "score_difference", "+.0%"), ("95%", "score_difference_ci95", "+.0%")),
)
"""Columns of the three tables: heading, what stands there, and how a number is shown."""


FORMAT_COLUMNS = (
    *(("format", "format", ""), ("bits", "bits", ".2f")),
    *(("K alone", "keys", ".5f"), ("V alone", "values", ".5f")),
    *(("K and V", "mean", ".5f"), ("99%", "p99", ".4f"), ("99.9%", "p999", ".3f")),
    ("agree", "top1", ".1%"),
)
"""Columns of measured losses of engine formats."""


def format_rows(losses: FormatLosses) -> list[dict[str, Any]]:
    """Return each engine format's loss in all layers, nats per token.

    ``keys`` and ``values`` are sums of single losses; ``mean``, ``p99``, ``p999`` and ``top1``, if
    measured, are of the whole cache.
    """
    rows = []
    for index, name in enumerate(losses.formats):
        keys, values = losses.losses[..., index].sum(axis=0).tolist()
        bits = FORMATS[name].bits(losses.shape.head_dim)
        row = {"format": name, "bits": bits, "keys": keys, "values": values}
        (whole,) = np.nonzero((losses.choices == index).all(axis=(1, 2)))
        for place in whole[:1]:
            row |= {one: float(getattr(losses, one)[place]) for one in Predicted._fields}
        rows.append(row)
    return rows


def format_table(losses: FormatLosses) -> tuple[list[str], list[list[str]]]:
    """Return headings and cells of `format_rows`."""
    return _table(FORMAT_COLUMNS, format_rows(losses))


def format_fields(losses: FormatLosses) -> dict[str, str]:
    """Return the fields of engine formats' losses."""
    versions = ", ".join(f"{name} {version}" for name, version in losses.versions.items())
    return {
        "model": model_text(losses.shape),
        "losses": f"KL in nats a token, of {losses.n_tokens:,} predictions",
        "mixtures": f"{len(losses.choices)} whole caches, each within a factor of "
        f"{losses.model_error:.2f} of its prediction",
        "text": losses.text_description or "not recorded",
        "made": f"{losses.created} with {versions}",
    }


def evaluation_tables(
    rows: Sequence[Mapping[str, Any]],
) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield headings and cells of an evaluation's rows, then of methods against each other.

    Between them are ranges of positions with enough tokens for a percentile. The first method is
    compared with the full cache, others with the first.
    """
    yield _table(
        COLUMNS,
        [{**row, **{name: one["kl"] for name, one in row["by_position"].items()}} for row in rows],
    )
    ranges = [
        {**row, "positions": name, **one}
        for row in rows
        for name, one in row["by_position"].items()
        if one["p99"] is not None and row["name"] != "full"
    ]
    if ranges:
        yield _table(BY_POSITION, ranges)
    paired = [
        {**row, **one}
        for row in rows
        for one in row["paired"][-1:]
        if any(one.get(name) is not None for name in ("kl_ratio", "score_difference"))
    ]
    if paired:
        yield _table(PAIRED, paired)


def score_notes(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the smallest share at which each task is solved as well as with the full cache."""
    from kvalloc.evaluate.scoring import ALL_TASKS

    scored = [row for row in rows if row["score"] is not None and row["task"] != ALL_TASKS]
    for task, full in ((row["task"], row["score"]) for row in scored if row["name"] == "full"):
        if not full:
            continue
        budgets = [
            one
            for one in scored
            if one["task"] == task and one["name"].startswith(option("budget"))
        ]
        budgets.sort(key=lambda one: -one["share_of_16_bits"])
        lost = [one["score"] < full for one in budgets]
        if len(budgets) < 2:
            continue
        kept = budgets[: lost.index(True)] if any(lost) else budgets
        where = (
            f"down to {kept[-1]['share_of_16_bits']:.1%} of the bytes" if kept else "at no budget"
        )
        text = f"{task}: the full cache's score of {full:.0%} is reached {where}"
        if any(lost):
            first = budgets[len(kept)]
            text += f"; {first['score']:.0%} at {first['share_of_16_bits']:.1%}"
        yield text


def _table(
    columns: Sequence[tuple[str, str, str]], rows: Sequence[Mapping[str, Any]]
) -> tuple[list[str], list[list[str]]]:
    stated = [column for column in columns if any(column[1] in row for row in rows)]
    cells = [[_cell(row.get(key), form) for _, key, form in stated] for row in rows]
    return [heading for heading, _, _ in stated], cells


def _cell(value: Any, form: str) -> str:
    if form == "bytes":
        return "-" if value is None else size(value)
    if isinstance(value, list):
        return "..".join(number_text(end, form, "-") for end in value) or "-"
    return str(value) if isinstance(value, str) else number_text(value, form, "-")


def fitted_fields(fitted: FittedModel) -> dict[str, str]:
    """Return a fitted file's fields."""
    surrogate, scores = fitted.surrogate, fitted.scores
    by_layer = surrogate.r_squared
    explained = f"{by_layer.mean():.2f} ({by_layer.min():.2f} to {by_layer.max():.2f})"
    errors = "; ".join(
        f"{one.share:.0%}: {one.loss / one.predicted:.1f} times {one.predicted:.4f}"
        + ("" if one.p99 is None else f", 99% of tokens at most {one.p99:.2g}")
        + ("" if one.second_read is None else f", a second read loses {one.second_read:.4f}")
        for one in scores.errors
    )
    votes = "of the last queries are left out: they do not surely help"
    if surrogate.votes_weight:
        votes = (
            f"of the last queries at weight {surrogate.votes_weight:g}: "
            f"{surrogate.votes_ratio:.2f} of the loss without"
        )
    return {
        "model": fitted.shape.model_id,
        "second read": f"fitted to {surrogate.target} on {surrogate.samples} samples of up to "
        f"{surrogate.context_tokens:,} tokens, ridge {surrogate.ridge:g}",
        "explained": f"{explained} of the variance of the half left out, by layer",
        "votes": votes,
        "losses": f"of each head at {', '.join(map(str, scores.loss_widths))} bits on "
        f"{scores.text_description}",
        "whole caches": f"lose, of the sum of single losses in nats: {errors}" if errors else "",
    }


_FIELDS: dict[str, Callable[[Any], dict[str, str]]] = {
    "budget profile": budget_fields,
    "score profile": score_fields,
    "evaluation": evaluation_fields,
}


def record_fields(record: Any) -> dict[str, str]:
    """Return the fields of a profile or an evaluation."""
    return _FIELDS[record.NAME](record)


def saved_fields(file: str, facts: dict[str, Any], profile: BudgetProfile) -> dict[str, str]:
    """Return a saved cache's fields."""
    followed = facts["seen_tokens"] - facts["prompt_tokens"]
    after = f", {followed:,} of them after the prompt" if followed else ""
    rows = f" in each of {facts['rows']} rows" if facts["rows"] != 1 else ""
    full_bytes, took, policy = facts["full_bytes"], facts["read_seconds"], profile.policy
    full = "" if full_bytes is None else f"; a full cache takes {size(full_bytes)}"
    return {
        "model": model_text(profile.shape),
        "document": str(facts["document"] or ""),
        "tokens": f"{facts['seen_tokens']:,}{rows}{after}, {facts['dtype']}",
        "reading took": "" if took is None else duration(took),
        "bytes": f"{size(facts['file_bytes'])} on disk{full}",
        "bits": bits_text(profile),
        "policy": f"{policy.name} by {policy.scorer}, {policy.sinks} sinks, window {policy.window}",
        "ask": f"kvalloc chat MODEL --cache {file} --question TEXT",
    }


def kept_text(cache: Any) -> str:
    """Return the target, the kept share of all tokens read, and its bytes."""
    profile: BudgetProfile = cache.profile
    target, is_decided = profile.target_text, cache.decision_seconds is not None
    if is_decided and profile.retention is not None:
        target = f"{target} (retention {profile.retention:.4f} reached)"
    elif not (is_decided or profile.share_of_16_bits or profile.filled_bytes_at(1)) and target:
        # decided at one length: sinks and window weigh more in a shorter prompt
        target += f" at {profile.context_tokens:,} tokens"
    kept = share_text(cache.retained_bytes, cache.full_bytes, target)
    return kept if cache.verifier is None else f"{kept}; {verified_text(cache.verifier.facts)}"


def verified_text(facts: Mapping[str, Any]) -> str:
    """Return the cost of verifying answers."""
    bytes_text = f"lossless, with {size(facts['full_bytes'])} of full cache beside it"
    if not facts["rounds"]:
        return bytes_text
    ties = facts["ties"]
    return (
        f"{bytes_text}, read once in {facts['tokens'] / facts['rounds']:.1f} tokens "
        f"({facts['accepted']} of {facts['tried']} drafts accepted"
        f"{f', {ties} ties' if ties else ''})"
    )


def deciding_text(cache: Any) -> str:
    """Return the decision's part of the reading time; empty for stored budgets."""
    seconds = cache.decision_seconds
    return "" if seconds is None else f", {duration(seconds)} of it to decide the budgets"


def proof_text(profile: BudgetProfile) -> str:
    """Return how good a decision is."""
    if profile.bound is None:
        if profile.decided_by or profile.solver:
            return "No bound is known: nothing says how far these budgets are from the best."
        return "No solver decided these budgets, so there is no bound to hold them against."
    best, gap = objective_text(profile.bound, profile), profile.gap or 0.0
    ratio = f"{profile.objective / profile.bound:.3g}" if profile.bound else ""
    if profile.sense == "min_cost":
        better, best = "that reach this target take less", size(profile.bound)
        these = f"take at most {ratio} times the least possible"
    elif profile.requested.get("objective") == "loss":
        better, these = "in these bytes lose less", f"lose at most {ratio} times the least possible"
    else:
        better = "in these bytes retain more"
        these = f"retain at most {gap_text(gap)} less than the most possible"
    if gap < 1e-9:
        word, what = profile.optimal_by_word, _optimal_for(profile)
        by = f" by {word}'s word, not proven again" if word else ""
        return f"{'Optimal' if word else 'Proven optimal'}{what}{by}: no budgets {better}."
    if not ratio:
        return f"No budgets {better} than {best}, which says little of these."
    return f"No budgets {better} than {best}; these {these}."
