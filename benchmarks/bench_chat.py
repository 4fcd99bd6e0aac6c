"""Conversations within a budget: turns and long answers.

    python benchmarks/bench_chat.py turns [--model demo MODEL ...] [--quick]
    python benchmarks/bench_chat.py long|memory|dfs [--model MODEL ...] [--quick]

All texts are held out from calibration: the speeches that ship, and Python's `argparse.py`. Answers
are the text's own next tokens, so that KL(full cache || reduced cache) of the next token is defined
at each of them; nats a token, all in one process.

- turns: eight turns of 250 tokens, each with an answer of 24, by ``model.generate()`` under
  ``kvalloc.apply(model, budget="20%")``, which each turn hands its cache on to. Beside it a fresh
  cache for each turn, which reads everything again. Shares are of a 16-bit cache of all tokens
  seen, from every tensor in the layers ("said" is what the cache says); tokens read are those that
  the model embeds.
- long: a prompt of 100 tokens and 4,000 that follow, in blocks of ``--block`` (1 is token by
  token), at 20%. Beside it kvpress's `CompressionRatioDecodingPress`, which keeps the same share of
  all tokens seen, and H2O, which no press decodes with sdpa: kvalloc's scorer ``h2o`` in equal
  budgets at 16 bits. These evict every 125 tokens, and read them in one forward: for a press that
  is the same as one by one, and better for SnapKV, which then finds the positions of all queries.
  Shares are means of what is stored whenever the presses have evicted.
- memory: the same within ``memory=``, 20% of the bytes of all tokens in the end, beside kvpress's
  `DecodingPress` with as many tokens as that holds after an eviction, in the model's type.
- dfs: the task of that name, whose answer is a walk through the tree of the prompt. At the end of
  each range, a copy of each cache says where the walk stands ("state") and which nodes are below
  two others ("tree"). A question counts where the full cache solves half of it. A node counts at
  its place alone, so that no list of all nodes is right.

The last three run in the environment that ``make peers`` makes, where they start themselves again.
Beside a ratio stand the smallest and the largest of a text. A KL is met only where the share was
kept as well. Stored bytes are read behind the last layer of each forward, before any eviction.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import runtime_peers
import torch
from _common import Row, guarded, parser_of, print_rows, row_met
from chat_common import LARGEST, SHARE, held_out, layer_bytes, ratio_row
from chat_long import dfs_rows, long_rows, memory_rows
from torch import Tensor
from transformers import LogitsProcessor

import kvalloc
from kvalloc.accounting.costs import full_bytes
from kvalloc.measure.kl import Predictions
from kvalloc.models.loading import LoadedModel, load_model, shape_of

PARTS = ("turns", "long", "memory", "dfs")
SIZES = {
    ("turns", False): (5, 8, 0),
    ("turns", True): (2, 4, 0),
    ("long", False): (2, 0, 4000),
    ("long", True): (1, 0, 1000),
    ("memory", False): (2, 0, 4000),
    ("memory", True): (1, 0, 1000),
    ("dfs", False): (4, 0, 4000),
    ("dfs", True): (1, 0, 600),
}
"""Texts or walks, turns, and tokens of a long answer, of each part and with ``--quick``."""
TURN, ANSWER = 250, 24


def main() -> int:
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--model", nargs="+", default=["demo"])
    parser.add_argument("--dtype", default="float32", help="of the weights and the full cache")
    parser.add_argument("--texts", type=int, help="texts, or walks")
    parser.add_argument("--turns", type=int)
    parser.add_argument("--tokens", type=int, help="of a long answer")
    parser.add_argument("--block", type=int, default=16, help="tokens of a forward of kvalloc's")
    parser.add_argument("--tree", type=int, default=220, help="tokens of a prompt with a tree")
    arguments = parser.parse_args()
    if len(arguments.parts) != 1 or arguments.parts[0] not in PARTS:
        parser.error(f"name one part: {', '.join(PARTS)}")
    part = arguments.parts[0]
    if part != "turns" and not runtime_peers.here():
        return runtime_peers.run_there()
    sizes = zip(("texts", "turns", "tokens"), SIZES[part, arguments.quick], strict=True)
    for name, size in sizes:
        setattr(arguments, name, getattr(arguments, name) or size)
    sections = dict(zip(PARTS, (turn_rows, long_rows, memory_rows, dfs_rows), strict=True))
    section, load = sections[part], partial(load_model, dtype=arguments.dtype)
    rows = (
        row
        for name in arguments.model
        for row in guarded(name, partial(section, load(name), arguments))
    )
    return print_rows(rows, arguments, "kvalloc", "kvpress", "torch", "transformers")


# Turns


class Forced(LogitsProcessor):  # type: ignore[misc]
    """Make `generate` write an answer that is known, and note what it would have written.

    Attributes
    ----------
    logits : list of Tensor, each (vocabulary,)
        Logarithms of probabilities.
    before : int
        Bytes of the cache's layers in front of the answer, at most 16 bits a number.
    """

    def __init__(self, answer: Tensor, applied: Any) -> None:
        self.answer, self.applied = answer, applied
        self.logits, self.before = list[Tensor](), 0

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        """Leave the answer's next token alone."""
        if not self.logits:
            self.before = layer_bytes(self.applied.last_cache, half=True)
        allowed = torch.full_like(scores, float("-inf"))
        allowed[:, self.answer[len(self.logits)]] = 0
        self.logits.append(scores[0].float().log_softmax(-1))
        return allowed


