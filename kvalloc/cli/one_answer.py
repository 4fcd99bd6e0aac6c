"""One prompt, one answer, as the model's own ``generate()`` gives it."""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvalloc.cli.granted import granted_fields, kept_text
from kvalloc.cli.output import duration, size
from kvalloc.cli.progress import slow
from kvalloc.errors import InputError

if TYPE_CHECKING:
    from kvalloc.models.loading import LoadedModel


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What generating gave; seconds per token are None where no second token came.

    Bytes of the prompt are those right after it, the others those at the end, both of what is
    stored and of what a full cache needs.
    """

    text: str
    prompt_tokens: int
    new_tokens: int
    prompt_retained_bytes: int
    prompt_full_bytes: int
    retained_bytes: int
    full_bytes: int
    prefill_seconds: float
    decision_seconds: float | None
    decode_tokens_per_second: float | None


def tokenise(loaded: LoadedModel, text: str, chat: bool | None) -> Any:
    """A prompt's tokens, in the model's chat form where that is wanted.

    Raises
    ------
    InputError
        If the model has no chat form and it is wanted.
    """
    tokenizer = loaded.tokenizer
    has_template = bool(getattr(tokenizer, "chat_template", None))
    if chat and not has_template:
        raise InputError(f"{loaded.model_id} has no chat form; leave out --chat")
    if has_template if chat is None else chat:
        written = tokenizer.apply_chat_template(
            [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
        )
        # the template writes the special tokens
        inputs = tokenizer(written, return_tensors="pt", add_special_tokens=False)
    else:
        inputs = tokenizer(text, return_tensors="pt")
    device = loaded.model.get_input_embeddings().weight.device
    return {name: inputs[name].to(device) for name in ("input_ids", "attention_mask")}


def check_length(loaded: LoadedModel, n_tokens: int, max_new_tokens: int) -> None:
    """Refuse a prompt without tokens, or beyond the model's context.

    Raises
    ------
    InputError
    """
    from kvalloc.models.loading import shape_of

    if n_tokens < 1:
        raise InputError("the prompt has no tokens; give some text")
    limit = shape_of(loaded.model, model_id=loaded.model_id).max_context_tokens
    if limit is not None and n_tokens + max_new_tokens > limit:
        raise InputError(
            f"a prompt of {n_tokens:,} tokens and an answer of up to {max_new_tokens:,} are beyond "
            f"the {limit:,} tokens of {loaded.model_id}; shorten the prompt or --max-new-tokens"
        )


def answer_prompt(
    loaded: LoadedModel,
    inputs: Any,
    cache: Any,
    max_new_tokens: int,
    *,
    stream: bool,
    quiet: bool,
) -> Answer:
    """Generate with a cache, the most likely token each time, and measure it."""
    from kvalloc.evaluate.caches import full_bytes, stored_bytes
    from kvalloc.models.loading import shape_of
    from kvalloc.models.quiet import quiet_transformers

    n_tokens = int(inputs["input_ids"].shape[1])
    with ExitStack() as waiting, quiet_transformers():
        waiting.enter_context(slow("reading the prompt", quiet=quiet))
        clock = _clock(loaded.tokenizer, cache, stream=stream, waiting=waiting)
        try:
            ids = loaded.model.generate(
                **inputs,
                past_key_values=cache,
                do_sample=False,
                max_new_tokens=max_new_tokens,
                streamer=clock,
            )
        except KeyboardInterrupt:
            clock.end()  # what is said next gets a line of its own
            raise
    new = ids[0, n_tokens:]
    shape = shape_of(loaded.model, model_id=loaded.model_id)
    first, last = clock.seconds[1], clock.seconds[-1]
    steps = len(clock.seconds) - 2
    return Answer(
        text=loaded.tokenizer.decode(new, skip_special_tokens=True),
        prompt_tokens=n_tokens,
        new_tokens=int(new.shape[0]),
        prompt_retained_bytes=clock.prompt_retained_bytes,
        prompt_full_bytes=shape.full_bytes(n_tokens),
        retained_bytes=stored_bytes(cache),
        full_bytes=full_bytes(cache, shape),
        prefill_seconds=first - clock.seconds[0],
        decision_seconds=getattr(cache, "decision_seconds", None),
        decode_tokens_per_second=steps / (last - first) if steps > 0 else None,
    )


def _clock(tokenizer: Any, cache: Any, *, stream: bool, waiting: ExitStack) -> Any:
    """A streamer that notes when tokens came, and prints the answer as it grows if wanted.

    With the first token the waiting is over.
    """
    from transformers import TextStreamer

    from kvalloc.evaluate.caches import stored_bytes

    class Clock(TextStreamer):
        seconds: list[float]
        prompt_retained_bytes: int

        def put(self, value: Any) -> None:
            self.seconds.append(time.perf_counter())
            if len(self.seconds) == 2:  # the first token is chosen and has not been run
                waiting.close()
                self.prompt_retained_bytes = stored_bytes(cache)
            if stream:
                super().put(value)  # type: ignore[no-untyped-call]

        def end(self) -> None:
            if stream:
                super().end()  # type: ignore[no-untyped-call]

    clock = Clock(tokenizer, skip_prompt=True, skip_special_tokens=True)
    clock.seconds = []
    return clock


def as_json(answer: Answer, loaded: LoadedModel, profile: str | None, cache: Any) -> dict[str, Any]:
    """An answer as plain values, for ``--json``."""
    return {
        "model": loaded.model_id,
        "profile": profile,
        **policy_names(cache),
        "answer": answer.text,
        "prompt_tokens": answer.prompt_tokens,
        "new_tokens": answer.new_tokens,
        **granted_fields(cache, answer.prompt_tokens),
        "prompt_retained_bytes": answer.prompt_retained_bytes,
        "prompt_full_bytes": answer.prompt_full_bytes,
        "retained_bytes": answer.retained_bytes,
        "full_bytes": answer.full_bytes,
        "prefill_seconds": answer.prefill_seconds,
        "decision_seconds": answer.decision_seconds,
        "decode_tokens_per_second": answer.decode_tokens_per_second,
    }


def summary(answer: Answer, cache: Any) -> list[str]:
    """What an answer took, and what was kept for it, for people."""
    speed = ""
    if answer.decode_tokens_per_second is not None:
        speed = f", then {answer.decode_tokens_per_second:.1f} tokens/s"
    deciding = ""
    if answer.decision_seconds is not None:
        deciding = f", {duration(answer.decision_seconds)} of it to decide the budgets"
    kept = kept_text(
        cache, retained_bytes=answer.prompt_retained_bytes, full_bytes=answer.prompt_full_bytes
    )
    return [
        f"[{answer.prompt_tokens:,} prompt and {answer.new_tokens:,} new tokens; prefill "
        f"{duration(answer.prefill_seconds)}{deciding}{speed}]",
        f"[cache of the prompt {kept}, {size(answer.retained_bytes)} with the answer]",
    ]


def policy_names(cache: Any) -> dict[str, Any]:
    """Who picks the entries of a reduced cache."""
    profile = getattr(cache, "profile", None)
    if profile is None:
        return {"policy": None, "scorer": None, "other_policies": []}
    return {
        "policy": profile.policy.name,
        "scorer": profile.policy.scorer,
        "other_policies": [policy.title for policy in profile.other_policies],
    }
