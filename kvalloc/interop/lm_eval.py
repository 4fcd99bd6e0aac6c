"""A model of lm-evaluation-harness: import this to register the model ``kvalloc``.

References
----------
L. Gao et al., lm-evaluation-harness 0.4.13, class ``LM``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from kvalloc.errors import InputError, MissingDependencyError
from kvalloc.evaluate.methods import AppliedMethod, CacheMethod, end_tokens, full_cache
from kvalloc.models.names import generation_argument
from kvalloc.models.structure import input_device
from kvalloc.prompts.chat import encode

try:
    import lm_eval.models  # noqa: F401  the harness adds its own models to an empty registry only
    from lm_eval.api.model import LM
    from lm_eval.api.registry import register_model
except ImportError as error:
    raise MissingDependencyError(
        "lm-evaluation-harness is not installed; get it with: pip install 'kvalloc[lm-eval]'"
    ) from error

MAX_NEW_TOKENS = 256
"""Longest answer by default."""

LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
"""Names of the length in tasks; the first one counts."""


@register_model("kvalloc")
class KVAllocLM(LM):  # type: ignore[misc]  # lm_eval has no types
    """A model that reads each prompt into a reduced cache.

    Parameters
    ----------
    pretrained, dtype, device : str
        As for `kvalloc.load_model`.
    profile : str, optional
        A budget profile's file or shipped name.
    budget : str or float, optional
        As for `kvalloc.apply`. Without it and a profile, the full cache.
    after_tokens : int
        Last prompt tokens, read after the compression. With 0, answers of one token (multiple
        choice) are predicted before any eviction.
    allow_other_model : bool
        Accept the profile of a model of the same sizes.
    max_length : int, optional
        Tokens of prompt and answer; by default the model's limit. Longer prompts lose their
        beginning.
    **ignored
        The harness's other options; ``batch_size`` is always 1.

    Raises
    ------
    InputError
        If ``after_tokens`` is negative, model and profile do not exist or fit, or profile and
        budget are given.
    """

    def __init__(
        self,
        pretrained: str = "demo",
        profile: str | None = None,
        *,
        budget: str | float | None = None,
        after_tokens: int | str = 1,
        dtype: str = "float32",
        device: str | None = None,
        allow_other_model: bool | str = False,
        max_length: int | str | None = None,
        **ignored: Any,
    ) -> None:
        from kvalloc.extensions.making import make_cache
        from kvalloc.formats.shipped_profiles import load_profile
        from kvalloc.models.loading import load_model, shape_of
        from kvalloc.online.application import apply

        super().__init__()
        if int(after_tokens) < 0:
            raise InputError(f"after_tokens is {after_tokens}; give 0 or more")
        loaded = load_model(pretrained, dtype=dtype, device=device)
        self._model, self._tokenizer = loaded.model, loaded.tokenizer
        self._after_tokens = int(after_tokens)
        limit = shape_of(loaded.model, model_id=loaded.model_id).max_context_tokens
        self._max_length = int(max_length) if max_length is not None else limit
        self._method: AppliedMethod | CacheMethod = full_cache(self._model)
        allowed = str(allow_other_model).lower() == "true"
        if budget is not None:
            options: dict[str, Any] = {
                "profile": profile,
                "budget": budget,
                "allow_other_model": allowed,
            }
            apply(self._model, **options).remove()  # refuses what cannot be served at once
            self._method = AppliedMethod(options=options)
        elif profile is not None:
            make = partial(
                make_cache, self._model, load_profile(profile), allow_other_model=allowed
            )
            make()  # refuses the profile of another model at once
            self._method = CacheMethod(make_cache=make)

    def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
        """Return each continuation's log likelihood, nats, and whether it is the greedy one."""
        return [self._likelihood(*request.args) for request in requests]

    def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
        """Raise InputError: nothing can be compressed without a prompt."""
        raise InputError(
            "a rolling log likelihood has no prompt to compress; use 'kvalloc eval --tasks kl'"
        )

    def generate_until(self, requests: Sequence[Any]) -> list[str]:
        """Return greedy answers, cut at the first stop text, leading blanks included.

        Raises
        ------
        InputError
            If sampling is requested.
        """
        return [self._generated(*request.args) for request in requests]

    @property
    def tokenizer_name(self) -> str:
        """Return the tokenizer's name, for the harness's cache."""
        return str(self._tokenizer.name_or_path).replace("/", "__")

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a chat in the model's form."""
        return str(
            self._tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
            )
        )

    def _likelihood(self, context: str, continuation: str) -> tuple[float, bool]:
        # A blank between them belongs to the continuation's first token in most vocabularies.
        bare = context.rstrip()
        continuation = context[len(bare) :] + continuation
        prompt = self._ids(bare) if bare else ()
        # Where tokens run across the border, the continuation is what the whole adds in length.
        whole = self._ids(bare + continuation) if bare else encode(self._tokenizer, continuation)
        answer = whole[len(prompt) :]
        if not prompt:
            prompt = (self._start_token(),)
            if answer[:1] == prompt:
                answer = answer[1:]
        if not answer:
            raise InputError(f"the continuation {continuation!r} has no token; give it text")
        prompt = self._cut(prompt, len(answer) - 1)  # nothing is predicted from the last one
        border = max(1, len(prompt) - self._after_tokens)
        compressed, unread = self._method.compress(self._model, prompt[:border]), prompt[border:]
        import torch

        logits = compressed.logits[None, :][: 0 if unread else 1]
        if n_wanted := len(answer) - len(logits):
            logits = torch.cat([logits, compressed.feed(unread, answer[:-1], last=n_wanted)])
        likely = logits.log_softmax(dim=-1)
        chosen = torch.tensor(answer, device=likely.device)
        total = float(likely.gather(-1, chosen[:, None]).double().sum())
        return total, bool((logits.argmax(dim=-1) == chosen).all())

    def _generated(self, context: str, options: dict[str, Any]) -> str:
        import torch

        more, tokenizer = dict(options), self._tokenizer
        lengths = [more.pop(name, None) for name in LENGTHS]
        n_new = int(next((length for length in lengths if length is not None), MAX_NEW_TOKENS))
        until = more.pop("until", None) or []
        stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
        temperature, draws = more.pop("temperature", None), more.pop("do_sample", None)
        if draws or (draws is None and float(temperature or 0.0) > 0.0):
            raise InputError("answers are greedy here; ask for temperature 0 and do_sample false")
        prompt = self._cut(self._ids(context) or (self._start_token(),), n_new)
        first = prompt[: -self._after_tokens] if self._after_tokens else ()
        ends = sorted(end_tokens(self._model, tokenizer))

        def stopped(ids: torch.Tensor, scores: object) -> torch.Tensor:
            texts = tokenizer.batch_decode(ids[:, len(prompt) :])
            ended = [any(stop in text for stop in stops) for text in texts]
            return torch.tensor(ended, device=ids.device)

        ids = torch.tensor([prompt], device=input_device(self._model))
        with torch.inference_mode(), self._cache(first) as cache:
            written = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=n_new,
                do_sample=False,
                eos_token_id=ends or None,
                pad_token_id=tokenizer.pad_token_id,
                stopping_criteria=[stopped],
                **{**cache, **more},
            )
        text = str(tokenizer.decode(written[0, len(prompt) :], skip_special_tokens=True))
        for stop in stops:
            text = text.split(stop)[0]
        return text

    @contextmanager
    def _cache(self, first: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Give ``generate()``'s argument for a cache that has read the first tokens, if any."""
        from kvalloc.online.application import apply

        if first:
            yield {generation_argument(): self._method.compress(self._model, first).cache}
        elif isinstance(self._method, AppliedMethod):
            with apply(self._model, **self._method.options):
                yield {}
        else:
            yield {generation_argument(): self._method.make_cache()}

    def _ids(self, text: str) -> tuple[int, ...]:
        mark = getattr(self._tokenizer, "bos_token", None)
        return encode(self._tokenizer, text, special=not (mark and text.startswith(mark)))

    def _start_token(self) -> int:
        start = self._tokenizer.bos_token_id
        start = self._tokenizer.eos_token_id if start is None else start
        if start is None:
            raise InputError("an empty prompt needs a model with a start mark; give a context")
        return int(start)

    def _cut(self, prompt: tuple[int, ...], n_answer: int) -> tuple[int, ...]:
        if self._max_length is None:
            return prompt
        room = self._max_length - n_answer
        if room < 1:
            raise InputError(
                f"an answer of {n_answer} tokens leaves no room for a prompt in "
                f"{self._max_length} tokens; give a larger max_length"
            )
        return prompt[-room:]
