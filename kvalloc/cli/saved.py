"""What a saved cache holds, told from its header alone: no model and no tensors are read."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from kvalloc.cli.output import duration, model_text, print_fields, print_json, size
from kvalloc.errors import ProfileFileError

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
        profile = replace(profile, context_tokens=prompt, budgets=profile.budgets_for(prompt))
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

    followed = facts["seen_tokens"] - facts["prompt_tokens"]
    after = f", {followed:,} of them after the prompt" if followed else ""
    rows = f" in each of {facts['rows']} rows" if facts["rows"] != 1 else ""
    beside = f"; a full cache takes {size(facts['full_bytes'])}" if alone else ""
    took = facts["read_seconds"]
    policy = profile.policy
    print_fields(
        {
            "saved cache": file,
            "model": model_text(profile.shape),
            **({"document": str(facts["document"])} if facts["document"] else {}),
            "tokens": f"{facts['seen_tokens']:,}{rows}{after}, {facts['dtype']}",
            **({"reading took": duration(took)} if isinstance(took, int | float) else {}),
            "bytes": f"{size(facts['file_bytes'])} on disk{beside}",
            "policy": f"{policy.name} by {policy.scorer}, {policy.sinks} sinks, window "
            f"{policy.window}",
            "ask": f"kvalloc generate MODEL --cache {file} --question TEXT",
        }
    )
    print()
    print("\n".join(budget_picture(profile)))
