"""Presses of NVIDIA's kvpress; without it MissingDependencyError is raised."""

from __future__ import annotations

import importlib.util
import re
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from kvalloc.accounting.costs import WIDTHS
from kvalloc.accounting.costs import stored_bytes as packed_bytes
from kvalloc.accounting.stored import bytes_at_16_bits
from kvalloc.errors import InputError, MissingDependencyError, nearest, option
from kvalloc.evaluate.methods import Compressed, MakeCache, needed_bytes, next_logits, stored_bytes

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel

    from kvalloc.evaluate.methods import Method
    from kvalloc.formats.budget_profile import BudgetProfile
    from kvalloc.models.attention import AttentionStates, Compute
    from kvalloc.shape import ModelShape

_NAME = re.compile(r"kvpress:(\w+)(?:\((\w+)\))?(?:@([\d.]+)%)?(?:@(\d+)bits)?")


@dataclass(frozen=True, kw_only=True)
class PeerName:
    """A parsed value of ``--peer``: a press, or one with another inside.

    ``share`` is of the prompt's entries, 0..1. kvalloc rounds kept entries to ``bits``; 16 is none.
    """

    press: str
    inner: str | None = None
    share: float | None = None
    bits: int = 16

    def __str__(self) -> str:
        inner = f"({self.inner})" if self.inner else ""
        share = "" if self.share is None else f"@{self.share * 100:g}%"
        bits = "" if self.bits == 16 else f"@{self.bits}bits"
        return f"kvpress:{self.press}{inner}{share}{bits}"


def read_peer_name(text: str) -> PeerName:
    """Read ``kvpress:SnapKV``, ``kvpress:AdaKV(SnapKV)`` or ``kvpress:TOVA@20%@4bits``.

    Raises
    ------
    InputError
        If it is none of these, or has no such share or bits.
    """
    match = _NAME.fullmatch(text.strip())
    if match is None:
        raise InputError(
            f"there is no peer {text!r}; write kvpress:NAME, kvpress:NAME(NAME), "
            "kvpress:NAME@20% or kvpress:NAME@20%@4bits, such as kvpress:SnapKV or "
            "kvpress:AdaKV(SnapKV)"
        )
    press, inner, share, bits = match.groups()
    if share is not None and not 0 < float(share) <= 100:
        raise InputError(f"{text} keeps {share}% of the entries; ask for more than 0, at most 100")
    width = int(bits or 16)
    if width not in WIDTHS:
        known = ", ".join(map(str, WIDTHS))
        raise InputError(f"{text}: nothing is rounded to {width} bits; choose from: {known}")
    kept = None if share is None else float(share) / 100
    return PeerName(press=press, inner=inner, share=kept, bits=width)


def require_kvpress() -> Any:
    """Return the package."""
    if importlib.util.find_spec("kvpress") is None:
        raise MissingDependencyError(
            "kvpress is not installed, and does not run with transformers 5.3 or newer; run "
            "'make peers', then this command with .venv-kvpress/bin/kvalloc"
        )
    import kvpress

    return kvpress


def make_press(name: PeerName) -> Any:
    """Return a new press at its own defaults.

    Raises
    ------
    InputError
        If there is none, or it needs more than a share of entries.
    """
    kvpress = require_kvpress()

    def make(of: str, **arguments: Any) -> Any:
        cls = getattr(kvpress, f"{of}Press", None)
        if cls is None:
            near = nearest(f"{of}Press", dir(kvpress))
            raise InputError(f"kvpress has no {of}Press; {near}see the list in kvpress/__init__.py")
        try:
            return cls(**arguments)
        except (TypeError, AssertionError) as error:
            raise InputError(f"{of}Press cannot be made for {name}: {error}") from error

    press = make(name.press) if name.inner is None else make(name.press, press=make(name.inner))
    if not hasattr(press, "compression_ratio"):
        raise InputError(f"{name.press}Press takes no share of entries, so it cannot be compared")
    return press


