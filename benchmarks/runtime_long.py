"""Long answers within a budget: KL by position, beside kvpress's presses for decoding.

    python benchmarks/bench_runtime.py long [--tokens 4096] [--every 128] [--press SnapKV ...]

Prompts of 512 tokens, and what the full cache writes after them (sampled). Each method reads the
prompt and then the same text, and whenever so many tokens have followed it goes back to as many
entries: kvalloc with the profile's budgets (`decode_every`), kvpress with a `PrefillDecodingPress`
whose target takes as many bytes of a 16-bit cache. KL(full cache || method) of the next token,
SmolLM2-135M. Between two evictions the text comes in one forward, which is the same as
token by token, and better for presses that score by queries: they find the positions of all of
them. It runs in the environment that `make peers` makes, where it starts itself again. Some ten
minutes on two cores.
"""

from __future__ import annotations

import argparse
import importlib.util
import subprocess
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from _common import describe_where, where_it_ran
from bench_runtime import prompt_ids
from transformers import DynamicCache

import kvalloc
from kvalloc.accounting.stored import bytes_at_16_bits
from kvalloc.models.loading import load_model

PYTHON = Path(__file__).parent.parent / ".venv-kvpress" / "bin" / "python"
PROMPT_TOKENS = 512
STARTS = (256, 512, 1024, 2048)
PRESSES = ("SnapKV", "TOVA", "ExpectedAttention", "KeyDiff", "StreamingLLM")


def main() -> int:
    if importlib.util.find_spec("kvpress") is None:
        if not PYTHON.exists():
            print("there is no .venv-kvpress; 'make peers' makes it", file=sys.stderr)
            return 2
        return subprocess.call([str(PYTHON), sys.argv[0], "long", *sys.argv[1:]])
    arguments = parse_arguments()
    loaded = load_model(arguments.model)
    ids = prompt_ids(loaded, PROMPT_TOKENS * arguments.rows).view(arguments.rows, -1)
    begun = time.perf_counter()
    if arguments.text is not None and arguments.text.exists():
        answer = torch.load(arguments.text, weights_only=True)[:, : arguments.tokens]
    else:
        answer = written(loaded.model, ids, arguments)
    print(f"text written after {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    rows = compared(loaded.model, ids, answer, arguments)
    print(describe_where(where_it_ran("kvalloc", "kvpress", "torch", "transformers")))
    print(
        f"{arguments.rows} prompts of {PROMPT_TOKENS} tokens, {arguments.tokens} sampled tokens, "
        f"back to the budget every {arguments.every}; entries a KV head after an eviction and at "
        "most, bytes over the full cache's at the end, both at 16 bits, KL in nats a token"
    )
    spans = [f"{a}-{b - 1}" for a, b in spans_of(arguments.tokens)]
    print(f"{'':<40}{'entries':>8}{'most':>6}{'bytes':>7}" + "".join(f"{s:>11}" for s in spans))
    for row in rows:
        found = "".join(f"{kl:>11.4f}" for kl in row["kl"])
        print(
            f"{row['name']:<40}{row['entries']:>8.1f}{row['most']:>6.0f}{row['bytes']:>7.3f}{found}"
        )
    return int(not met(rows))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="long answers within a budget")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--profile", default="smollm2-135m-instruct-bits-20")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--every", type=int, default=128)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--temperature", type=float, default=0.7)
    parser.add_argument("--text", type=Path, help="what was written, kept for another run")
    parser.add_argument("--press", nargs="+", default=list(PRESSES))
    return parser.parse_args()


def met(rows: list[dict[str, Any]]) -> bool:
    """Whether kvalloc's profile loses less than every press at every position."""
    ours, *others = (row for row in rows if row["peer"] or row is rows[0])
    return all(a < b for other in others for a, b in zip(ours["kl"], other["kl"], strict=True))


def spans_of(tokens: int) -> list[tuple[int, int]]:
    """Where KL is measured, first position and the one after the last."""
    ends = [*STARTS[1:], tokens]
    return [(a, min(b, tokens)) for a, b in zip(STARTS, ends, strict=True) if a < tokens]


