"""What a saved cache holds, told from its header alone: no model and no tensors are read."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalloc.accounting import IntArray
from kvalloc.cli.output import duration, model_text, print_fields, print_json, size
from kvalloc.formats.saved_cache import opened

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile


def show_saved(file: str, header: dict[str, Any], *, json: bool) -> None:
    """Print what a saved cache holds, its budgets as one bar a layer.

    Parameters
    ----------
    file : str
    header : dict
        From `kvalloc.formats.saved_cache.read_header`.
    json : bool
        Plain values instead.

    Raises
    ------
    ProfileFileError
        If the budgets in it are no sound budget profile.
    """
    from kvalloc.formats.schema import budget_profile_from_json

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
        "bits": None if profile.bits is None else profile.bits.tolist(),
        "share_groups": [list(group) for group in profile.share_groups],
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
    from kvalloc.cli.solve import bits_text, policies_text
    from kvalloc.formats.sharing_groups import shared_text

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
        **({} if profile.bits is None else {"bits": bits_text(profile)}),
        **({"sharing": shared_text(profile.share_groups)} if profile.share_groups else {}),
        "policy": f"{policy.name} by {policy.scorer}, {policy.sinks} sinks, window {policy.window}",
        **({"chosen": chosen} if chosen else {}),
        "ask": f"kvalloc generate MODEL --cache {file} --question TEXT",
    }


def _handed_out(file: str, profile: BudgetProfile) -> IntArray:
    """What each KV head really keeps of one prompt that handed its entries out itself.

    The budgets of such a profile are what heads had in the mean over other prompts.
    """
    kept = profile.budgets.copy()
    with opened(file, "numpy") as tensors:
        known = set(tensors.keys())
        for layer in profile.shape.full_layers:
            if f"{layer}.lengths" in known:
                kept[layer] = tensors.get_tensor(f"{layer}.lengths")[0]
            elif f"{layer}.keys" in known:  # all heads of the layer happen to keep the same
                kept[layer] = tensors.get_slice(f"{layer}.keys").get_shape()[2]
    return kept
