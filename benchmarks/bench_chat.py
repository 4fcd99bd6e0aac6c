"""Conversations within a budget: turns and long answers.

    python benchmarks/bench_chat.py turns [--model demo MODEL ...] [--quick]
    python benchmarks/bench_chat.py long [--model MODEL] [--quick]

All texts are held out from calibration: the speeches that ship, and Python's `argparse.py`. Answers
are the text's own next tokens, so that KL(full cache || reduced cache) of the next token is defined
at each of them; nats a token, all in one process.

- turns: eight turns of 250 tokens, each with an answer of 24, by ``model.generate()`` under
  ``kvalloc.apply(model, budget="20%")``, which each turn hands its cache on to. Beside it a fresh
  cache for each turn, which reads everything again. Shares are of a 16-bit cache of all tokens
  seen, from every tensor in the layers ("said" is what the cache says); tokens read are those that
  the model embeds.
- long: a prompt of 100 tokens and 4,000 that follow, in blocks of ``--block`` (1 is token by
  token), beside kvpress's `CompressionRatioDecodingPress`, which keeps the same share of all tokens
  seen. A press evicts every 125 tokens, and reads them in one forward: that is the same as one by
  one, and better for SnapKV, which then finds the positions of all queries. Shares are means of
  what is stored whenever the presses have evicted. It runs in the environment that ``make peers``
  makes, where it starts itself again.
Beside a ratio stand the smallest and the largest of a text. A KL is met only where the share was
kept as well.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from importlib import resources
from typing import Any

import runtime_peers
import torch
from _common import Row, guarded, parser_of, print_rows, row_met
from torch import Tensor, nn
from transformers import DynamicCache, LogitsProcessor

import kvalloc
from kvalloc.accounting.costs import full_bytes
from kvalloc.accounting.stored import storages
from kvalloc.measure.kl import Predictions
from kvalloc.models.loading import LoadedModel, load_model, shape_of
from kvalloc.shape import HALF_BYTES

PARTS = ("turns", "long")
SIZES = {
    ("turns", False): (5, 8, 0),
    ("turns", True): (2, 4, 0),
    ("long", False): (2, 0, 4000),
    ("long", True): (1, 0, 1000),
}
"""Texts, turns and tokens of a long answer, of each part and with ``--quick``."""
TEXTS = ("ford_1976", "hayes_1878", "hoover_1930", "truman_1950", "argparse.py")
SHARE, LARGEST = 0.2, 0.22
"""What is to be kept, and the largest share that counts as kept."""
TURN, ANSWER = 250, 24
PROMPT, STARTS, INTERVAL = 100, (0, 500, 1000, 2000), 125
"""Of long answers: tokens in front, where ranges begin, tokens between a press's evictions."""
PRESSES: dict[str, dict[str, int]] = {"TOVA": {}, "SnapKV": {"window_size": 16}}
"""With parameters: 20 of 100 tokens stay, and a window of 64, the default, would leave no sink."""


def main() -> int:
    parser = parser_of(__doc__, PARTS)
    parser.add_argument("--model", nargs="+", default=["demo"])
    parser.add_argument("--texts", type=int)
    parser.add_argument("--turns", type=int)
    parser.add_argument("--tokens", type=int, help="of a long answer")
    parser.add_argument("--block", type=int, default=16, help="tokens of a forward of kvalloc's")
    arguments = parser.parse_args()
    if len(arguments.parts) != 1 or arguments.parts[0] not in PARTS:
        parser.error(f"name one part: {', '.join(PARTS)}")
    part = arguments.parts[0]
    if part == "long" and not runtime_peers.here():
        return runtime_peers.run_there()
    sizes = zip(("texts", "turns", "tokens"), SIZES[part, arguments.quick], strict=True)
    for name, size in sizes:
        setattr(arguments, name, getattr(arguments, name) or size)
    section = {"turns": turn_rows, "long": long_rows}[part]
    rows = (
        row
        for name in arguments.model
        for row in guarded(name, partial(section, load_model(name), arguments))
    )
    return print_rows(rows, arguments, "kvalloc", "kvpress", "torch", "transformers")


# Texts, and what a cache stores


def held_out(loaded: LoadedModel, tokens: int, texts: int) -> Iterator[tuple[str, Tensor]]:
    """Yield names and first tokens of texts that nothing was calibrated on, each (1, tokens)."""
    folder = resources.files("kvalloc.data.texts")
    for name in TEXTS[:texts]:
        speech = folder / f"heldout_{name}.txt"
        text = inspect.getsource(argparse) if name.endswith(".py") else speech.read_text("utf-8")
        yield name, loaded.tokenizer(text, return_tensors="pt")["input_ids"][:, :tokens]


