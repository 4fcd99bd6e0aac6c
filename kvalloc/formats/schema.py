"""The budget profile's JSON: a pydantic model, its published JSON Schema, and both directions."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError, ProfileFileError
from kvalloc.formats.budget_profile import SCHEMA_VERSION, BudgetProfile
from kvalloc.formats.policy import Policy
from kvalloc.shape import ModelShape

WAY_OUT = "make it again with 'kvalloc solve'"


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class ShapeModel(_Strict):
    """Sizes of the model that the budgets are for."""

    model_id: str
    revision: str | None = None
    n_layers: int = Field(ge=1)
    n_query_heads: int = Field(ge=1)
    n_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=1)
    dtype_bytes: int = Field(ge=1)
    layer_types: list[Literal["full", "sliding"]]
    sliding_window: int | None = None
    max_context_tokens: int | None = None


class PolicyModel(_Strict):
    """How entries are picked within a budget."""

    scorer: str
    scorer_parameters: dict[str, Any]
    sinks: int = Field(ge=0)
    window: int = Field(ge=0)
    name: str = "score"
    parameters: dict[str, Any] = Field(default_factory=dict)
    label: str = Field(default="", description="what it was asked for as, left out where empty")


class RoundModel(_Strict):
    """One round of a refinement; losses in nats per token."""

    round: int = Field(ge=0)
    cost_bytes: int
    predicted: float
    training: float
    held_out: float
    judged: float
    spread: float | None = None
    reach: float
    kept: bool


class RefinementModel(_Strict):
    """What refining measured, with all units at their budgets at once; losses in nats per token."""

    predicted_loss: float = Field(description="on the prompts that the curves were corrected on")
    predicted_interval: list[float]
    measured_loss: float = Field(description="on held-out prompts")
    measured_interval: list[float]
    confidence: float = Field(gt=0, lt=1)
    agrees: bool
    measured_by_task: dict[str, float]
    training_prompts: list[int]
    held_out_prompts: list[int]
    tasks: list[str]
    text_digest: str
    answers_digest: str
    text_description: str
    rounds: list[RoundModel]
    largest_size_beyond_target: int | None = Field(
        default=None, description="bytes: the largest smaller choice beyond the target loss"
    )


class BudgetProfileModel(_Strict):
    """A kvalloc budget profile."""

    schema_version: Literal[1]
    kind: Literal["kvalloc.budget_profile"]
    shape: ShapeModel
    level: Literal["layer", "head"]
    context_tokens: int = Field(ge=1)
    budgets: list[list[int]] = Field(description="entries kept, one row a layer, one column a head")
    bits: list[list[int]] | None = Field(
        default=None,
        description="bits at which each head stores its entries, 16 being the model's own dtype; "
        "left out where all are at 16",
    )
    ranks: list[list[int]] | None = Field(
        default=None, description="rank of each head, one row a layer; -1 in sliding layers"
    )
    length_rule: Literal["proportional", "fixed"]
    page_tokens: int = Field(ge=1)
    policy: PolicyModel
    other_policies: list[PolicyModel] = Field(
        default_factory=list,
        description="policies that single heads have instead; left out where none has",
    )
    unit_policies: list[list[int]] | None = Field(
        default=None,
        description="policy of each head, one row a layer: 0 is policy, k is the k-th of "
        "other_policies; left out where all have policy",
    )
    unit_weights: list[list[list[float]]] | None = Field(
        default=None,
        description="what each policy's scores count in a head's score, one row a layer, policy "
        "first, then other_policies; left out where each head has one policy",
    )
    by_prompt: bool = Field(
        default=False,
        description="each prompt hands out the sum of the budgets by its own scores; left out "
        "where the budgets themselves hold",
    )
    solver: str
    solver_options: dict[str, Any]
    decided_by: str = ""
    detail: str = ""
    sense: Literal["max_value", "min_cost"]
    objective: float
    bound: float | None
    bound_source: str
    gap: float | None
    termination: Literal["", "optimal", "heuristic", "gap_limit", "time_limit"]
    value_per_mib: float | None = Field(default=None, ge=0)
    price_source: str = ""
    requested: dict[str, Any]
    retention: float | None = Field(ge=0, le=1 + 1e-9)
    predicted_loss: float | None = Field(
        default=None,
        description="nats per token, a sum of single-unit measurements, or, with a refinement, "
        "measured; left out where unknown",
    )
    refinement: RefinementModel | None = Field(
        default=None, description="what refining measured; left out where nothing was refined"
    )
    cost_bytes: int | None = Field(
        default=None, description="cost where another one than stored bytes was asked for"
    )
    full_cost_bytes: int | None = None
    share_groups: list[list[int]] = Field(
        default_factory=list, description="layers that keep the same entries; left out where none"
    )
    grouping_bound: float | None = None
    worst_sample_retention: float | None = Field(default=None, ge=0, le=1 + 1e-9)
    batch: int = Field(ge=1)
    retained_tokens: int
    full_tokens: int
    retained_bytes: int
    full_bytes: int
    evaluation: dict[str, Any] | None = Field(
        default=None,
        description="what 'kvalloc eval --into-profile' measured: settings and rows; left out "
        "where nothing was",
    )
    score_digest: str
    problem_digest: str
    versions: dict[str, str]
    created: str
    digest: str


def budget_profile_schema() -> dict[str, Any]:
    """The published JSON Schema of a budget profile file."""
    schema = BudgetProfileModel.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def budget_profile_dict(profile: BudgetProfile) -> dict[str, Any]:
    """Plain values of a budget profile, with its byte accounting and digest."""
    data: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "kind": "kvalloc.budget_profile",
        "shape": profile.shape.to_dict(),
        "level": profile.level,
        "context_tokens": profile.context_tokens,
        "budgets": profile.budgets.tolist(),
        "ranks": None if profile.ranks is None else profile.ranks.tolist(),
        "length_rule": profile.length_rule,
        "page_tokens": profile.page_tokens,
        "policy": profile.policy.record(),
        "solver": profile.solver,
        "solver_options": profile.solver_options,
        "decided_by": profile.decided_by,
        "detail": profile.detail,
        "sense": profile.sense,
        "objective": float(profile.objective),
        "bound": None if profile.bound is None else float(profile.bound),
        "bound_source": profile.bound_source,
        "gap": profile.gap,
        "termination": profile.termination,
        "value_per_mib": profile.value_per_mib,
        "price_source": profile.price_source,
        "requested": profile.requested,
        "retention": profile.retention,
        "batch": profile.batch,
        "retained_tokens": profile.retained_tokens,
        "full_tokens": profile.full_tokens,
        "retained_bytes": profile.retained_bytes,
        "full_bytes": profile.full_bytes,
        "score_digest": profile.score_digest,
        "problem_digest": profile.problem_digest,
        "versions": profile.versions,
        "created": profile.created,
    }
    optional = {
        "predicted_loss": profile.predicted_loss,
        "refinement": profile.refinement,
        "share_groups": [list(group) for group in profile.share_groups] or None,
        "grouping_bound": profile.grouping_bound,
        "worst_sample_retention": profile.worst_sample_retention,
        "cost_bytes": profile.cost_bytes,
        "full_cost_bytes": profile.full_cost_bytes,
        "bits": None if profile.bits is None else profile.bits.tolist(),
        "evaluation": profile.evaluation,
        "other_policies": [other.record() for other in profile.other_policies] or None,
        "unit_policies": None if profile.unit_policies is None else profile.unit_policies.tolist(),
        "unit_weights": None if profile.unit_weights is None else profile.unit_weights.tolist(),
        "by_prompt": profile.by_prompt or None,
    }
    data |= {name: value for name, value in optional.items() if value is not None}
    data["digest"] = _digest(data)
    return data


def budget_profile_json(profile: BudgetProfile) -> str:
    """The file's text: one key a line, one row of budgets a line."""
    data = budget_profile_dict(profile)
    names = ("budgets", "ranks", "bits", "unit_policies", "unit_weights")
    tables = {name: data[name] for name in names if data.get(name) is not None}
    marks = {name: f"ROWS OF {name}" for name in tables}
    text = json.dumps({**data, **marks}, indent=2, sort_keys=True, allow_nan=False)
    for name, rows in tables.items():
        lines = ",\n".join(f"    {json.dumps(row)}" for row in rows)
        text = text.replace(json.dumps(marks[name]), f"[\n{lines}\n  ]")
    return text + "\n"


