"""``kvalloc solve``: from a score profile and a target to a budget profile."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from kvalloc.accounting.costs import BIT_WIDTHS
from kvalloc.allocation.request import RANK_TOLERANCE, Request, RequestOptions, Target
from kvalloc.cli.options import ModelFlags, takes
from kvalloc.cli.output import (
    duration,
    gap_text,
    note,
    print_fields,
    print_result,
    wants_json,
)
from kvalloc.cli.progress import ProgressBar, load, slow
from kvalloc.cli.values import check_time_limit, load_scores, solver_options
from kvalloc.errors import InputError, option
from kvalloc.units import Option, size

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.formats.score_profile import ScoreProfile

EXAMPLES = """\
  kvalloc solve s.safetensors --target-retention 0.9 -o p.json
  kvalloc solve s.safetensors --memory 64MiB --context 8192 --batch 4 -o p.json
  kvalloc solve s.safetensors --budget 20% --solver pyramid --solver-option beta=10 --json
  kvalloc solve s.safetensors --budget 20% --level head --refine demo -o p.json
"""

LOSS_NOTE = (
    "predicted loss is a sum of single-unit measurements: each unit was reduced alone, and "
    "together they may do more harm or less"
)
_STATED = (
    "solver decided_by solver_options detail termination sense objective bound bound_source gap "
    "value_per_mib retention predicted_loss retained_tokens full_tokens retained_bytes cost_bytes "
    "full_cost_bytes full_bytes"
)
"""What is stated of every decision as its profile has it."""

RETENTION_NOTE = "retention predicts kept attention mass, not answer quality"


REFINING = "Refining"


class RefineFlags(TypedDict, total=False):
    """How ``kvalloc solve`` refines; see `kvalloc.tuning.refinement.RefineOptions`.

    Parameters
    ----------
    refine : str
        Measure the solution's loss on this model, correct the loss curves around it and solve
        again; with `target_loss`, the loss on prompts that only choose the round counts.
    refine_prompts : sequence of str
        Prompts to refine on, of each 'task' a quarter to choose the round by and a quarter to
        report the loss on. By default four of each kind that 'kvalloc profile --loss' makes.
    rounds : int
        With `refine`: rounds at most; 3 by default.
    refine_probes : int
        With `refine`: single changes measured a round and prompt, the least decided ones; all
        neighbours by default.
    resume : bool
        With `refine`: go on with what a killed command had measured.
    """

    refine: Annotated[str | None, Option("MODEL", REFINING)]
    refine_prompts: Annotated[Sequence[str] | None, Option("FILE.jsonl", REFINING)]
    rounds: Annotated[int | None, Option("N", REFINING, least=1)]
    refine_probes: Annotated[int | None, Option("N", REFINING, least=1)]
    resume: Annotated[bool | None, Option("", REFINING)]


@takes(RequestOptions, RefineFlags, ModelFlags)
def solve(
    scores: Path,
    solver: str = "auto",
    solver_option: list[str] | None = None,
    average: str = "curves",
    time_limit: float | None = None,
    output: Annotated[Path | None, Option("OUT.json")] = None,
    **asked: Any,
) -> None:
    """Decide how many entries each layer and KV head keeps.

    What was decided comes with a bound that shows how much better it could be at most.
    Exactly one target: --target-retention, --target-loss, --budget, --budget-tokens or --memory.

    Parameters
    ----------
    output : Path
        The budget profile to write; may be left out with --json.
    """
    from kvalloc.allocation.decision import solve as decide

    others = [name for name in asked if name not in RequestOptions.__annotations__]
    given = {name: asked.pop(name) for name in others}
    request = Request.parse(**asked)  # refuses before the scores are read
    _check_refinement(given, output, average=average)
    check_time_limit(time_limit)
    _check_output(output, scores)
    chosen = solver_options(solver, solver_option or [])
    profile = load_scores(scores)
    start = time.perf_counter()
    how: dict[str, Any] = {"solver": solver, "solver_options": chosen, "time_limit": time_limit}
    if "refine" in given and output is not None:
        decided = _refined(profile, request, given, output, how)
    else:
        with slow(f"solving with {solver}"):
            decided = decide(
                profile,
                request=request,
                average=average,  # type: ignore[arg-type]  # solving checks it
                notify=note,
                **how,
            )
    seconds = time.perf_counter() - start
    if output is not None and "refine" not in given:
        decided.save(output)
    data = {
        **decision_row(decided, seconds),
        **_decision(decided),
        "predicted_loss_interval": _loss_interval(decided, profile),
        "output": output,
    }
    print_result(data, lambda: print_fields(_summary(decided, data)))


def _check_refinement(given: Mapping[str, Any], output: Path | None, *, average: str) -> None:
    """Refuse flags of a refinement without one, and one that cannot be.

    Parameters
    ----------
    given : mapping
        What was typed of `RefineFlags` and `kvalloc.cli.options.ModelFlags`.
    output : Path or None
    average : str

    Raises
    ------
    InputError
        If flags of a refinement stand without one, or it has nowhere to keep what it measured.
    """
    if given and "refine" not in given:
        flag = option(next(iter(given)))
        raise InputError(f"{flag} belongs to a refinement; name the model with --refine")
    if "refine" in given and average != "curves":
        raise InputError("a refinement corrects the mean curves; leave out --average")
    if "refine" in given and output is None:
        raise InputError("--refine keeps what it measured beside the profile: say -o OUT.json")


def _refined(
    scores: ScoreProfile,
    request: Request,
    given: Mapping[str, Any],
    output: Path,
    how: dict[str, Any],
) -> BudgetProfile:
    """Refine and save, with a bar; what was measured is in ``OUT.json.partial`` until then.

    Parameters
    ----------
    scores : ScoreProfile
    request : Request
    given : mapping
        As for `check_refinement`.
    output : Path
    how : dict
        Solver, its options and the time limit.

    Raises
    ------
    KVAllocError
        As `kvalloc.refine`.
    """
    from kvalloc.measure.checkpoint import check_output
    from kvalloc.models.loading import require_run_packages

    require_run_packages()
    from kvalloc.tuning import refine, refinement_prompts

    # what cannot be read or resumed is refused before the model is loaded
    files, resume = given.get("refine_prompts"), given.get("resume", False)
    how = {**how, **({"rounds": given["rounds"]} if "rounds" in given else {})}
    prompts = refinement_prompts(files)[0] if files else None
    check_output(output, resume=resume)
    loaded = load(given["refine"], given)
    with ProgressBar("refining", unit="prompts") as progress:
        decided = refine(
            scores,
            loaded.model,
            loaded.tokenizer,
            prompts,
            probes=given.get("refine_probes"),
            output=output,
            resume=resume,
            progress=progress,
            model_id=loaded.model_id,
            request=request,
            **how,
        )
    if decided.refinement is not None and decided.refinement["note"]:
        note(decided.refinement["note"])
    return decided


def _refinement_fields(decided: BudgetProfile) -> dict[str, str]:
    """What is told of a refinement, for people; nothing where there was none."""
    told = decided.refinement
    if told is None:
        return {}

    def text(kind: str, prompts: str) -> str:
        low, high = told[f"{kind}_interval"]
        count = len(told[f"{prompts}_prompts"])
        return (
            f"{told[f'{kind}_loss']:.6f} nats per token ({told['confidence']:.0%} interval "
            f"{low:.4g} to {high:.4g}, {count} prompts)"
        )

    rounds = "; ".join(
        f"{one['round']}: {one['predicted']:.4g} predicted, {one['training']:.4g} where "
        f"learnt, {one['choosing']:.4g} where chosen{'' if one['kept'] else ', not kept'}"
        for one in told["rounds"]
    )
    fields = {
        "predicted loss": text("predicted", "training"),
        "held-out loss": text("measured", "held_out"),
        "agreement": "within 25% or their intervals"
        if told["agrees"]
        else "NO: predicted and held-out loss are further apart than 25% and their intervals",
        "measured on": told["text_description"],
        **({"note": told["note"]} if told["note"] else {}),
        "rounds": rounds,
    }
    if decided.requested["target"] == "loss":
        target = decided.requested["value"]
        fields["target"] = f"met by {told['choosing_loss']:.6f} on the prompts that chose the round"
        if told["measured_loss"] > target:
            fields["target"] += "; the held-out loss is above it"
    beyond = told.get("largest_size_beyond_target")
    if beyond is not None:
        fields["least bytes"] = f"{size(beyond)} of decided layers was too little"
    return fields


def decision_row(decided: BudgetProfile, seconds: float) -> dict[str, Any]:
    """What is told of every decision, as plain values.

    Parameters
    ----------
    decided : BudgetProfile
    seconds : float
        Formulating, solving and checking.
    """
    noted = decided.predicted_loss is not None and decided.refinement is None
    return {
        **{name: getattr(decided, name) for name in _STATED.split()},
        "price_source": decided.price_source or None,
        "predicted_loss_note": LOSS_NOTE if noted else None,
        "requested_bytes": requested_bytes(decided),
        "cost": decided.requested.get("cost", "bytes"),
        "seconds": seconds,
    }


def _loss_interval(decided: BudgetProfile, scores: ScoreProfile) -> tuple[float, float] | None:
    """How sure a predicted loss is on such text; None where it is unknown or was refined."""
    import numpy as np

    from kvalloc.allocation.curves import predicted_loss_interval

    if decided.predicted_loss is None or decided.refinement is not None:
        return None
    policies = None
    if decided.unit_policies is not None:
        titles = [policy.title for policy in scores.policies]
        places = np.array([titles.index(policy.title) for policy in decided.policies])
        policies = places[decided.unit_policies]
    return predicted_loss_interval(
        scores, decided.budgets, decided.context_tokens, bits=decided.bits, policies=policies
    )


def price_text(decided: BudgetProfile) -> str:
    """What a little more memory buys, or a little more retention costs; empty if unknown."""
    price = decided.value_per_mib
    if price is None:
        return ""
    source = f" ({decided.price_source})"
    of = {"decode-bytes": " read per token", "communication": " communicated"}.get(
        str(decided.requested.get("cost")), ""
    )
    objective = decided.requested.get("objective")
    weighted = "weighted " if decided.requested.get("weights") else ""
    what = f"{weighted}retention{' of the worst unit' if objective == 'worst' else ''}"
    if decided.sense == "max_value":
        amount = _little(decided.retained_bytes)
        bought = price * amount / 2**20
        if objective == "loss":
            return f"{size(amount)} more{of} save {bought:.3g} nats of {weighted}loss{source}"
        return f"{size(amount)} more{of} buy {100 * bought:+.3g}% {what}{source}"
    if price == 0:
        return ""  # nothing more to be had
    if objective == "loss":
        return f"0.001 nats less costs {size(0.001 * 2**20 / price)}{of}{source}"
    return f"0.01 more {what} costs {size(0.01 * 2**20 / price)}{of}{source}"


def _little(kept_bytes: int) -> int:
    """A round amount that is small beside what is kept: 1, 10 or 100 KiB, MiB or GiB."""
    amounts = [10**digits * 1024**power for power in (1, 2, 3) for digits in (0, 1, 2)]
    return max((amount for amount in amounts if 20 * amount <= kept_bytes), default=amounts[0])


def requested_bytes(decided: BudgetProfile) -> int | None:
    """Bytes that were granted for the whole cache; None when a retention was the target."""
    granted = decided.requested.get("bytes")
    return None if granted is None else int(granted)


def solver_text(decided: BudgetProfile) -> str:
    """Who was asked to decide, and who did where that is another one."""
    if decided.decided_by in ("", decided.solver):
        return decided.solver
    return f"{decided.solver} ({decided.decided_by})"


def ended_text(decided: BudgetProfile) -> str:
    """Why the solver stopped, for people."""
    return decided.termination.replace("_", " ")


def why_text(decided: BudgetProfile) -> str:
    """The solver's own line, without the name that stands in front of it."""
    return decided.detail.removeprefix(f"{decided.decided_by}: ")


