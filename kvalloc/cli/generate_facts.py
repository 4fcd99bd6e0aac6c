"""What a cache of ``kvalloc generate`` holds, and what a prompt may be, as values and as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvalloc.allocation.request import Target
from kvalloc.cli.output import SLID_OUT, note, size
from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.models.loading import LoadedModel


def wants_chat(loaded: LoadedModel, chat: bool | None) -> bool:
    """Whether the model's chat form is used; where it has one by default.

    Raises
    ------
    InputError
        If it is wanted and there is none.
    """
    has_form = bool(getattr(loaded.tokenizer, "chat_template", None))
    if chat and not has_form:
        raise InputError(f"{loaded.model_id} has no chat form; leave out --chat")
    return has_form if chat is None else chat


def context_limit(loaded: LoadedModel) -> int | None:
    """The longest context of a model, tokens; None if it does not say."""
    from kvalloc.models.loading import shape_of

    return shape_of(loaded.model, model_id=loaded.model_id).max_context_tokens


def device_of(loaded: LoadedModel) -> Any:
    """Where a model wants its tokens."""
    return loaded.model.get_input_embeddings().weight.device


def bytes_of(loaded: LoadedModel, cache: Any) -> dict[str, int]:
    """What a cache stores now, and what a full one would."""
    from kvalloc.evaluate.caches import full_bytes, stored_bytes
    from kvalloc.models.loading import shape_of

    shape = shape_of(loaded.model, model_id=loaded.model_id)
    return {"retained_bytes": stored_bytes(cache), "full_bytes": full_bytes(cache, shape)}


def policies_of(cache: Any) -> dict[str, Any]:
    """Who picks the entries of a reduced cache."""
    profile = getattr(cache, "profile", None)
    if profile is None:
        return {"policy": None, "scorer": None, "other_policies": []}
    others = [policy.title for policy in profile.other_policies]
    own = profile.policy
    return {"policy": own.name, "scorer": own.scorer, "other_policies": others}


def note_short(cache: Any, n_tokens: int, *, quiet: bool) -> None:
    """Say so where a prompt was too short to be reduced."""
    if not getattr(cache, "reduced", True):
        note(
            f"note: of a prompt of {n_tokens:,} token{'s' if n_tokens > 1 else ''} these budgets "
            "leave nothing out: everything is kept",
            quiet=quiet,
        )


def _decided_here(cache: Any) -> BudgetProfile | None:
    """Budgets that were decided for this prompt; None of stored ones and of a full cache."""
    decided = getattr(cache, "decision_seconds", None) is not None
    return getattr(cache, "profile", None) if decided else None


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
    profile: BudgetProfile | None = getattr(cache, "profile", None)
    decided = _decided_here(cache)
    requested = {} if decided is None else decided.requested
    known = {name: requested[name] for name in ("target", "value", "adapt") if name in requested}
    return {
        "requested": None if decided is None else known,
        "retention": None if decided is None else decided.retention,
        "granted_bytes": None if profile is None else profile.retained_bytes_at(prompt_tokens),
    }


def kept_text(cache: Any, retained_bytes: int, full_bytes: int) -> str:
    """How much of a prompt is kept, and how much was asked for, in a few words.

    Parameters
    ----------
    cache : transformers.Cache
        After the prompt.
    retained_bytes, full_bytes : int
        Of the prompt alone, stored and by a full cache.
    """
    share = f"{retained_bytes / full_bytes:.1%}"
    granted = _granted_text(cache, share)
    beside = f"{share}; {granted}" if granted else share
    since = f", since {SLID_OUT}" if retained_bytes > full_bytes else ""  # a full cache
    return f"{size(retained_bytes)} of {size(full_bytes)} ({beside}){since}"


def _granted_text(cache: Any, share: str) -> str:
    profile: BudgetProfile | None = getattr(cache, "profile", None)
    if profile is None:
        return ""
    if _decided_here(cache) is None or "adapt" in profile.requested:
        # Budgets that were decided at one length have another share at others: sinks and window
        # weigh more in a short prompt.
        elsewhere = f"{profile.retained_bytes / profile.full_bytes:.1%}"
        same = elsewhere == share
        return "" if same else f"the profile: {elsewhere} of {profile.context_tokens:,} tokens"
    wanted = Target.read(profile.requested)
    known = wanted.needed_value is not None and profile.retention is not None
    reached = f"retention {profile.retention:.4f}, " if known else ""
    return f"{reached}asked for {wanted.describe('retention')}"
