"""Long answers within the prompt's own budget, beside kvpress's presses for decoding.

    python benchmarks/bench_runtime.py long [--texts 2] [--tokens 4000] [--press SnapKV ...]

Prompts of 512 tokens of held-out texts, and as answers the texts' own next tokens. Each method
reads the prompt and then the same text, and whenever 125 tokens have followed it goes back to as
many entries: kvalloc with the profile's budgets (`decode_every`), kvpress with a
`PrefillDecodingPress` whose target takes as many bytes of a 16-bit cache. KL(full cache || method)
of the next token, SmolLM2-135M. Between two evictions the text comes in one forward, which is the
same as token by token, and better for presses that score by queries: they find the positions of
all of them. It runs in the environment that `make peers` makes, where it starts itself again. Some
minutes on two cores.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

import runtime_peers
from _common import Row, parser_of, print_rows
from bench_chat import EVERY, Reader, held_out, long_answers, ranges_of, ratio_row
from transformers import DynamicCache

import kvalloc
from kvalloc.models.loading import LoadedModel, load_model

PROFILE = "smollm2-135m-instruct-bits-20"
PROMPT = 512
PRESSES = ("SnapKV", "TOVA", "ExpectedAttention", "KeyDiff", "StreamingLLM")


def main() -> int:
    if not runtime_peers.here():
        return runtime_peers.run_there("long")
    parser = parser_of(__doc__)
    parser.add_argument("--texts", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--press", nargs="+", default=list(PRESSES))
    arguments = parser.parse_args()
    rows = rows_of(load_model("demo"), arguments)
    return print_rows(rows, arguments, "kvalloc", "kvpress", "torch", "transformers")


def rows_of(loaded: LoadedModel, arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the KL of each range of positions over that of each press."""
    profile = kvalloc.load_profile(PROFILE)
    kept = round(profile.share_at(PROMPT) * PROMPT)

    def readers() -> list[Reader]:
        ours = Reader("kvalloc", kvalloc.make_cache(loaded.model, profile, decode_every=EVERY))
        presses = ((name, press_of(name, kept)) for name in arguments.press)
        return [ours, *(Reader(name, DynamicCache(), press) for name, press in presses)]

    texts = [ids for _, ids in held_out(loaded, PROMPT + arguments.tokens, arguments.texts)]
    answers = [long_answers(loaded.model, ids, readers(), PROMPT) for ids in texts]
    for first, last, by_text, shares in ranges_of(answers, arguments.tokens):
        means = by_text.mean(0).tolist()
        for number, name in enumerate(arguments.press, 1):
            yield ratio_row(
                f"tokens {first}-{last - 1} of an answer, KL over that of DecodingPress({name})",
                means[0] / means[number],
                by_text[:, 0] / by_text[:, number],
                1.0,
                f"{means[0]:.4f} and {means[number]:.4f} nats a token at {shares[0]:.1%} and "
                f"{shares[number]:.1%} of the bytes of all tokens, {kept} entries a head",
            )


def press_of(name: str, kept: int) -> Any:
    """Return a press of kvpress that goes back to so many entries a head."""
    import kvpress

    make = getattr(kvpress, f"{name}Press")
    # a hundredth of an entry more than wanted, so that rounding never takes one away
    share = 1 - (kept + 0.01) / PROMPT
    return kvpress.PrefillDecodingPress(
        prefilling_press=make(compression_ratio=share),
        decoding_press=kvpress.DecodingPress(  # one forward is one step, see above
            base_press=make(),
            compression_interval=1,
            target_size=kept,
            hidden_states_buffer_size=EVERY,
        ),
    )