def objective_text(value: float | None, decided: BudgetProfile) -> str:
    """An objective or bound with its unit; a loss as it is measured, from 0 up."""
    if value is None:
        return "unknown"
    if decided.sense == "min_cost":
        return f"{round(value):,} bytes"
    if decided.requested.get("objective") == "loss":
        return f"{abs(value):.6f} nats per token"
    return f"{value:.6f}"


def request_text(decided: BudgetProfile) -> str:
    """What was asked for, for people; of a descent on which text, too."""
    asked = decided.requested
    share, text = asked.get("budget"), asked.get("text")
    if decided.solver == "descent" and share is not None and text is not None:
        return f"least loss of the whole reduced cache in {share:.1%} of all entries, on {text}"
    if "target" not in asked:
        return "not recorded"
    worst = " of the worst unit" if asked.get("objective") == "worst" else ""
    what = "predicted loss" if asked.get("objective") == "loss" else f"retention{worst}"
    what = f"weighted {what}" if asked.get("weights") else what
    cost = asked.get("cost", "bytes")
    entries = {"bytes": "entries", "decode-bytes": "bytes read per token"}.get(cost, cost)
    text = Target.read(asked).describe(what, entries)
    prompts = f"{decided.batch} prompts of " if decided.batch > 1 else "prompts of "
    return "; ".join([f"{text}, {prompts}{decided.context_tokens:,} tokens", *limit_texts(decided)])