@dataclass(frozen=True, kw_only=True)
class PeerCompressed(Compressed):
    """A prompt's cache after a press.

    Hidden entries get no attention. kvpress uses made-up keys, with a little weight left if many
    tokens are read at once.

    Attributes
    ----------
    hidden : tuple of (Tensor of bool, (n_kv_heads, n_stored)) or None
        By layer; None for none.
    first_stored : int
        Entries of the first layer after the prompt.
    """

    hidden: tuple[Tensor | None, ...]
    first_stored: int
    n_prompt: int

    def feed(
        self, question_ids: Sequence[int], answer_ids: Sequence[int] = (), *, last: int
    ) -> Tensor:
        """Read more tokens; see `Compressed.feed`."""
        import torch

        from kvalloc.models.attention import intercept_attention

        followed = self.cache.get_seq_length() - self.first_stored
        begin, ids = self.n_prompt + followed, [*question_ids, *answer_ids]
        positions = torch.arange(begin, begin + len(ids), device=self.model.device)[None]
        with intercept_attention(self.model, self._attend):
            return next_logits(self.model, self.cache, ids, last=last, position_ids=positions)

    def _attend(self, states: AttentionStates, compute: Compute) -> Any:
        import torch

        n_new, n_total = states.queries.shape[2], states.keys.shape[2]
        device = states.keys.device
        seen = torch.ones(n_new, n_total, dtype=torch.bool, device=device).tril(n_total - n_new)
        stored: Any = self.cache.layers[states.layer]
        if stored.is_sliding:
            seen = seen.triu(n_total - n_new + 1 - stored.sliding_window)
        hidden = self.hidden[states.layer]
        if hidden is None:
            return compute(seen[None, None])
        n_kv_heads = states.keys.shape[1]
        seen = seen.expand(n_kv_heads, n_new, n_total).clone()
        seen[:, :, : hidden.shape[1]] &= ~hidden[:, None]
        group = states.queries.shape[1] // n_kv_heads
        return compute(seen.repeat_interleave(group, dim=0)[None])


@dataclass(frozen=True, kw_only=True)
class KvpressMethod:
    """A press at its own defaults.

    KVzip loads the tokenizer of ``tokenizer_path`` again, by default of the model's name.
    ``make_cache`` returns a new cache, such as transformers' QuantizedCache; its layers have
    ``stored_tensors``.

    Raises
    ------
    InputError
        If there is no share or no such press, or ``make_cache`` is given beside bits.
    """

    name: PeerName
    tokenizer_path: str | None = None
    make_cache: MakeCache | None = None

    def __post_init__(self) -> None:
        if self.name.share is None:
            raise InputError(f"{self.name} needs a share of entries to keep: {self.name}@20%")
        if self.make_cache is not None and self.name.bits != 16:
            raise InputError(f"{self.name}: bits are for a plain cache; leave them or make_cache")
        make_press(self.name)

    def compress(self, model: PreTrainedModel, prompt_ids: Sequence[int]) -> Compressed:
        """Read a prompt, and let the press reduce its cache.

        The model's attention modules keep kvpress' links to the rotary embedding.

        Raises
        ------
        InputError
            If the press refuses the prompt.
        """
        import torch
        from transformers import DynamicCache

        from kvalloc.models.loading import shape_of

        press, share = make_press(self.name), self.name.share
        assert share is not None  # checked when this was made
        # kvpress keeps int(n * (1 - ratio)) entries a head: a hundredth of an entry more than
        # wanted, so that rounding never takes one away
        n_tokens = len(prompt_ids)
        n_kept = max(1, round(share * n_tokens))
        press.compression_ratio = max(0.0, 1 - (n_kept + 0.01) / n_tokens)
        cache: Any = self.make_cache() if self.make_cache else DynamicCache(config=model.config)
        shape = shape_of(model)
        start = time.perf_counter()
        try:
            with torch.inference_mode(), _as_it_was(model, self.tokenizer_path):
                with press(model):
                    logits = next_logits(model, cache, prompt_ids, last=1)[-1]
                seconds = time.perf_counter() - start
                hidden = [
                    _hidden(layer, stored, shape.n_kv_heads)
                    for layer, stored in zip(_layers(model), cache.layers, strict=True)
                ]
                if self.name.bits != 16:
                    _round(cache, hidden, self.name.bits)
        except (AssertionError, RuntimeError, ValueError) as error:
            failure = f"{self.name} fails on a prompt of {n_tokens} tokens"
            raise InputError(f"{failure}: {error}") from error
        bits, plain = self.name.bits, shape.plain_bytes_per_entry
        layers = list(zip(cache.layers, hidden, strict=True))
        full = [(layer, marked) for layer, marked in layers if not layer.is_sliding]
        return PeerCompressed(
            model=model,
            cache=cache,
            logits=logits,
            stored_bytes=stored_bytes(cache),
            kept_bytes=_kept_bytes(needed_bytes(cache), layers, bits, shape, plain),
            bytes_at_16_bits=_kept_bytes(
                bytes_at_16_bits(cache.layers), full, bits, shape, shape.bytes_per_entry
            ),
            prefill_seconds=seconds,
            hidden=tuple(hidden),
            first_stored=cache.get_seq_length(),
            n_prompt=n_tokens,
        )