def tensors_in(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield every tensor that an object refers to, weights of modules left out."""
    if isinstance(thing, nn.Module) or callable(thing) or id(thing) in seen:
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
    elif isinstance(thing, list | tuple | dict):
        for inner in thing.values() if isinstance(thing, dict) else thing:
            yield from tensors_in(inner, seen)
    elif hasattr(thing, "__dict__"):
        yield from tensors_in(vars(thing), seen)


def layer_bytes(cache: Any, *, half: bool = False) -> int:
    """Return the bytes of all storages in a cache's layers; by half, at most 16 bits a number."""
    return sum(
        storage.nbytes() * (min(one.itemsize, HALF_BYTES) if half else one.itemsize) // one.itemsize
        for storage, _, one in storages(tensors_in(cache.layers, set()))
    )


def ratio_row(name: str, ratio: float, ratios: Tensor, target: float, note: str) -> Row:
    """Return a row with the smallest and the largest ratio of a text beside the ratio."""
    spread = {"low": float(ratios.min()), "high": float(ratios.max())}
    return {"name": name, "figure": ratio, **spread, "at_most": target, "note": note}


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


# Long answers


class Reader:
    """One method's cache of a text, what reads with it, and what it has lost so far."""

    def __init__(self, name: str, cache: Any, press: Any = None) -> None:
        self.name, self.cache, self.press = name, cache, press
        self.kl, self.shares = list[Tensor](), list[float]()

    def logits(self, model: Any, ids: Tensor, first: int, block: int | None = None) -> Tensor:
        """Read tokens from a position on; return logarithms of probabilities, (n, vocabulary)."""
        parts = []
        with nullcontext() if self.press is None else self.press(model):
            for part in ids.split(block or ids.shape[1], dim=1):
                positions = torch.arange(first, first + part.shape[1])[None]
                out = model(input_ids=part, position_ids=positions, past_key_values=self.cache)
                self.cache = out.past_key_values
                parts.append(out.logits[0].float().log_softmax(-1))
                first += part.shape[1]
        return torch.cat(parts)


def press_of(name: str) -> Any:
    """Return a press that keeps the share of all tokens seen."""
    import kvpress

    make = partial(getattr(kvpress, f"{name}Press"), **PRESSES[name])
    return kvpress.PrefillDecodingPress(
        prefilling_press=make(compression_ratio=1 - SHARE),
        decoding_press=kvpress.CompressionRatioDecodingPress(
            base_press=make(),
            target_compression_ratio=1 - SHARE,
            compression_interval=1,  # one forward is one step
            hidden_states_buffer_size=INTERVAL,
        ),
    )


@torch.inference_mode()
def long_answers(
    model: Any, ids: Tensor, readers: list[Reader], prompt: int, block: int | None = None
) -> list[Reader]:
    """Let all methods read a text side by side, the first one by blocks; return them."""
    plain = Reader("full cache", DynamicCache(config=model.config))
    for reader in (plain, *readers):
        reader.logits(model, ids[:, :prompt], 0)
    for first in range(prompt, ids.shape[1], INTERVAL):
        part = ids[:, first : first + INTERVAL]
        expected = plain.logits(model, part, first)
        whole = full_bytes(shape_of(model), first + part.shape[1])
        for reader in readers:
            logits = reader.logits(model, part, first, block if reader is readers[0] else None)
            reader.kl.append(Predictions(expected).divergences(logits))
            reader.shares.append(layer_bytes(reader.cache, half=True) / whole)
    return readers


def ranges_of(
    answers: Sequence[Sequence[Reader]], tokens: int
) -> Iterator[tuple[int, int, Tensor, list[float]]]:
    """Yield ranges of positions, the KL in them, (texts, methods), and each method's share."""
    losses = torch.stack([torch.stack([torch.cat(one.kl) for one in text]) for text in answers])
    shares = torch.tensor([[one.shares for one in text] for text in answers])
    for first, end in zip(STARTS, [*STARTS[1:], tokens], strict=True):
        if first < tokens:
            last = min(end, tokens)
            kept = shares[..., first // INTERVAL : end // INTERVAL].mean((0, 2)).tolist()
            yield first, last, losses[..., first:last].mean(-1), kept


def long_rows(loaded: LoadedModel, arguments: argparse.Namespace) -> Iterator[Row]:
    """Yield the KL of each range of positions over that of the better press."""
    tokens, answers = arguments.tokens // INTERVAL * INTERVAL, []
    for _, ids in held_out(loaded, PROMPT + tokens, arguments.texts):
        presses = [Reader(name, DynamicCache(), press_of(name)) for name in PRESSES]
        readers = [Reader("kvalloc", None), *presses]
        with kvalloc.apply(loaded.model, budget=f"{SHARE:.0%}"):
            answers.append(long_answers(loaded.model, ids, readers, PROMPT, arguments.block))
    names = ["kvalloc", *PRESSES]
    for first, last, by_text, kept in ranges_of(answers, tokens):
        means = by_text.mean(0).tolist()
        best = means.index(min(means[1:]))
        row = ratio_row(
            f"{loaded.model_id}, tokens {first}-{last - 1} of an answer, KL over that "
            f"of {names[best]}",
            means[0] / means[best],
            by_text[:, 0] / by_text[:, best],
            0.5,
            ", ".join(map("{} {:.4f} at {:.1%}".format, names, means, kept)),
        )
        yield row | {"met": row_met(row) and kept[0] <= LARGEST}


if __name__ == "__main__":
    sys.exit(main())
