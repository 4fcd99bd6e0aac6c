"""Rows of bench_runtime.py: rows that fit, fewer bits, the CPU's kernel, CUDA's bandwidth."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
from _common import InTurns, Row, in_turns, ratio_of, spread_of

import kvalloc
from kvalloc.evaluate.methods import stored_bytes
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.runtime.attention import cpu

ANSWER_TOKENS = 63
"""Decoded tokens that each row holds beyond its prompt: one more, and it is reduced again."""
FEWER = (8, 4)
BANDWIDTH_TARGET = 1.25


@torch.inference_mode()
def prefill(model: Any, cache: Any, ids: torch.Tensor) -> Any:
    """Read a prompt, and return the cache."""
    model(input_ids=ids, past_key_values=cache, logits_to_keep=1)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return cache


@torch.inference_mode()
def decode(model: Any, cache: Any, rows: int, tokens: int) -> None:
    """Add as many tokens to each row."""
    token = torch.full((rows, 1), 100, device=model.device)
    for _ in range(tokens):
        model(input_ids=token, past_key_values=cache)
    if token.is_cuda:
        torch.cuda.synchronize()


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """Several rows of one prompt, and how many tokens each gets in a round.

    Attributes
    ----------
    model : PreTrainedModel
    ids : Tensor of int64, (1, n_tokens)
    rows, new_tokens, rounds : int
    """

    model: Any
    ids: torch.Tensor
    rows: int
    new_tokens: int
    rounds: int

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.ids.shape[1]:,}"

    def cache(self, profile: BudgetProfile) -> Any:
        """Return a cache of the prompt, its row repeated."""
        cache = prefill(self.model, kvalloc.make_cache(self.model, profile), self.ids)
        cache.batch_repeat_interleave(self.rows)
        return cache

    def run(self, cache: Any) -> None:
        """Decode one round."""
        decode(self.model, cache, self.rows, self.new_tokens)

    def in_turns(self, calls: Mapping[str, Callable[[], object]]) -> InTurns:
        """Return the seconds of every call in each round."""
        return in_turns(calls, repeats=self.rounds)


def fits_rows(caches: Mapping[str, Any], *, model: Any, rows: int, target: float) -> Iterator[Row]:
    """Rows of each reduced cache that fit into the bytes that a plain cache of some rows takes.

    Parameters
    ----------
    caches : mapping of str to Cache
        One row of the same prompt in each, nothing decoded yet: ``"plain"``, and the reduced ones.
        They stay as they are.
    model : PreTrainedModel
    rows : int
        Rows of the plain cache.
    target : float
        Rows that fit over those of the plain cache, at least.

    Notes
    -----
    Each cache decodes its answer in one row and is brought to many rows then, which copies all of
    it into storages of its own: neither older and larger ones nor parts of them are alive.
    """
    memory = stored_bytes(answered(model, caches["plain"], rows))
    for level in caches:
        if level != "plain":
            yield fits_row(model, caches[level], level, memory, rows) | {"at_least": target}


def fits_row(model: Any, prompt: Any, level: str, memory: int, rows: int) -> Row:
    """Return the row of a reduced cache in as many rows as fit, after one more token."""
    cache = answered(model, prompt, 1)
    fitting = memory // stored_bytes(cache)
    cache.batch_repeat_interleave(fitting)
    taken = stored_bytes(cache)
    start = time.perf_counter()
    decode(model, cache, fitting, 1)
    seconds = time.perf_counter() - start
    return {
        "name": f"rows that fit by {level} / plain, {memory:,} bytes of K and V",
        "figure": fitting / rows if taken <= memory else 0.0,
        "note": f"{fitting} rows take {taken:,} bytes, each with {ANSWER_TOKENS} decoded tokens; "
        f"the next token {fitting / seconds:.1f} tokens/s",
    }


def answered(model: Any, prompt: Any, rows: int) -> Any:
    """Return a copy of a cache of one row after `ANSWER_TOKENS` tokens, that row repeated."""
    cache = copy.deepcopy(prompt)
    decode(model, cache, 1, ANSWER_TOKENS)
    cache.batch_repeat_interleave(rows)
    return cache


def at_bits(profile: BudgetProfile, bits: int) -> BudgetProfile:
    """Return the same budgets with each entry at as many bits."""
    return profile.replace(bits=np.full(profile.budgets.shape, bits, dtype=np.int64))


def bits_rows(decoding: Decoding, profile: BudgetProfile) -> Iterator[Row]:
    """Compare tokens a second at fewer bits with those at 16."""
    made = {16: profile, **{bits: at_bits(profile, bits) for bits in FEWER}}
    caches = {bits: decoding.cache(one) for bits, one in made.items()}
    stored = {bits: cache.retained_bytes for bits, cache in caches.items()}
    timed = decoding.in_turns(
        {str(bits): partial(decoding.run, cache) for bits, cache in caches.items()}
    )
    for bits in FEWER:
        share = stored[bits] / stored[16]
        yield {
            "name": f"decode by head at {bits} bits / at 16, {decoding}, tokens a second",
            **ratio_of(timed, "16", str(bits)),
            "note": f"the same entries of the prompt in {share:.3f} of the bytes",
        }


def kernel_state() -> str:
    """Return in words whether the kernel is there."""
    reason = cpu.CpuBackend().unavailable()
    return "kernel of the CPU compiled" if reason is None else f"no kernel of the CPU: {reason}"


def kernel_rows(decoding: Decoding, profiles: Mapping[str, BudgetProfile]) -> Iterator[Row]:
    """Compare tokens a second with the kernel and with torch's operations, by level and bits."""

    def without(cache: Any) -> None:
        with mock.patch.object(cpu.CpuBackend, "refusal", return_value="torch is measured"):
            decoding.run(cache)

    if cpu.CpuBackend().unavailable() is not None:
        return
    made = {f"by {level}": one for level, one in profiles.items()}
    made |= {f"by head at {bits} bits": at_bits(profiles["head"], bits) for bits in FEWER}
    calls: dict[str, Callable[[], object]] = {}
    for name, profile in made.items():
        cache = decoding.cache(profile)
        calls[name] = partial(decoding.run, cache)
        calls[f"{name} without"] = partial(without, cache)
    timed = decoding.in_turns(calls)
    for name in made:
        yield {
            "name": f"decode {name} with the CPU's kernel / without, {decoding}, tokens a second",
            **ratio_of(timed, f"{name} without", name),
            "note": "the same cache in turns",
        }


def bandwidth_row(model: Any, retained: int, level: str, seconds: list[float], new: int) -> Row:
    """Compare the seconds of a decoded token on CUDA with those of reading what it must read."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copies = []
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize()
        copies.append(time.perf_counter() - start)
    bandwidth = 2 * source.nbytes / statistics.median(copies)
    table = model.get_input_embeddings().weight
    tied = model.get_output_embeddings().weight is table
    weights = sum(weight.nbytes for weight in model.parameters())
    weights -= 0 if tied else table.nbytes  # of the input table a token reads one row
    bound = (weights + retained) / bandwidth
    return {
        "name": f"decode by {level}, seconds / bandwidth bound",
        **spread_of([one / new / bound for one in seconds]),
        "at_most": BANDWIDTH_TARGET,
        "note": f"bound {bound * 1e3:.2f} ms a token: {weights:,} bytes of weights and "
        f"{retained:,} retained at {bandwidth / 1e9:.0f} GB/s",
    }