def value_heading(asked: Mapping[str, Any]) -> str:
    """What to call the optimised value beside retention and loss; empty where it is one of them."""
    if asked.get("objective") == "worst":
        return "worst unit"
    if asked.get("workloads", "mean") != "mean":
        return "worst samples"
    return "weighted" if asked.get("weights") else ""


def limit_texts(decided: BudgetProfile) -> list[str]:
    """What else was asked for, one text each."""
    asked = decided.requested
    caps = (str(text).partition("=") for text in asked.get("cap", ()))
    texts = [f"layers {which} within {limit}" for which, _, limit in caps]
    if asked.get("workloads") == "worst":
        texts.append("the worst sample counts")
    elif asked.get("workloads") == "cvar":
        texts.append(f"the worst {asked['tail']:.0%} of the samples count")
    if asked.get("max_tokens") is not None:
        texts.append(f"no budget above {asked['max_tokens']:,} tokens")
    if asked.get("equal_heads"):
        texts.append("equal heads")
    if asked.get("max_distinct") is not None:
        texts.append(f"at most {asked['max_distinct']} different budgets")
    if asked.get("ranks") is not None:
        tolerance = asked.get("rank_tolerance", RANK_TOLERANCE)
        texts.append(f"{asked['ranks']} ranks balanced within {tolerance:.3g}")
    return texts


