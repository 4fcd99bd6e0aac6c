"""A document in a cache: read by the model, or loaded from a file that an earlier run saved."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvalloc.cli.form import Form
from kvalloc.cli.granted import granted_fields, kept_text
from kvalloc.cli.output import duration
from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A document that questions can be asked about.

    Attributes
    ----------
    loaded : LoadedModel
    cache : transformers.Cache
        Holds the document.
    form : Form
        What stands around questions and answers.
    name : str
        Of the document, for people.
    tokens : int
        Of the document, all that stands in front of it included.
    retained_bytes, full_bytes : int
        Stored now, and by a full cache.
    read_seconds : float or None
        What reading took, now or when it was saved; None where that was not noted.
    load_seconds : float or None
        What loading took; None where it was read.
    decision_seconds : float or None
        How much of reading was deciding the budgets; None where they were stored.
    """

    loaded: LoadedModel
    cache: Any
    form: Form
    name: str
    tokens: int
    retained_bytes: int
    full_bytes: int
    read_seconds: float | None
    load_seconds: float | None = None
    decision_seconds: float | None = None

    def summary(self) -> str:
        """What was read or loaded, and what it takes, on one line."""
        if self.load_seconds is None:
            assert self.read_seconds is not None  # it was read just now
            how = f"read in {duration(self.read_seconds)}"
            if self.decision_seconds is not None:
                how += f", {duration(self.decision_seconds)} of it to decide the budgets"
        else:
            how = f"loaded in {duration(self.load_seconds)}"
            if self.read_seconds is not None:
                times = self.read_seconds / self.load_seconds
                how += f" (reading it took {duration(self.read_seconds)}, {times:,.0f}x as long)"
        kept = kept_text(self.cache, retained_bytes=self.retained_bytes, full_bytes=self.full_bytes)
        return f"{self.name}: {self.tokens:,} tokens {how}; cache {kept}"

    def as_dict(self) -> dict[str, Any]:
        """The same as plain values."""
        return {
            "document": self.name,
            "document_tokens": self.tokens,
            **granted_fields(self.cache, self.tokens),
            "retained_bytes": self.retained_bytes,
            "full_bytes": self.full_bytes,
            "read_seconds": self.read_seconds,
            "load_seconds": self.load_seconds,
            "decision_seconds": self.decision_seconds,
        }


def read_document(
    loaded: LoadedModel, text: str, name: str, form: Form, cache: Any, *, room_tokens: int
) -> Reading:
    """Let the model read a document into a cache.

    Parameters
    ----------
    loaded : LoadedModel
    text, name : str
        The document, and how it is called.
    form : Form
    cache : transformers.Cache
        An empty one.
    room_tokens : int
        What the longest question and its answer need after it.

    Raises
    ------
    InputError
        If the model's context has no room for all that; nothing has run then.
    """
    import torch

    from kvalloc.models.quiet import quiet_transformers

    ids = form.document_ids(loaded.tokenizer, text)
    check_room(loaded, int(ids.size), room_tokens)
    device = loaded.model.get_input_embeddings().weight.device
    start = time.perf_counter()
    with torch.no_grad(), quiet_transformers():
        loaded.model(
            input_ids=torch.from_numpy(ids)[None].to(device),
            past_key_values=cache,
            logits_to_keep=1,
        )
    return Reading(
        loaded=loaded,
        cache=cache,
        form=form,
        name=name,
        tokens=int(ids.size),
        read_seconds=time.perf_counter() - start,
        decision_seconds=getattr(cache, "decision_seconds", None),
        **_account(loaded, cache),
    )


def load_document(
    loaded: LoadedModel, path: Path, *, chat: bool | None, allow_other_model: bool
) -> Reading:
    """Take a document from a file that `save_document` wrote.

    Parameters
    ----------
    loaded : LoadedModel
    path : Path
    chat : bool or None
        Whether to go on in the model's chat form; as it was saved by default.
    allow_other_model : bool
        Accept other weights of the same sizes.

    Raises
    ------
    KVAllocError
        If the file is missing, damaged, of another model, or holds several rows.
    """
    from kvalloc.runtime.loading import load_cache, saved_notes

    notes = saved_notes(path)
    form = Form.of(
        loaded.tokenizer, loaded.model_id, bool(notes.get("chat")) if chat is None else chat
    )
    start = time.perf_counter()
    cache = load_cache(path, loaded.model, allow_other_model=allow_other_model)
    seconds = time.perf_counter() - start
    if cache.batch != 1:
        raise InputError(
            f"{path} holds {cache.batch} texts at once, and questions are about one; save a cache "
            "of one"
        )
    noted = notes.get("read_seconds")
    return Reading(
        loaded=loaded,
        cache=cache,
        form=form,
        name=str(notes.get("document") or path),
        tokens=int(cache.get_seq_length()),
        read_seconds=float(noted) if isinstance(noted, int | float) else None,
        load_seconds=seconds,
        **_account(loaded, cache),
    )


def save_document(reading: Reading, path: Path, *, chat: bool) -> int:
    """Save a document that was read; returns the bytes of the file."""
    from kvalloc.runtime.saving import save_cache

    notes = {
        "document": reading.name,
        "read_seconds": reading.read_seconds,
        "chat": chat,
    }
    save_cache(reading.cache, path, notes=notes)
    return path.stat().st_size


def check_room(loaded: LoadedModel, document_tokens: int, room_tokens: int) -> None:
    """Refuse a document after which questions have no room.

    Raises
    ------
    InputError
    """
    from kvalloc.models.loading import shape_of

    limit = shape_of(loaded.model, model_id=loaded.model_id).max_context_tokens
    if limit is not None and document_tokens + room_tokens > limit:
        raise InputError(
            f"a document of {document_tokens:,} tokens leaves no room for a question and its "
            f"answer, {room_tokens:,} tokens, within the {limit:,} of {loaded.model_id}; shorten "
            "the document, the question or --max-new-tokens"
        )


def _account(loaded: LoadedModel, cache: Any) -> dict[str, int]:
    from kvalloc.evaluate.caches import full_bytes, stored_bytes
    from kvalloc.models.loading import shape_of

    shape = shape_of(loaded.model, model_id=loaded.model_id)
    return {
        "retained_bytes": stored_bytes(cache),
        "full_bytes": full_bytes(cache, shape),
    }
