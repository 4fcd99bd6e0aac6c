"""The cells of the runtime's matrix: every policy, in every arrival, in every mode of eviction.

Where entries are stored at fewer bits, the oracle's own ones are held against them, and it goes on
with the numbers that are stored: the tolerance of what is computed from them is that of any cell.
The tests are in unit/runtime/test_matrix.py and, on a GPU, in gpu/; which cells they take, in
cell_choice.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from kernel_choice import WITH, WITHOUT
from prompt_runs import assert_kept_as_alone, padding_mask
from scorer_oracle import SCORERS
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer
from transformers.generation.streamers import BaseStreamer

from kvalloc.accounting.costs import MIXES, SCALE_BYTES, entry_bytes
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.policies import changed_policy, policy_class, policy_names
from kvalloc.runtime.policies.base import EvictionPolicy
from kvalloc.runtime.policies.score import Score
from kvalloc.scorers import get_scorer

CONTEXT, BATCH = 90, 2
LENGTHS = (CONTEXT, 41)
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COMBINING = [n for n in policy_names() if policy_class(n).combine is not EvictionPolicy.combine]
HOLDING = [n for n in policy_names() if policy_class(n).holds is not EvictionPolicy.holds]
LATER = [name for name in SCORERS if get_scorer(name).later is not None]
READING = [n for n in policy_names() if policy_class(n).extension is not EvictionPolicy.extension]
# The filter at decoding reads less than what is stored; here it reads all, so that the oracle of
# what is stored holds. What it leaves out is the subject of test_mpcache.py.
OPTIONS = {"mpcache": {"coarse_share": 1.0, "fine_share": 1.0}}
DRAFTS = {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1, "eos_token_id": 10**6}
# The oldest transformers takes nothing back of sliding layers, and its early exit fails alone.
RECORDS = hasattr(DynamicSlidingWindowLayer, "activate_past_recording")

STATES = ("qwen3_5", "falcon_h1")
"""Families with layers that have a state."""

UNSERVED = {
    **{(one, "flex_attention"): "sdpa" for one in (*STATES, "qwen2_5_vl")},
    **{(one, "padding_only"): "sdpa" for one in ("llama4", "qwen2_5_vl")},
    **{("gpt-oss", one): "eager" for one in ("sdpa", "flex_attention", "padding_only")},
}
"""Families and attention that transformers does not compute right here, and what it does."""

# What stands for a policy, too: entries that each prompt hands out to heads by score.
BY_PROMPT = "by_prompt"
UNRANKED = [n for n in policy_names() if not issubclass(policy_class(n), Score)]


class Setting:
    """One cell of the matrix, and how to ask in it."""

    def __init__(
        self,
        model: Any,
        tolerance: float,
        policy: str,
        mode: str,
        scorer: str,
        level: str,
        bits: str,
    ) -> None:
        self.model, self.tolerance, self.policy = model, tolerance, policy
        self.mode = mode
        profile = tiny.make_profile(model, CONTEXT, 0.4, scorer=scorer, parameters=None)
        profile = tiny.by_head(profile, spread=9) if level == "head" else profile
        if policy in policy_names():
            changed = changed_policy(profile.policy, policy, OPTIONS.get(policy))
            profile = profile.replace(policy=changed)
        if bits != "16_bits":
            profile = profile.replace(bits=widths(profile, bits, by_head=level == "head"))
        if policy == BY_PROMPT:
            profile = profile.replace(level="head", by_prompt=True)
        self.profile = profile
        self.sees = hasattr(model.config, "vision_config") and not rotating(policy, scorer)
        if hasattr(model.model, "rope_deltas"):  # transformers keeps those of an earlier prompt
            model.model.rope_deltas = None

    def cache(self, decode_every: int | None = None, **changes: Any) -> Any:
        """Where each prompt hands out its entries at once, each layer hands out its own."""
        options = CacheOptions(by_layer=self.mode == "immediate", decode_every=decode_every)
        way = Way(profile=self.profile, options=options)
        return build_rows(self.model, [way], **changes)

    def shadow(self) -> Any:
        return tiny.Shadow(self.model)

    def follow(self, shadow: Any, cache: Any) -> None:
        shadow.follow(cache, combined=self.policy in COMBINING)

    def met(self, cache: Any, lengths: tuple[int, ...], mask: Any = None) -> None:
        """Each row keeps the budgets of its own length, to the entry, and no padding.

        Where each prompt hands out its entries, all of them together.
        """
        full = list(self.profile.shape.full_layers)
        for row, tokens in enumerate(lengths):
            kept = cache.kept_tokens_by_row[row, full] - (cache.get_seq_length() - CONTEXT)
            budgets = self.profile.budgets_for(tokens)[full]
            self.kept_as(budgets, kept)
            if self.mode == "immediate":  # each layer hands out its own
                for of_layer in zip(budgets, kept, strict=True):
                    self.kept_as(*of_layer)
            for layer in full if mask is not None else ():
                columns = cache.kept_indices(layer)[row]
                assert mask[row, columns[columns >= 0].long().cpu()].all()

    def met_again(self, cache: Any, lengths: Any = None) -> None:
        """Rows, all of one length by default, keep the budgets of all tokens seen, to the entry."""
        full = list(self.profile.shape.full_layers)
        found = cache.kept_tokens_by_row[:, full]
        lengths = [cache.get_seq_length()] * len(found) if lengths is None else lengths
        for kept, tokens in zip(found, lengths, strict=True):
            budgets = self.profile.budgets_for(tokens)[full]
            budgets = budgets.clip(min(self.profile.policy.protected_tokens, tokens))
            self.kept_as(budgets, kept)

    def kept_as(self, budgets: Any, kept: Any) -> None:
        """What is kept are budgets, or their sum where each prompt hands them out.

        At fewer bits heads of different length may need one block of scales more each then, and
        entries of as many bytes fewer.
        """
        left = budgets.sum() - kept.sum()
        assert 0 <= left <= kept.size * self.entries_of_scales
        assert self.profile.by_prompt or (kept == budgets).all()

    @property
    def entries_of_scales(self) -> int:
        """Entries whose bytes the scales of one more block of keys take, at the profile's bits."""
        if self.profile.bits is None:
            return 0
        shape, by_layer = self.profile.shape, self.profile.bits
        dim, bits = shape.head_dim, int(by_layer[list(shape.full_layers)].max())
        n_widths = len(MIXES.get(bits, (bits,)))
        return -(-2 * SCALE_BYTES * dim * n_widths // entry_bytes(bits, shape))

    def as_alone(self, cache: Any, ids: torch.Tensor, mask: torch.Tensor) -> None:
        """Each row of a padded batch keeps what it keeps alone.

        In half precision scores of a row differ from those that it has alone by rounding.
        """
        if self.tolerance != 1e-4 or not cache.reduced:
            return
        stored = 0
        for row, shown in enumerate(mask.bool()):
            self.run(ids[row : row + 1, shown], alone := self.cache())
            stored += alone.retained_bytes
            assert_kept_as_alone(cache, row, alone, shown.nonzero()[:, 0])
        assert self.mode != "immediate" or cache.retained_bytes == stored

    def near(self, found: torch.Tensor, expected: torch.Tensor, mask: Any = None) -> None:
        assert tiny.worst(found, expected, mask) <= self.tolerance

    def run(
        self, ids: torch.Tensor, cache: Any, mask: Any = None, **images: torch.Tensor
    ) -> torch.Tensor:
        with torch.no_grad():
            out = self.model(ids, attention_mask=mask, past_key_values=cache, **images)
        logits: torch.Tensor = out.logits
        return logits

    def ask(self, tokens: int, cache: Any, shadow: Any, mask: Any = None) -> None:
        """A question to both; the mask covers what came before it."""
        ids = tiny.prompt(tokens, BATCH, seed=tokens)
        if mask is not None:
            mask = torch.nn.functional.pad(mask, (0, tokens), value=1)
        self.near(self.run(ids, cache, mask), shadow.logits(ids, mask))

    def prompted(self, batch: int = BATCH, seed: int = 0) -> tuple[Any, Any]:
        """A cache that has read a prompt in one piece, with an image if it can, and its oracle."""
        cache, shadow, ids = self.cache(), self.shadow(), tiny.prompt(CONTEXT, batch, seed)
        images = with_image(ids) if self.sees else {}
        self.near(self.run(ids, cache, **images), shadow.logits(ids, **images))
        self.follow(shadow, cache)
        return cache, shadow


def rotating(policy: str, scorer: str) -> bool:
    """Whether queries or keys are rotated by the numbers of tokens, which images do not have."""
    return policy == "attention_matching" or get_scorer(scorer).rotates


def with_image(ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Put an image at the fourth token of each row of a prompt; return what the model takes."""
    ids[:, 3], ids[:, 4:8] = tiny.IMAGE_START, tiny.IMAGE
    return {
        "pixel_values": torch.randn(
            16 * len(ids), 1176, generator=torch.Generator().manual_seed(3)
        ),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * len(ids)),
        "mm_token_type_ids": (ids == tiny.IMAGE).long(),
    }


def widths(profile: Any, bits: str, by_head: bool) -> Any:
    """Bits of each KV head: all the same, or, mixed, those of a layer, or of its heads, differ."""
    found = np.full_like(profile.budgets, 16)
    for place, layer in enumerate(profile.shape.full_layers):
        if bits == "mixed_bits":
            found[layer] = (8, 3, 16, 5)[place % 4]
            if by_head and found.shape[1] > 1:
                found[layer, 1] = (4, 16, 16, 8)[place % 4]
        else:
            found[layer] = int(bits.removesuffix("_bits"))
    return found


# Arrivals


def one_prompt(at: Setting) -> None:
    cache, shadow = at.prompted()
    at.met(cache, (CONTEXT, CONTEXT))
    at.ask(1, cache, shadow)


def question_of_5(at: Setting) -> None:
    cache, shadow = at.prompted()
    at.ask(5, cache, shadow)


def question_of_100(at: Setting) -> None:
    cache, shadow = at.prompted()
    at.ask(100, cache, shadow)
    at.follow(shadow, cache)
    at.met_again(cache)
    at.ask(5, cache, shadow)


def several_turns(at: Setting) -> None:
    """One, two and five turns: each ends within the budgets of all tokens seen."""
    cache, shadow = at.prompted()
    for tokens in (5, 30, 1, 70, 2):
        at.ask(tokens, cache, shadow)
        cache.end_turn()
        at.follow(shadow, cache)
        at.met_again(cache)
    at.ask(1, cache, shadow)


def padded_turns(at: Setting) -> None:
    """Rows of different length, and turns of which one row has fewer tokens, or none."""
    mask = padding_mask(LENGTHS)
    cache, shadow, ids = at.cache(), at.shadow(), tiny.prompt(CONTEXT, BATCH)
    at.near(at.run(ids, cache, mask), shadow.logits(ids, mask), mask)
    at.follow(shadow, cache)
    for tokens, fewer in ((7, 7), (40, 9), (1, 1), (12, 12), (70, 30)):
        shown = (torch.arange(tokens) >= torch.tensor([[0], [fewer]])).long()
        mask, ids = torch.cat([mask, shown], dim=1), tiny.prompt(tokens, BATCH, seed=tokens)
        at.near(at.run(ids, cache, mask), shadow.logits(ids, mask), shown)
        cache.end_turn()
        at.follow(shadow, cache)
        at.met_again(cache, mask.sum(dim=1).tolist())
    at.ask(1, cache, shadow, mask)


def decoding(at: Setting) -> None:
    """What follows competes every so many tokens: the oracle says what is attended to."""
    ids = tiny.prompt(CONTEXT, BATCH)
    every, settled, times = 6, CONTEXT, 0
    cache, shadow = at.cache(decode_every=every), at.shadow()
    at.near(at.run(ids, cache), shadow.logits(ids))
    at.follow(shadow, cache)
    for tokens in (*[1] * 8, 9, 1, 1, 5, every, 1):
        at.ask(tokens, cache, shadow)
        at.follow(shadow, cache)
        seen = cache.get_seq_length()
        if seen - settled >= every:
            at.met_again(cache)
            settled, times = seen, times + 1
    assert times >= 3


def chunks(at: Setting) -> None:
    cache, shadow = at.cache(prompt_tokens=CONTEXT), at.shadow()
    for part in tiny.prompt(CONTEXT, BATCH).split(25, dim=1):
        at.near(at.run(part, cache), shadow.logits(part))
        at.follow(shadow, cache)
    at.met(cache, (CONTEXT, CONTEXT))
    at.ask(5, cache, shadow)


def padded(at: Setting, side: str) -> None:
    mask = padding_mask(LENGTHS, side)
    cache, shadow, ids = at.cache(), at.shadow(), tiny.prompt(CONTEXT, BATCH)
    at.near(at.run(ids, cache, mask), shadow.logits(ids, mask), mask)
    at.follow(shadow, cache)
    # On the right, padding fills the sliding windows of what is read after a shorter row.
    if at.mode != "deferred" or at.profile.shape.sliding_window is None or side == "left":
        at.as_alone(cache, ids, mask)
    at.met(cache, LENGTHS, mask)
    at.ask(5, cache, shadow, mask)


def left_padding(at: Setting) -> None:
    padded(at, "left")


def different_lengths(at: Setting) -> None:
    padded(at, "right")


def padded_chunks(at: Setting) -> None:
    mask = padding_mask(LENGTHS)
    cache, shadow = at.cache(prompt_tokens=CONTEXT), at.shadow()
    ids, seen = tiny.prompt(CONTEXT, BATCH), 0
    for part in ids.split(25, dim=1):
        seen += part.shape[1]
        own = mask[:, :seen]
        at.near(at.run(part, cache, own), shadow.logits(part, own), own)
        at.follow(shadow, cache)
    at.met(cache, LENGTHS, mask)
    at.ask(5, cache, shadow, mask)


def reorder(at: Setting) -> None:
    cache, shadow = at.prompted()
    at.ask(3, cache, shadow)
    rows = torch.tensor([1, 0])
    cache.reorder_cache(rows)
    shadow.reorder(rows)
    at.ask(1, cache, shadow)
    cache.reorder_cache(torch.tensor([1, 1]))
    shadow.reorder(torch.tensor([1, 1]))
    at.ask(2, cache, shadow)


def generated(
    at: Setting, ids: torch.Tensor, **options: Any
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """What `generate` gives, its new tokens, and the oracle's logits of them."""
    cache, shadow, new_tokens = at.cache(), at.shadow(), 4
    if DRAFTS.items() <= options.items():
        from kvalloc.extensions.making import extended

        extended(cache)
        cache.activate_past_recording(CONTEXT)
    reorder, orders = cache.reorder_cache, []

    def reorder_before_a_forward(rows: torch.Tensor) -> None:
        """After the last one the rows are put in the order of beams that go on: of none."""
        orders.append(rows)
        if len(orders) < new_tokens:
            reorder(rows)

    cache.reorder_cache = reorder_before_a_forward
    found = at.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=cache,
        max_new_tokens=new_tokens,
        return_dict_in_generate=True,
        output_logits=True,
        output_scores=True,
        **options,
    )
    if orders:
        reorder(found.beam_indices[:, -1].long())
    new = found.sequences[:, CONTEXT:]
    logits = shadow.logits(ids.repeat_interleave(len(new) // len(ids), dim=0))[:, -1:]
    at.follow(shadow, cache)
    return found, new, torch.cat([logits, shadow.logits(new[:, :-1])], dim=1)


def beams(at: Setting) -> None:
    """The scores of both beams are what the oracle gives their tokens."""
    ids, options = tiny.prompt(CONTEXT), {"num_return_sequences": 2, "do_sample": False}
    found, new, logits = generated(at, ids, num_beams=2, **options)
    expected = logits.log_softmax(-1).gather(-1, new[..., None])[..., 0].mean(dim=1)
    assert (found.sequences_scores.float() - expected).abs().max() <= at.tolerance


def sampled(at: Setting) -> None:
    """num_return_sequences: rows of one prompt that part after it."""
    torch.manual_seed(0)
    ids = tiny.prompt(CONTEXT)
    found, _, expected = generated(at, ids, num_return_sequences=2, do_sample=True)
    at.near(torch.stack(found.logits, dim=1), expected)


def inputs_embeds(at: Setting) -> None:
    cache, shadow, ids = at.cache(), at.shadow(), tiny.prompt(CONTEXT, BATCH)
    with torch.no_grad():
        embedded = at.model.get_input_embeddings()(ids)
        found = at.model(inputs_embeds=embedded, past_key_values=cache).logits
    at.near(found, shadow.logits(ids))
    at.follow(shadow, cache)
    at.ask(5, cache, shadow)


def crop(at: Setting) -> None:
    """A question is taken back, and another one is asked, of the prompt alone."""
    cache, shadow = at.prompted()
    at.run(tiny.prompt(5, BATCH, seed=9), cache)
    cache.crop(-5)
    at.ask(3, cache, shadow)


def saved(at: Setting, folder: Path) -> None:
    from kvalloc.extensions.saved import load_cache, save_cache

    cache, shadow = at.prompted()
    at.ask(2, cache, shadow)
    save_cache(cache, folder / "cache.safetensors")
    at.follow(shadow, cache)  # what was asked has competed
    at.met_again(cache)
    again = load_cache(folder / "cache.safetensors", at.model)
    at.ask(5, again, shadow)


def interleaved(at: Setting) -> None:
    one, other = at.prompted(), at.prompted(seed=5)
    for tokens in (3, 1):
        at.ask(tokens, *one)
        at.ask(tokens, *other)


class Noted(BaseStreamer):
    def __init__(self) -> None:
        self.tokens: list[int] = []

    def put(self, value: torch.Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.tokens.append(-1)


def streaming(at: Setting) -> None:
    ids, streamer = tiny.prompt(CONTEXT), Noted()
    found, _, expected = generated(at, ids, streamer=streamer, do_sample=False)
    assert streamer.tokens == [*found.sequences[0].tolist(), -1]
    at.near(torch.stack(found.logits, dim=1), expected)


def assisted(at: Setting) -> None:
    """With drafts, most of which are taken back."""
    found, _, expected = generated(at, tiny.prompt(CONTEXT), **DRAFTS, do_sample=False)
    at.near(torch.stack(found.logits, dim=1), expected)


ARRIVALS: dict[str, Callable[..., None]] = {
    function.__name__: function
    for function in (
        *(one_prompt, question_of_5, question_of_100, several_turns, decoding),
        chunks,
        *(left_padding, different_lengths, padded_chunks, padded_turns),
        *(reorder, beams, sampled),
        *(inputs_embeds, crop, saved, interleaved, streaming, assisted),
    )
}


# The matrix

FACTORS: dict[str, list[str]] = {
    "policy": [*policy_names(), BY_PROMPT],
    "arrival": list(ARRIVALS),
    "mode": ["immediate", "deferred"],
    "family": [
        *("llama", "phi3", "gemma3", "llama4", "gemma3n", "qwen3_5", "falcon_h1", "deepseek_v3"),
        *("gpt-oss", "qwen2_5_vl"),
    ],
    "level": ["layer", "head"],
    "attention": ["sdpa", "eager", "flex_attention", "padding_only"],
    "dtype": list(DTYPES),
    "bits": ["16_bits", "8_bits", "4_bits", "532_bits", "mixed_bits"],
    "kernel": [WITH, WITHOUT],
}
Cell = tuple[str, ...]


def comparable(cell: Cell) -> bool:
    """Flash attention cuts out padding between tokens, and counts sliding windows without it."""
    between = {"different_lengths", "padded_turns"} & set(cell)
    return not between or "padding_only" not in cell or not {"gemma3", "gemma3n"} & set(cell)


UNFIT = [
    *((one, "criticalkv") for one in ("gemma3n", "deepseek_v3")),  # outputs are of other heads
    *((one, "knorm") for one in ("gemma3", "gemma3n", "qwen3_5")),  # norms make all keys as long
    ("gpt-oss", "expected_attention"),  # it has sinks
]
"""Families, and scorers that are refused or rank by rounding alone there."""


def scorer_of(cell: Cell) -> str:
    """The scorers of a mode in turn: none of them may matter to what the oracle says."""
    scorers = scorers_of(cell[0], cell[2])
    scorers = [name for name in scorers if (cell[3], name) not in UNFIT]
    return scorers[sum(map(ord, "".join(cell))) % len(scorers)]


@functools.cache
def scorers_of(policy: str, mode: str) -> list[str]:
    """Scorers with which a policy evicts in a mode: one that holds a prompt goes with others."""
    either = policy in (*HOLDING, BY_PROMPT) and mode == "deferred"
    return [name for name in SCORERS if either or (name in LATER) == (mode == "deferred")]


@functools.cache
def model_of(family: str, attention: str, dtype: str) -> tuple[Any, float]:
    """A model and what may be off: in half precision, twice what the plain model is."""
    attention = UNSERVED.get((family, attention), attention)
    if dtype == "float32":
        return tiny.tiny_model(family, attention), 1e-4
    # smaller weights: with peaky attention the model's own rounding would be all there is to see
    model = tiny.tiny_model(family, attention, DTYPES[dtype], initializer_range=0.08)
    shadow, cache, own = tiny.Shadow(model), DynamicCache(config=model.config), 0.0
    with torch.no_grad():
        for tokens in (CONTEXT, 100):
            ids = tiny.prompt(tokens, BATCH, seed=tokens)
            own = max(own, tiny.worst(model(ids, past_key_values=cache).logits, shadow.logits(ids)))
    return model, 2 * own


def refusal(cell: Cell) -> str | None:
    """What is said where a policy cannot do it: some see a whole prompt, or equal rows, only."""
    policy, arrival, mode, family, level, _, _, bits, _ = cell
    if bits != "16_bits" and policy in READING:
        return "compares keys"
    if family == "deepseek_v3" and policy in (*COMBINING, *READING, "critical"):
        return "kind 'latent'"
    if family == "gemma3n" and policy in (*READING, "critical"):
        return "kind 'shared'"
    if bits == "532_bits" and policy in UNRANKED:
        return "does not say which are the best"
    if policy == BY_PROMPT and bits == "mixed_bits":
        return "true with bits that differ between heads"
    if (
        policy in COMBINING
        and "chunks" in arrival
        and mode == "immediate"
        and policy not in HOLDING
    ):
        return "merges entries"
    uneven = level == "head" or "padd" in arrival or arrival == "different_lengths"
    if family in STATES and arrival in ("crop", "saved", "assisted"):
        return "have a state"
    if arrival == "assisted" and cell[3] == "gemma3" and not RECORDS:
        return "takes back no drafts"
    if policy in READING and (uneven or arrival == "assisted"):
        return "leaves entries unread"
    if family == "qwen2_5_vl" and arrival == "saved" and not rotating(policy, scorer_of(cell)):
        return "positions on several axes"
    if arrival == "crop" and family in ("gemma3", "gemma3n", "gpt-oss", "llama4"):
        return "sliding-window layer"
    return None


def answers_as_the_oracle(cell: Cell, folder: Path) -> None:
    """The assertions of one cell."""
    policy, arrival, mode, family, level, attention, dtype, bits, _ = cell
    model, tolerance = model_of(family, attention, dtype)

    def answer() -> None:
        at = Setting(model, tolerance, policy, mode, scorer_of(cell), level, bits)
        ARRIVALS[arrival](at, *[folder] if arrival == "saved" else [])

    said = refusal(cell)
    if said is None:
        answer()
        return
    with pytest.raises(InputError if "true with" in said else UnsupportedRequestError, match=said):
        answer()