@torch.inference_mode()
def written(model: Any, ids: torch.Tensor, arguments: argparse.Namespace) -> torch.Tensor:
    """What the full cache samples after each prompt, (rows, tokens)."""
    generator, cache, found = torch.Generator().manual_seed(0), DynamicCache(), []
    for _ in range(arguments.tokens):
        logits = model(input_ids=ids, past_key_values=cache, logits_to_keep=1).logits[:, -1]
        shares = (logits.float() / arguments.temperature).softmax(-1)
        ids = torch.multinomial(shares, 1, generator=generator)
        found.append(ids)
        if len(found) % 256 == 0 or len(found) == arguments.tokens:
            print(f"{len(found)} tokens written", file=sys.stderr, flush=True)
            if arguments.text is not None:
                torch.save(torch.cat(found, dim=1), arguments.text)
    return torch.cat(found, dim=1)


class Run:
    """One method's cache, what reads with it, and what it has lost so far."""

    def __init__(self, name: str, cache: Any, press: Any = None) -> None:
        self.name, self.cache, self.press = name, cache, press
        self.losses: list[torch.Tensor] = []
        self.kept: list[float] = []

    @torch.inference_mode()
    def logits(self, model: Any, ids: torch.Tensor, first: int) -> torch.Tensor:
        """Log-probabilities of what follows each token, (rows, n, vocabulary)."""
        places = torch.arange(first, first + ids.shape[1]).expand(len(ids), -1)
        reads: AbstractContextManager[Any] = nullcontext()
        if self.press is not None:
            reads = self.press(model)
        # up to where a held prompt is evicted, and from there
        waits = getattr(self.cache, "awaited_tokens", 0)
        parts = [slice(0, waits), slice(waits, None)] if waits else [slice(None)]
        found = []
        with reads:
            for part in parts:
                inputs = {"input_ids": ids[:, part], "position_ids": places[:, part]}
                found.append(model(**inputs, past_key_values=self.cache).logits)
        return torch.cat(found, dim=1).float().log_softmax(-1)

    def entries(self) -> float:
        """Those stored, mean over rows, layers and heads."""
        if self.press is None:
            return float(self.cache.kept_tokens_by_row.mean())
        return sum(layer.keys.shape[2] for layer in self.cache.layers) / len(self.cache.layers)


def compared(
    model: Any, ids: torch.Tensor, answer: torch.Tensor, arguments: argparse.Namespace
) -> list[dict[str, Any]]:
    """All methods side by side, forward by forward, along one text."""
    every, profile = arguments.every, kvalloc.load_profile(arguments.profile)
    kept = round(profile.share_at(PROMPT_TOKENS) * PROMPT_TOKENS)
    plain = Run("full cache", DynamicCache(), nullcontext_press)
    runs = [
        Run(
            f"kvalloc {profile.policy.name}", kvalloc.make_cache(model, profile, decode_every=every)
        )
    ]
    runs += [peer(name, kept, every) for name in arguments.press]
    for run in (plain, *runs):
        run.logits(model, ids, 0)
    first = 0
    for part in answer.split(every, dim=1):
        expected = plain.logits(model, part, PROMPT_TOKENS + first)
        for run in runs:
            found = run.logits(model, part, PROMPT_TOKENS + first)
            run.losses.append((expected.exp() * (expected - found)).sum(-1))
            run.kept.append(run.entries())
        first += part.shape[1]
        print(f"{first} tokens", file=sys.stderr, flush=True)
    full_bytes = bytes_at_16_bits(plain.cache.layers)
    rows = []
    for run in runs:
        losses = torch.cat(run.losses, dim=1)
        rows.append(
            {
                "name": run.name,
                "peer": run.press is not None,
                "entries": sum(run.kept) / len(run.kept),
                "most": max(run.kept) + every,
                "bytes": bytes_at_16_bits(run.cache.layers) / full_bytes,
                "kl": [float(losses[:, a:b].mean()) for a, b in spans_of(arguments.tokens)],
            }
        )
    return rows


def nullcontext_press(model: Any) -> AbstractContextManager[None]:
    """No press."""
    return nullcontext()


def peer(name: str, kept: int, every: int) -> Run:
    """A press of kvpress that goes back to so many entries a head."""
    import kvpress

    make = getattr(kvpress, f"{name}Press")
    # a hundredth of an entry more than wanted, so that rounding never takes one away
    share = 1 - (kept + 0.01) / PROMPT_TOKENS
    press = kvpress.PrefillDecodingPress(
        prefilling_press=make(compression_ratio=share),
        decoding_press=kvpress.DecodingPress(  # one forward is one step, see above
            base_press=make(),
            compression_interval=1,
            target_size=kept,
            hidden_states_buffer_size=every,
        ),
    )
    return Run(f"kvpress DecodingPress({name})", DynamicCache(), press)
