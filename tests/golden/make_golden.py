"""Write the golden files of the core anew, after a change of behaviour that is wanted.

    python tests/golden/make_golden.py

Then look at the difference before committing it: every changed number is a changed answer. The
score profiles are given: of these the form alone is written anew.
"""

from __future__ import annotations

import hashlib
import json
import pkgutil
import sys
from pathlib import Path
from typing import Any

import numpy as np

import kvalloc

DATA = Path(__file__).parent / "data"
SCORES = DATA / "scores.safetensors"
DECISIONS = DATA / "decisions.json"
MEASURED = DATA / "measured.safetensors"  # the same with loss curves
PROFILE = DATA / "budget_profile.json"
DOCS = Path(__file__).parents[2] / "docs"
SCHEMAS = {
    "budget_profile": "kvalloc.formats.budget_profile:BudgetProfile",
    "evaluation": "kvalloc.formats.evaluation:Evaluation",
    "fitted_file": "kvalloc.formats.fitted:FittedHeader",
    "score_profile": "kvalloc.formats.score_profile:ScoreHeader",
}
"""Files docs/NAME.schema.json, and the types that they describe."""

VERSIONS = DATA / "versions.json"
"""By format and schema version: a file that has to load, the digest of the schema, and the kvalloc
that first came out with it, if one has; from then on neither changes."""

FORMATS = {
    "budget profile": ("kvalloc.formats.budget_profile:BudgetProfile", "load", "budgets.json"),
    "evaluation": ("kvalloc.formats.evaluation:Evaluation", "load", "evaluation.json"),
    "fitted file": ("kvalloc.formats.fitted:FittedModel", "load", "fitted.safetensors"),
    "score profile": ("kvalloc.formats.score_profile:ScoreProfile", "load", "scores.safetensors"),
    "saved cache": ("kvalloc.formats.saved_cache:SavedCacheHeader", "read", "cache.safetensors"),
}
"""Who reads a file of each format, how, and the file's name below a folder of its version."""

BITS = DATA / "loss_bits.safetensors"  # with loss curves at several widths
BITS_DECISIONS = DATA / "decisions_bits.json"
BITS_PROFILE = DATA / "budget_profile_bits.json"
PROFILE_CASE = "greedy, retention 0.9, head"
BITS_PROFILE_CASE = "loss of entries and bits, 15%, head"

BITS_CASES: dict[str, dict[str, Any]] = {
    "loss of entries and bits, 15%, head": {"budget": "15%", "level": "head", "bits": (16, 8, 4)},
    "loss of entries and bits, 15%, layer": {"budget": "15%", "bits": (8, 4)},
    "entries and bits for a loss of 0.2": {
        **{"target_loss": 0.2, "level": "head", "bits": (16, 8, 4), "page": 4}
    },
}

# name of the case: arguments of solve
CASES: dict[str, dict[str, Any]] = {
    f"{name}, {goal}, {level}": {"solver": solver, "level": level, **target}
    for name, solver in (
        *((name, name) for name in ("greedy", "ilp", "uniform", "pyramid", "adaptive_head")),
        ("adaptive_head floor", "adaptive_head:safeguard=floor:alpha=0.5"),
    )
    for goal, target in (
        ("20%", {"budget": "20%"}),
        ("retention 0.9", {"target_retention": 0.9}),
        ("30 tokens in pages of 8", {"budget_tokens": 30, "page": 8}),
    )
    for level in (["head"] if solver.startswith("adaptive_head") else ["layer", "head"])
}

# of the profile with loss curves
MEASURED_CASES: dict[str, dict[str, Any]] = {
    f"{name}, {level}": {**arguments, "level": level, "solver": "dp"}
    for name, arguments in (
        ("loss 0.1", {"target_loss": 0.1}),
        ("least loss in 30%", {"budget": "30%", "objective": "loss"}),
    )
    for level in ("layer", "head")
}


SETS: tuple[tuple[Path, Path, dict[str, dict[str, Any]]], ...] = (
    (SCORES, DECISIONS, CASES),
    (MEASURED, DECISIONS, MEASURED_CASES),
    (BITS, BITS_DECISIONS, BITS_CASES),
)
"""A score profile, the file of what is decided from it, and arguments of ``solve`` by case."""


def described(profile: Any) -> dict[str, Any]:
    """What must not move: the decision and what is claimed about it, as JSON has it."""
    optional = {name: getattr(profile, name) for name in ("predicted_loss", "bits")}
    kept = ("budgets", "objective", "bound", "retention", "retained_bytes", "termination")
    found = {name: value for name, value in optional.items() if value is not None}
    found |= {name: getattr(profile, name) for name in kept}
    found["budgets at 1000"] = profile.budgets_for(1000)
    return json.loads(json.dumps(found, default=np.ndarray.tolist))