def budget_profile_from_json(path: str | Path, data: Any) -> BudgetProfile:
    """A checked budget profile from parsed JSON.

    Parameters
    ----------
    path : str or Path
        Named in errors.
    data : object
        What the JSON holds.

    Raises
    ------
    ProfileFileError
        Naming the first field that is wrong.
    """
    if not isinstance(data, dict):
        raise ProfileFileError(
            path,
            field="file",
            found=type(data).__name__,
            expected="a JSON object, a budget profile",
            way_out=WAY_OUT,
        )
    version = data.get("schema_version")
    if version != SCHEMA_VERSION:
        raise ProfileFileError(
            path,
            field="schema_version",
            found=version,
            expected=str(SCHEMA_VERSION),
            way_out=f"{WAY_OUT}, or read it with the kvalloc that wrote it",
        )
    try:
        model = BudgetProfileModel.model_validate(data)
    except ValidationError as error:
        raise _first_validation_error(path, error) from error
    profile = _build(path, model)
    _check_derived(path, model, profile)
    return profile


def _build(path: str | Path, model: BudgetProfileModel) -> BudgetProfile:
    copied = model.model_dump(
        exclude={
            *(
                "schema_version",
                "kind",
                "digest",
                "gap",
                "shape",
                "policy",
                "budgets",
                "share_groups",
                "ranks",
                "bits",
                "other_policies",
                "unit_policies",
                "unit_weights",
            ),
            *("retained_tokens", "full_tokens", "retained_bytes", "full_bytes"),
        }
    )
    try:
        widths = {len(row) for row in model.budgets}
        if len(widths) != 1:
            raise InputError(f"budgets have rows of different lengths {sorted(widths)}")
        return BudgetProfile(
            shape=ModelShape.from_dict(model.shape.model_dump()),
            policy=Policy(**model.policy.model_dump()),
            other_policies=tuple(Policy(**other.model_dump()) for other in model.other_policies),
            unit_policies=_table(model.unit_policies),
            unit_weights=_weights(model.unit_weights),
            budgets=np.asarray(model.budgets, dtype=np.int64),
            bits=_table(model.bits),
            share_groups=tuple(tuple(group) for group in model.share_groups),
            ranks=_table(model.ranks),
            **copied,
        )
    except (InputError, OverflowError, ValueError) as error:
        raise ProfileFileError(
            path, field="content", found=str(error), expected="a sound profile", way_out=WAY_OUT
        ) from error


