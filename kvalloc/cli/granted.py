"""What was asked of a cache for its prompt, beside what it keeps."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvalloc.cli.output import SLID_OUT, size

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile


def granted_fields(cache: Any, prompt_tokens: int) -> dict[str, Any]:
    """What was asked for as plain values, for ``--json``; all None of a full cache.

    Parameters
    ----------
    cache : transformers.Cache
        After the prompt.
    prompt_tokens : int

    Returns
    -------
    dict
        ``requested``: the target of budgets that were decided for this prompt; ``retention``:
        what they reach of it, where that is known; ``granted_bytes``: what the budgets allow a
        prompt of this length.
    """
    profile = _profile(cache)
    decided = profile if profile is not None and _decided_here(cache) else None
    return {
        "requested": None if decided is None else _target(decided),
        "retention": None if decided is None else decided.retention,
        "granted_bytes": None if profile is None else profile.retained_bytes_at(prompt_tokens),
    }


def kept_text(cache: Any, *, retained_bytes: int, full_bytes: int) -> str:
    """How much of a prompt is kept, and how much was asked for, in a few words.

    Parameters
    ----------
    cache : transformers.Cache
        After the prompt.
    retained_bytes, full_bytes : int
        Of the prompt alone, stored and by a full cache.
    """
    share = f"{retained_bytes / full_bytes:.1%}"
    asked = _asked(cache, share)
    told = f"{share}; {asked}" if asked else share
    since = f", since {SLID_OUT}" if retained_bytes > full_bytes else ""  # a full cache
    return f"{size(retained_bytes)} of {size(full_bytes)} ({told}){since}"


def _profile(cache: Any) -> BudgetProfile | None:
    return getattr(cache, "profile", None)


def _decided_here(cache: Any) -> bool:
    return getattr(cache, "decision_seconds", None) is not None


def _target(profile: BudgetProfile) -> dict[str, Any]:
    known = ("target", "value", "adapt")
    return {name: profile.requested[name] for name in known if name in profile.requested}


def _asked(cache: Any, share: str) -> str:
    profile = _profile(cache)
    if profile is None:
        return ""
    target = profile.requested.get("target")
    if not _decided_here(cache) or "adapt" in profile.requested or target is None:
        # Budgets that were decided at one length have another share at others: sinks and window
        # weigh more in a short prompt.
        elsewhere = f"{profile.retained_bytes / profile.full_bytes:.1%}"
        same = elsewhere == share
        return "" if same else f"the profile: {elsewhere} of {profile.context_tokens:,} tokens"
    value = profile.requested["value"]
    if target == "retention":
        reached = "" if profile.retention is None else f"retention {profile.retention:.4f}, "
        return f"{reached}asked for {value:g} in the fewest bytes"
    text = {
        "budget": f"{100 * value:g}%",
        "budget_tokens": f"{value:,} tokens per KV head",
        "memory": size(value),
    }[str(target)]
    return f"asked for {text} at most"