def bits_text(decided: BudgetProfile) -> str:
    """Which share of the kept entries is stored at which width; empty where none was chosen."""
    if decided.bits is None:
        return ""
    kept = decided.budgets.sum()
    shares = (
        (width, int(decided.budgets[decided.bits == width].sum()) / kept) for width in BIT_WIDTHS
    )
    widths = ", ".join(f"{share:.1%} at {width} bits" for width, share in shares if share)
    return f"{widths}, of the kept entries"


def retention_text(decided: BudgetProfile) -> str:
    """The retention, or why there is none."""
    if decided.retention is not None:
        return f"{decided.retention:.6f}"
    chosen = decided.unit_policies is not None
    return "unknown: some heads keep others than the scorer's best" if chosen else "unknown"


def policies_text(decided: BudgetProfile) -> str:
    """How many KV heads have which policy, or what each counts; empty where all have the same."""
    if decided.unit_weights is not None:
        own = decided.unit_weights[list(decided.shape.full_layers)]
        counts = (own / own.sum(axis=-1, keepdims=True)).mean(axis=(0, 1)).tolist()
        heads_each = zip(decided.policies, counts, strict=True)
        # what is weighed is scorers, whatever the first one's policy does beside
        return ", ".join(
            f"{one.label or one.scorer} counts {count:.0%}" for one, count in heads_each
        )
    if decided.unit_policies is None:
        return ""
    table = decided.unit_policies[list(decided.shape.full_layers)]
    heads = [(int((table == place).sum()), one) for place, one in enumerate(decided.policies)]
    listed = ", ".join(f"{one.title} in {count}" for count, one in heads if count)
    return f"{listed} of {table.size} KV heads"