def published_schema(name: str) -> dict[str, Any]:
    """The JSON Schema of a file, or of its header, each field with its docstring."""
    from kvalloc.formats.budget_profile import Policy
    from kvalloc.shape import ModelShape
    from kvalloc.units import field_texts

    owner = pkgutil.resolve_name(SCHEMAS[name])
    schema: dict[str, Any] = owner.model_json_schema(mode="serialization")
    parts = schema.get("$defs", {})
    for part, of in (
        (schema, owner),
        *((parts[one.__name__], one) for one in (ModelShape, Policy) if one.__name__ in parts),
    ):
        for field, text in field_texts(of).items():
            if field in part["properties"]:
                part["properties"][field]["description"] = text
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


def schema_of(name: str) -> tuple[str, str]:
    """A format's schema version, and the digest of its JSON Schema without any description."""
    owner = pkgutil.resolve_name(SCHEMAS.get(name.replace(" ", "_"), FORMATS[name][0]))

    def plain(part: Any) -> Any:
        if isinstance(part, dict):
            said = ("description", "title") if "type" in part or "$ref" in part else ()
            return {key: plain(each) for key, each in part.items() if key not in said}
        return [plain(each) for each in part] if isinstance(part, list) else part

    text = json.dumps(plain(owner.model_json_schema(mode="serialization")), sort_keys=True)
    version = owner.model_fields["schema_version"].default
    return str(version), hashlib.sha256(text.encode()).hexdigest()


def registered(known: dict[str, Any]) -> dict[str, Any]:
    """The registry with the versions that are written now; what has come out stays as it is."""
    found: dict[str, Any] = {}
    for name, (_, _, file) in FORMATS.items():
        version, digest = schema_of(name)
        found[name] = {key: own for key, own in known.get(name, {}).items() if own["released"]}
        came_out = found[name].get(version)
        if came_out is None:
            place = f"version_{version}/{file}"
            found[name][version] = {"file": place, "schema": digest, "released": None}
        elif came_out["schema"] != digest:
            raise SystemExit(
                f"the schema of a {name} is another than kvalloc {came_out['released']} came out "
                f"with: raise its schema_version, which is {version}"
            )
    return found


def is_read(name: str, path: Path) -> bool:
    """Whether the reader of a format takes a file."""
    reader, method, _ = FORMATS[name]
    try:
        getattr(pkgutil.resolve_name(reader), method)(path)
    except kvalloc.KVAllocError:
        return False
    return True


def write_file(name: str, path: Path) -> None:
    """A small file of a format, as it is written now."""
    import runtime_oracle as tiny
    from factories import make_evaluation

    from kvalloc import fit
    from kvalloc.prompts.texts import Prompt

    path.parent.mkdir(exist_ok=True)
    model = tiny.tiny_model()
    if name == "budget profile":
        kvalloc.solve(SCORES, **CASES[PROFILE_CASE]).save(path)
    elif name == "score profile":
        kvalloc.load_scores(SCORES).save(path)
    elif name == "evaluation":
        make_evaluation().save(path)
    elif name == "fitted file":
        prompts = [Prompt(token_ids=tuple(tiny.prompt(60, seed=i)[0].tolist())) for i in range(4)]
        fit(model, None, prompts, output=path, context=60, samples=4)
    else:
        cache = kvalloc.make_cache(model, tiny.make_profile(model, 20, 0.5))
        model(tiny.prompt(20), past_key_values=cache)
        kvalloc.save_cache(cache, path)


def main() -> None:
    sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
    files: dict[Path, dict[str, Any]] = {}
    for scores, path, cases in SETS:
        kvalloc.load_scores(scores).save(scores)
        decided = {case: described(kvalloc.solve(scores, **cases[case])) for case in cases}
        files.setdefault(path, {}).update(decided)
    for path, decisions in files.items():
        rows = ",\n".join(
            f" {json.dumps(case)}: {json.dumps(decisions[case])}" for case in decisions
        )
        path.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    kvalloc.solve(SCORES, **CASES[PROFILE_CASE]).save(PROFILE)
    kvalloc.solve(BITS, **BITS_CASES[BITS_PROFILE_CASE]).save(BITS_PROFILE)
    known = json.loads(VERSIONS.read_text(encoding="utf-8"))
    registry = registered(known)
    for name, versions in registry.items():
        for version, own in versions.items():
            # New, or not out yet and changed.
            if known.get(name, {}).get(version) != own or not is_read(name, DATA / own["file"]):
                write_file(name, DATA / own["file"])
    VERSIONS.write_text(json.dumps(registry, indent=1) + "\n", encoding="utf-8")
    for name in SCHEMAS:
        text = json.dumps(published_schema(name), indent=1, sort_keys=True)
        (DOCS / f"{name}.schema.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
