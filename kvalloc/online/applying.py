"""Give every ``generate()`` of a model a reduced cache of its own, for a while."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from types import TracebackType
from typing import Any

from torch import Tensor

from kvalloc.errors import UnsupportedModelError, UnsupportedRequestError
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.refusals import check_generate

__all__ = ["Applied", "MakeCache"]

MakeCache = Callable[[int | None], BudgetCache]
"""A new cache for a prompt of that length, where it arrives in several forwards."""

_APPLIED = "_kvalloc_applied"


class Applied:
    """Reduced caches in effect: from now on until `remove`, or until the ``with`` is left.

    Every ``generate()`` gets a fresh cache. A call that brings its own ``past_key_values`` keeps
    it, and so do calls of ``model(...)``, which are left alone. Prompts may be prefilled in chunks
    (``prefill_chunk_size``). Nesting works: the latest one counts, in whichever order they end.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that can generate.
    make : callable
        Makes the caches.

    Attributes
    ----------
    last_cache : BudgetCache or None
        The cache of the latest ``generate()``; None before the first.

    Raises
    ------
    UnsupportedModelError
        If the model cannot generate.
    KVAllocError
        As `make`, which is called once.
    """

    def __init__(self, model: Any, make: MakeCache) -> None:
        generate = getattr(model, "generate", None)
        if generate is None:
            raise UnsupportedModelError(
                f"{type(model).__name__} cannot generate; pass the model with its language-model "
                "head"
            )
        self.last_cache: BudgetCache | None = None
        chunked = _chunk_size(model, {}) is not None
        # Made once, so that what cannot work is refused here; held, so that the hooks stay.
        self._held: BudgetCache | None = make(1 if chunked else None)
        self._model = model
        self._before = vars(model).get("generate", _MISSING)
        model.generate = _reduced(self, model, generate, make)

    @property
    def active(self) -> bool:
        """Whether it is still in effect."""
        return self._held is not None

    def remove(self) -> None:
        """Let the model generate as before; does nothing the second time."""
        if self._held is None:
            return
        self._held = None
        # One that ended earlier, below a later one, is still in the chain: take it out, too.
        current = vars(self._model).get("generate")
        while (applied := getattr(current, _APPLIED, None)) is not None and not applied.active:
            current = applied._before
            if current is _MISSING:
                del self._model.generate
            else:
                self._model.generate = current

    def __enter__(self) -> Applied:
        if not self.active:
            raise UnsupportedRequestError(
                "these budgets have been removed from the model; call kvalloc.apply() again"
            )
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.remove()


_MISSING = object()


def _reduced(
    applied: Applied, model: Any, generate: Callable[..., Any], make: MakeCache
) -> Callable[..., Any]:
    """`generate` with a cache of `make`, while that is in effect."""

    @wraps(generate)
    def reduced_generate(*args: Any, **kwargs: Any) -> Any:
        if not applied.active or kwargs.get("past_key_values") is not None:
            return generate(*args, **kwargs)
        arguments = _named(generate, args, kwargs)
        check_generate(model, arguments)
        ids = _prompt(args, arguments)
        chunked = _chunk_size(model, arguments) is not None
        cache = make(int(ids.shape[1]) if chunked and ids is not None else None)
        if chunked and ids is not None:  # a chunk alone would not show the prompt
            name = "inputs_embeds" if ids.ndim > 2 else "input_ids"
            cache.decide({name: ids, "attention_mask": arguments.get("attention_mask")})
        applied.last_cache = cache
        return generate(*args, **{**kwargs, "past_key_values": cache})

    setattr(reduced_generate, _APPLIED, applied)
    return reduced_generate


def _named(
    generate: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Arguments by name: a generation config often comes second, by its place."""
    try:
        bound = inspect.signature(generate).bind_partial(*args).arguments
    except TypeError:  # more than it takes, which it says better itself
        return kwargs
    return {**bound, **kwargs}


def _chunk_size(model: Any, arguments: dict[str, Any]) -> int | None:
    """Tokens of a prefill chunk, or None where the prompt runs in one piece."""
    sources = [arguments.get("generation_config"), getattr(model, "generation_config", None)]
    if arguments.get("prefill_chunk_size") is not None:
        return int(arguments["prefill_chunk_size"])
    values = (getattr(source, "prefill_chunk_size", None) for source in sources)
    return next((value for value in values if value is not None), None)


def _prompt(args: tuple[Any, ...], arguments: dict[str, Any]) -> Tensor | None:
    """The prompt that ``generate()`` was given, if it can be read off."""
    named = (arguments.get(name) for name in ("inputs_embeds", "inputs", "input_ids"))
    for tensor in (*named, *args[:1]):
        if isinstance(tensor, Tensor) and tensor.ndim >= 2:
            return tensor
    return None