def cost_text(decided: BudgetProfile) -> str:
    """What was bounded instead of stored bytes, in the layers that get budgets; else empty."""
    if decided.cost_bytes is None or not decided.full_cost_bytes:
        return ""
    share = decided.cost_bytes / decided.full_cost_bytes
    name = {"decode-bytes": "read", "communication": "communicated"}[decided.requested["cost"]]
    return (
        f"{size(decided.cost_bytes)} of {size(decided.full_cost_bytes)} ({share:.1%}) {name} for "
        "each generated token"
    )


def ranks_text(decided: BudgetProfile) -> str:
    """Bytes on each tensor-parallel rank, decided layers only; empty without ranks."""
    import numpy as np

    if decided.ranks is None:
        return ""
    placed = decided.ranks >= 0
    stored = decided.head_bytes_at(decided.context_tokens)
    each = np.bincount(decided.ranks[placed], weights=stored[placed]) * decided.batch
    over = float(each.max()) / float(each.mean()) - 1
    return f"{', '.join(size(one) for one in each)} (largest {over:.2%} above the mean)"


def bound_text(decided: BudgetProfile) -> str:
    """The bound, who proved it, and the gap."""
    text = objective_text(decided.bound, decided)
    if decided.bound is None:
        return text
    return f"{text} ({decided.bound_source}), gap {gap_text(decided.gap)}"


def _check_output(output: Path | None, scores: Path) -> None:
    from kvalloc.files import check_writable

    if output is None:
        if not wants_json():
            raise InputError(
                "say where the budget profile goes with -o OUT.json, or print the result with "
                "--json"
            )
        return
    if output.exists() and scores.exists() and output.samefile(scores):
        raise InputError(f"-o {output} would overwrite the score profile; name another file")
    check_writable(output)


def _decision(decided: BudgetProfile) -> dict[str, Any]:
    names = (
        "requested context_tokens batch level page_tokens budgets bits ranks unit_policies "
        "refinement"
    )
    return {
        **{name: getattr(decided, name) for name in names.split()},
        "policies": [policy.title for policy in decided.policies],
    }


def decision_fields(decided: BudgetProfile) -> dict[str, str]:
    """What a budget profile states of its decision, for people; empty where it does not apply."""
    kept, whole, loss = decided.retained_bytes, decided.full_bytes, decided.predicted_loss
    granted = requested_bytes(decided)
    of_granted = ""
    if granted is not None:
        of_granted = f" ({'MORE than the' if kept > granted else 'of'} {size(granted)} granted)"
    return {
        "asked": request_text(decided),
        "solver": f"{solver_text(decided)}, {ended_text(decided)}",
        "why": why_text(decided),
        "retention": retention_text(decided),
        "predicted loss": "" if loss is None else f"{loss:.6f} nats per token",
        **_refinement_fields(decided),
        "objective": objective_text(decided.objective, decided),
        "bound": bound_text(decided),
        "price": price_text(decided),
        "bytes": f"{size(kept)}{of_granted} of {size(whole)} ({kept / whole:.1%})",
        "bits": bits_text(decided),
        "cost": cost_text(decided),
        "ranks": ranks_text(decided),
        "chosen": policies_text(decided),
    }


def _summary(decided: BudgetProfile, data: Mapping[str, Any]) -> dict[str, str]:
    heads = decided.budgets.size
    fields = decision_fields(decided)
    fields["solver"] += f", {duration(data['seconds'])}"
    fields["tokens"] = (
        f"{decided.retained_tokens / heads:,.1f} of {decided.full_tokens / heads:,.1f} per KV head "
        f"on average ({decided.retained_tokens:,} entries)"
    )
    fields["note"] = "" if decided.retention is None else RETENTION_NOTE
    if data["predicted_loss_note"] is not None:
        if (sure := data["predicted_loss_interval"]) is not None:
            interval = f"95% interval over samples {sure[0]:.4g} to {sure[1]:.4g}"
            fields["predicted loss"] += f" ({interval})"
        fields["loss note"] = data["predicted_loss_note"]
    fields["written"] = str(data["output"] or "")
    return fields