def _weights(rows: list[list[list[float]]] | None) -> FloatArray | None:
    return None if rows is None else np.asarray(rows, dtype=np.float64)


def _table(rows: list[list[int]] | None) -> IntArray | None:
    return None if rows is None else np.asarray(rows, dtype=np.int64)


def _check_derived(path: str | Path, model: BudgetProfileModel, profile: BudgetProfile) -> None:
    for name in ("retained_tokens", "full_tokens", "retained_bytes", "full_bytes"):
        stated, true = getattr(model, name), getattr(profile, name)
        if stated != true:
            raise ProfileFileError(
                path,
                field=name,
                found=stated,
                expected=f"{true}, which follows from the budgets",
                way_out=WAY_OUT,
            )
    if model.gap != profile.gap:
        raise ProfileFileError(
            path,
            field="gap",
            found=model.gap,
            expected=f"{profile.gap}, which follows from objective and bound",
            way_out=WAY_OUT,
        )
    # Over what the file holds: a field that is younger than the file is not in its digest.
    stated = model.model_dump(mode="json", exclude={"digest"}, exclude_unset=True)
    digest = _digest(stated)
    if model.digest != digest:
        raise ProfileFileError(
            path,
            field="digest",
            found=model.digest,
            expected="the digest of the content (the file was edited or damaged)",
            way_out=WAY_OUT,
        )


def _first_validation_error(path: str | Path, error: ValidationError) -> ProfileFileError:
    first = error.errors()[0]
    return ProfileFileError(
        path,
        field=".".join(str(part) for part in first["loc"]) or "file",
        found="missing" if first["type"] == "missing" else first["input"],
        expected=first["msg"],
        way_out=WAY_OUT,
    )


def _digest(data: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(data, sort_keys=True, allow_nan=False).encode()).hexdigest()
