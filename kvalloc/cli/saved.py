"""What a saved cache holds, told from its header alone: no model and no tensors are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from kvalloc.cli.output import duration, model_text, print_fields, print_json, size
from kvalloc.errors import ProfileFileError

if TYPE_CHECKING:
    from kvalloc.budget_profile import BudgetProfile

IntArray = npt.NDArray[np.int64]

_HEADER = "kvalloc_cache"
_COUNTS = ("batch", "seen_tokens", "prompt_tokens")


def saved_header(path: Path) -> dict[str, Any] | None:
    """The header of a saved cache; None where the file is something else.

    Parameters
    ----------
    path : Path
        Any file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            text = (file.metadata() or {}).get(_HEADER)
    except (SafetensorError, OSError):
        return None  # whoever reads it as something else says what is wrong with it
    if text is None:
        return None
    try:
        header = json.loads(text)
    except (ValueError, RecursionError):
        header = None
    known = {"profile": dict, "dtype": str, **dict.fromkeys(_COUNTS, int)}
    if not isinstance(header, dict) or any(
        not isinstance(header.get(name), kind) for name, kind in known.items()
    ):
        raise ProfileFileError(
            path,
            field="header",
            found="not readable",
            expected="a cache written by cache.save()",
            way_out="read the prompt again and save the cache again",
        )
    return header


def show_saved(file: str, header: dict[str, Any], *, json: bool) -> None:
    """Print what a saved cache holds, its budgets as one bar a layer.

    Parameters
    ----------
    file : str
    header : dict
        From `saved_header`.
    json : bool
        Plain values instead.

    Raises
    ------
    ProfileFileError
        If the budgets in it are no sound budget profile.
    """
    from kvalloc.schema import budget_profile_from_json

    profile = budget_profile_from_json(file, header["profile"])
    notes = header.get("notes") or {}
    alone = header["batch"] == 1  # rows of a batch may be padded, which their number does not tell
    if alone:
        prompt = int(header["prompt_tokens"])
        kept = _handed_out(file, profile) if profile.by_prompt else profile.budgets_for(prompt)
        profile = replace(profile, context_tokens=prompt, budgets=kept)
    facts: dict[str, Any] = {
        "document": notes.get("document"),
        "rows": header["batch"],
        "seen_tokens": header["seen_tokens"],
        "prompt_tokens": header["prompt_tokens"],
        "dtype": header["dtype"],
        "file_bytes": Path(file).stat().st_size,
        "full_bytes": profile.full_bytes_at(int(header["seen_tokens"])) if alone else None,
        "read_seconds": notes.get("read_seconds"),
    }
    if json:
        budgets = {"context_tokens": profile.context_tokens, "budgets": profile.budgets.tolist()}
        print_json({"file": file, "kind": "kvalloc.cache", **facts, **budgets})
        return
    from kvalloc.cli.picture import budget_picture

    print_fields(_fields(file, facts, profile))
    print()
    print("\n".join(budget_picture(profile)))


def _fields(file: str, facts: dict[str, Any], profile: BudgetProfile) -> dict[str, str]:
    """What is told of a saved cache, by its name."""
    from kvalloc.cli.solve import policies_text

    followed = facts["seen_tokens"] - facts["prompt_tokens"]
    after = f", {followed:,} of them after the prompt" if followed else ""
    rows = f" in each of {facts['rows']} rows" if facts["rows"] != 1 else ""
    full, took = facts["full_bytes"], facts["read_seconds"]
    beside = f"; a full cache takes {size(full)}" if full is not None else ""
    policy, chosen = profile.policy, policies_text(profile)
    return {
        "saved cache": file,
        "model": model_text(profile.shape),
        **({"document": str(facts["document"])} if facts["document"] else {}),
        "tokens": f"{facts['seen_tokens']:,}{rows}{after}, {facts['dtype']}",
        **({"reading took": duration(took)} if isinstance(took, int | float) else {}),
        "bytes": f"{size(facts['file_bytes'])} on disk{beside}",
        "policy": f"{policy.name} by {policy.scorer}, {policy.sinks} sinks, window {policy.window}",
        **({"chosen": chosen} if chosen else {}),
        "ask": f"kvalloc generate MODEL --cache {file} --question TEXT",
    }


def _handed_out(file: str, profile: BudgetProfile) -> IntArray:
    """What each KV head really keeps of one prompt that handed its entries out itself.

    The budgets of such a profile are what heads had in the mean over other prompts.
    """
    from safetensors import safe_open

    kept = profile.budgets.copy()
    with safe_open(file, framework="numpy") as tensors:
        known = set(tensors.keys())
        for layer in profile.shape.full_layers:
            if f"{layer}.lengths" in known:
                kept[layer] = tensors.get_tensor(f"{layer}.lengths")[0]
            elif f"{layer}.keys" in known:  # all heads of the layer happen to keep the same
                kept[layer] = tensors.get_slice(f"{layer}.keys").get_shape()[2]
    return kept