def conversation(
    model: Any, ids: Tensor, applied: Any, *, goes_on: bool
) -> Iterator[tuple[Any, Forced, int]]:
    """Read a text in turns and write each one's answer.

    Yields
    ------
    cache
        That of the turn before, or a fresh one where it does not go on.
    forced : Forced
    read : int
        Tokens that were embedded in this turn, those of the answer left out.
    """
    cache, embedded = None, list[int]()
    hook = model.get_input_embeddings().register_forward_hook(
        lambda module, inputs, output: embedded.append(inputs[0].shape[1])
    )
    try:
        for end in ends_of(ids.shape[1]):
            forced = Forced(ids[0, end : end + ANSWER], applied)
            embedded.clear()
            cache = model.generate(
                ids[:, :end],
                attention_mask=torch.ones_like(ids[:, :end]),
                past_key_values=cache if goes_on else None,
                max_new_tokens=ANSWER,
                do_sample=False,
                logits_processor=[forced],
                return_dict_in_generate=True,
            ).past_key_values
            yield cache, forced, sum(embedded) - ANSWER + 1
    finally:
        hook.remove()


def ends_of(tokens: int) -> range:
    """Return where the turns of a text end, their answers left out."""
    return range(TURN, tokens, TURN + ANSWER)


@torch.inference_mode()
def expected_of(model: Any, ids: Tensor) -> tuple[Tensor, ...]:
    """Return logarithms of the full cache's probabilities for the answer of each turn."""
    ends = ends_of(ids.shape[1])
    places = torch.cat([torch.arange(end - 1, end - 1 + ANSWER) for end in ends])
    logits = model(input_ids=ids, use_cache=False, logits_to_keep=places).logits[0]
    return logits.float().log_softmax(-1).split(ANSWER)


@torch.inference_mode()
def turns_of(
    model: Any, ids: Tensor, expected: Sequence[Tensor], *, goes_on: bool
) -> list[dict[str, float]]:
    """Return what each turn of a text gave: its loss, shares of the bytes, tokens read."""
    turns, ends = list[dict[str, float]](), ends_of(ids.shape[1])
    with kvalloc.apply(model, budget=f"{SHARE:.0%}") as applied:
        each = conversation(model, ids, applied, goes_on=goes_on)
        for number, (cache, forced, read) in enumerate(each):
            turns.append(
                {
                    "kl": float(
                        Predictions(expected[number]).divergences(torch.stack(forced.logits)).mean()
                    ),
                    "before": forced.before / full_bytes(shape_of(model), ends[number]),
                    "share": layer_bytes(cache, half=True)
                    / full_bytes(shape_of(model), cache.get_seq_length()),
                    "said": cache.share,
                    "read": read,
                }
            )
    return turns


def turn_rows(loaded: LoadedModel, arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield lines for each text, then what the turns keep, lose and read."""
    step = TURN + ANSWER
    figures: dict[bool, list[Tensor]] = {True: [], False: []}
    for text, ids in held_out(loaded, arguments.turns * step, arguments.texts):
        expected = expected_of(loaded.model, ids)
        for goes_on, so_far in figures.items():
            turns = turns_of(loaded.model, ids, expected, goes_on=goes_on)
            so_far.append(torch.tensor([list(turn.values()) for turn in turns]))
            how = "handed on" if goes_on else "fresh"
            lines = [f"{loaded.model_id}, {text}, {how}"]
            for name in turns[0]:
                lines.append(f"  {name:<7}" + "".join(f"{turn[name]:>9.4g}" for turn in turns))
            yield {"text": "\n".join(lines), "met": True}
    name = f"{loaded.model_id}, {arguments.turns} turns at {SHARE:.0%}"
    handed, fresh = (torch.stack(figures[goes_on]) for goes_on in (True, False))
    shares = handed[..., 2]
    largest = float(shares.max())
    yield ratio_row(
        f"{name}, largest share at a turn's end",
        largest,
        shares.amax(1),
        LARGEST,
        f"by turn {' '.join(f'{share:.1%}' for share in shares.mean(0).tolist())}; in front of "
        f"an answer at most {float(handed[..., 1].max()):.1%}",
    )
    ours, reread = handed[..., 0].mean(1), fresh[..., 0].mean(1)
    row = ratio_row(
        f"{name}, KL of the answers over that of reading all again",
        float(ours.mean() / reread.mean()),
        ours / reread,
        1.5,
        f"{ours.mean():.5f} and {reread.mean():.5f} nats a token at shares up to {largest:.1%} and "
        f"{float(fresh[..., 2].max()):.1%}, {len(ours)} texts",
    )
    yield row | {"met": row_met(row) and largest <= LARGEST}
    later, reread = handed[:, 1:, 4], fresh[:, 1:, 4]
    yield ratio_row(
        f"{name}, tokens read by a later turn over its own",
        float(later.max() / (TURN + 1)),
        later.amax(1) / (TURN + 1),
        2.0,
        f"{later.mean():.0f} tokens, and {reread.mean():.0f} where all is read again",
    )


if __name__ == "__main__":
    sys.exit(main())
