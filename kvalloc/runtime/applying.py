"""Give every ``generate()`` inside a ``with`` a reduced cache of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any

from torch import Tensor

from kvalloc.budget_profile import BudgetProfile, Policy
from kvalloc.errors import UnsupportedModelError
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.making import make_cache
from kvalloc.runtime.refusals import check_generate

__all__ = ["Applied", "apply"]


class Applied:
    """What ``with apply(...) as applied`` gives.

    Attributes
    ----------
    last_cache : BudgetCache or None
        The cache of the latest ``generate()`` inside the ``with``; None before the first.
    """

    def __init__(self) -> None:
        self.last_cache: BudgetCache | None = None


@contextmanager
def apply(
    model: Any,
    profile: BudgetProfile,
    *,
    allow_other_model: bool = False,
    policy: str | Policy | None = None,
    policy_options: Mapping[str, Any] | None = None,
    decode_every: int | None = None,
) -> Iterator[Applied]:
    """Inside the ``with``, each ``model.generate()`` reduces its prompt to the profile's budgets.

    Every call gets a fresh cache. A call that brings its own ``past_key_values`` keeps it, and
    so do calls of ``model(...)``, which are left alone. Prompts may be prefilled in chunks
    (``prefill_chunk_size``). Nesting works: the innermost profile counts.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        A model that can generate.
    profile : BudgetProfile
        Budgets made for this model.
    allow_other_model : bool
        Accept a model of another name with the same sizes.
    policy, policy_options, decode_every : optional
        As for `make_cache`: how the entries are picked, and whether the budget is kept while
        decoding.

    Yields
    ------
    Applied
        Its ``last_cache`` tells what the latest call stored.

    Raises
    ------
    KVAllocError
        As `make_cache`, already on entering.
    """
    generate = getattr(model, "generate", None)
    if generate is None:
        raise UnsupportedModelError(
            f"{type(model).__name__} cannot generate; pass the model with its language-model head"
        )
    # Made once on entering, so that a profile that cannot work is refused here; held, so that the
    # hooks stay for all calls.
    chunked = _chunk_size(model, {}) is not None
    options: dict[str, Any] = {
        "allow_other_model": allow_other_model,
        "policy": policy,
        "policy_options": policy_options,
        "decode_every": decode_every,
    }
    held = make_cache(profile, model, prompt_tokens=1 if chunked else None, **options)
    applied = Applied()

    @wraps(generate)
    def reduced_generate(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("past_key_values") is not None:
            return generate(*args, **kwargs)
        check_generate(model, kwargs)
        tokens = _prompt_tokens(args, kwargs) if _chunk_size(model, kwargs) else None
        cache = make_cache(profile, model, prompt_tokens=tokens, **options)
        applied.last_cache = cache
        return generate(*args, **{**kwargs, "past_key_values": cache})

    with _replaced_generate(model, reduced_generate):
        yield applied
    del held


@contextmanager
def _replaced_generate(model: Any, function: Callable[..., Any]) -> Iterator[None]:
    missing = object()
    before = vars(model).get("generate", missing)
    model.generate = function
    try:
        yield
    finally:
        if before is missing:
            del model.generate
        else:
            model.generate = before


def _chunk_size(model: Any, arguments: dict[str, Any]) -> int | None:
    """Tokens of a prefill chunk, or None where the prompt runs in one piece."""
    sources = [arguments.get("generation_config"), getattr(model, "generation_config", None)]
    if arguments.get("prefill_chunk_size") is not None:
        return int(arguments["prefill_chunk_size"])
    values = (getattr(source, "prefill_chunk_size", None) for source in sources)
    return next((value for value in values if value is not None), None)


def _prompt_tokens(args: tuple[Any, ...], arguments: dict[str, Any]) -> int | None:
    """Length of the prompt that ``generate()`` was given, if it can be read off."""
    named = (arguments.get(name) for name in ("inputs_embeds", "inputs", "input_ids"))
    for tensor in (*args[:1], *named):
        if isinstance(tensor, Tensor) and tensor.ndim >= 2:
            return int(tensor.shape[1])
    return None