def read_peers(texts: Sequence[str], profiles: Iterable[BudgetProfile]) -> list[PeerName]:
    """Read names as typed, each with its share and none twice, before a model is loaded.

    A peer without a share keeps each profile's, to a thousandth.

    Raises
    ------
    InputError
        If a name is invalid, or there is neither a share nor a profile.
    """
    kept = (one.retained_tokens / (one.budgets.size * one.context_tokens) for one in profiles)
    shares = sorted({round(share, 3) for share in kept}, reverse=True)
    names: list[PeerName] = []
    for text in texts:
        name = read_peer_name(text)
        if name.share is None and not shares:
            raise InputError(
                f"{name} has nothing to be compared to at equal entries; give "
                f"a {option('profile')}, or a share: {name}@20%"
            )
        make_press(name)
        names += [replace(name, share=share) for share in ([name.share] if name.share else shares)]
    return list(dict.fromkeys(names))


def peer_methods(names: Sequence[PeerName], tokenizer: Any) -> dict[str, Method]:
    """Return peers by their names in the table."""
    path = getattr(tokenizer, "name_or_path", None)
    return {str(name): KvpressMethod(name=name, tokenizer_path=path) for name in names}


def _hidden(layer: Any, stored: Any, n_kv_heads: int) -> Tensor | None:
    """Return a layer's mask, (n_kv_heads, n_stored), or None."""
    import torch

    marked = getattr(layer.self_attn, "masked_key_indices", None)
    if marked is None:
        return None
    mask = torch.zeros(n_kv_heads, _entries(stored), dtype=torch.bool, device=stored.keys.device)
    mask[marked[1], marked[2]] = True
    return mask


def _round(cache: Any, hidden: Sequence[Tensor | None], bits: int) -> None:
    from kvalloc.runtime.quantization import quantised_keys, quantised_values

    for layer, marked in zip(cache.layers, hidden, strict=True):
        if layer.is_sliding:
            continue
        for head in range(layer.keys.shape[1]):
            kept = slice(None) if marked is None else ~marked[head]
            for states, rounded in ((layer.keys, quantised_keys), (layer.values, quantised_values)):
                states[:, head, kept] = rounded(states[:, head : head + 1, kept], bits)[:, 0]


def _kept_bytes(
    held_bytes: int,
    layers: Sequence[tuple[Any, Tensor | None]],
    bits: int,
    shape: ModelShape,
    entry_bytes: int,
) -> int:
    kept = total = 0
    for layer, marked in layers:
        counts = [_entries(layer)] * shape.n_kv_heads
        total += sum(counts) * entry_bytes
        if marked is not None:
            counts = (~marked).sum(dim=1).tolist()
        if bits == 16 or layer.is_sliding:
            kept += sum(counts) * entry_bytes
        else:
            kept += int(packed_bytes(counts, bits, shape).sum())
    return round(held_bytes * kept / total)


def _entries(layer: Any) -> int:
    """Return a layer's stored entries; a sliding one's length counts all seen tokens."""
    return int(layer.keys.shape[2] if layer.is_sliding else layer.get_seq_length())


@contextmanager
def _as_it_was(model: Any, tokenizer_path: str | None) -> Iterator[None]:
    """Undo presses' changes to the model, and let presses find its tokenizer."""

    def clear() -> None:
        for layer in _layers(model):
            vars(layer.self_attn).pop("masked_key_indices", None)

    name = model.config.name_or_path
    clear()
    model.config.name_or_path = tokenizer_path or name
    try:
        yield
    finally:
        model.config.name_or_path = name
        clear()


def _layers(model: Any) -> Any:
    decoder = model.get_decoder()
    return getattr(decoder, "language_model", decoder).layers
