"""Formats of other engines: beside ModelOpt's rule, and how long it takes to measure them.

    python benchmarks/bench_engines.py [modelopt] [time]

*modelopt*: each layer gets FP8, NVFP4, FP8 keys with NVFP4 values, or stays at 16 bits, at 5.4 bits
in the mean. ModelOpt's rule (NVIDIA Model-Optimizer, #2272) is the smallest sum of the losses of
single layers, K and V rounded together; ours is ``kvalloc solve --engine modelopt``. Both see the
texts for profiles, and are compared on the held-out ones, with the same rounding.
*time*: ``kvalloc profile --formats``, seconds of the clock and of the processor.
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from _common import Row, guarded, parser_of, print_rows

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.accounting.engine_formats import ENGINES, WHOLE, bytes_of
from kvalloc.allocation.engine_choice import choose
from kvalloc.formats.format_losses import FormatLosses
from kvalloc.formats.shipped_profiles import find_formats, load_file
from kvalloc.measure.format_profile import (
    SINGLE_SHARE,
    SINGLE_TOKENS,
    FormatProbe,
    profile_formats,
)
from kvalloc.measure.sampling import choose_samples
from kvalloc.models.loading import load_model, shape_of
from kvalloc.prompts.intervals import interval
from kvalloc.prompts.splits import split_texts
from kvalloc.prompts.texts import default_texts

BITS = 5.4
ENGINE = ENGINES["modelopt"]
PIECES = 3
"""Of each held-out text, one after another."""
SECONDS = 480
"""In which a profile of one engine's formats is done on two cores."""


def main() -> int:
    parser = parser_of(__doc__, ("modelopt", "time"))
    parser.add_argument("--model", default="demo")
    parser.add_argument("--formats", nargs="+", default=["llama.cpp"], help="of the part time")
    parser.add_argument(
        "--whole", action="store_true", help="ModelOpt's rule on whole texts too: an hour"
    )
    options = parser.parse_args()
    sections = {"modelopt": modelopt, "time": seconds}
    rows = (
        row
        for name in options.parts or sections
        for row in guarded(name, partial(sections[name], options))
    )
    return print_rows(rows, options, "kvalloc", "torch", "numpy")


def modelopt(options: argparse.Namespace) -> Iterator[Row]:
    """Compare both rules on held-out texts."""
    loaded, texts = load_model(options.model), default_texts()
    model, tokenizer = loaded.model, loaded.tokenizer
    source = find_formats(shape_of(model))
    losses = (
        load_file(source, [FormatLosses])
        if source
        else profile_formats(model, tokenizer, texts, formats=[ENGINE.name])
    )
    context = losses.context_tokens
    samples = choose_samples(
        texts,
        tokenizer,
        context_tokens=context,
        least_tokens=2,
        samples=losses.n_tokens // context,
        seed=0,
    )
    assert samples.digest() == losses.text_digest
    ids = [sample.token_ids for sample in samples.samples]
    index = {name: place for place, name in enumerate(losses.formats)} | {WHOLE: -1}
    pairs = np.array([[index[name] for name in pair] for pair in ENGINE.pairs])
    choice = choose(losses, ENGINE.name, bits=BITS)
    chosen = {"ours": np.array([[index[name] for name in pair] for pair in choice.pairs])}
    predicted = {"ours": choice.mean}
    first = max(-(-context // SINGLE_SHARE), SINGLE_TOKENS)  # as ours
    for count in (first, context) if options.whole else (first,):
        single = isolated(losses, model, [one[:count] for one in ids], pairs)
        name = f"ModelOpt's rule on {count} tokens of each text"
        picked = smallest_sum(single, layer_bytes(losses, context))
        chosen[name] = pairs[picked]
        predicted[name] = float(single[np.arange(len(single)), picked].sum())
    settings = np.stack([*chosen.values()])
    held_out = [
        tokenizer(text)["input_ids"][start : start + context]
        for text in split_texts("held-out").values()
        for start in range(0, (1 if options.quick else PIECES) * context, context)
    ]
    outcome = dict(zip(chosen, mean_losses(losses, model, held_out, settings).T, strict=True))
    for name, setting in chosen.items():
        mean = outcome[name].mean()
        note = f"{mean:.5f} nats on held-out texts; {stated(setting, pairs)}"
        if name != "ours":
            differ = int((setting != chosen["ours"]).any(axis=-1).sum())
            phrase = f"{differ} of {len(setting)} layers differ" if differ else "the same setting"
            both = np.stack([outcome["ours"], outcome[name]], axis=1)
            low, high = interval([both], lambda means: means[:, 0] / means[:, 1]) or (0, np.inf)
            yield {
                "name": f"ours / {name}",
                "figure": outcome["ours"].mean() / mean,
                **{"low": low, "high": high, "at_most": 1.0, "met": low <= 1},
                "note": f"{phrase}; met if the interval reaches 1",
            }
        yield {
            "name": f"{name}: predicted / measured",
            "figure": predicted[name] / mean,
            "note": note,
        }


def isolated(
    losses: FormatLosses, model: Any, texts: Sequence[IntArray], pairs: IntArray
) -> FloatArray:
    """Return the mean loss of each layer alone with each pair, ``(n_layers, n_pairs)``."""
    layers = np.arange(losses.shape.n_layers)
    settings = np.full((layers.size, len(pairs), layers.size, 2), -1)
    settings[layers, :, layers] = pairs
    changed = (pairs >= 0).any(axis=1)  # nothing is lost at 16 bits
    outcome = np.zeros(settings.shape[:2])
    flat = settings[:, changed].reshape(-1, layers.size, 2)
    outcome[:, changed] = (
        mean_losses(losses, model, texts, flat).mean(axis=0).reshape(layers.size, -1)
    )
    return outcome


def mean_losses(
    losses: FormatLosses, model: Any, texts: Sequence[Sequence[int] | IntArray], settings: IntArray
) -> FloatArray:
    """Return the mean loss of each setting on each text, ``(n_texts, n_settings)``."""
    means = []
    for text in texts:
        probe = FormatProbe(model, np.array(text), losses.formats, losses.shape)
        means.append(probe.mixed(settings)["kls"].mean(axis=1))
    return np.array(means)


def layer_bytes(losses: FormatLosses, context: int) -> IntArray:
    """Return the bytes of a layer with each pair."""
    n_layers = losses.shape.n_layers
    whole = [bytes_of(losses.shape, [pair] * n_layers, context) for pair in ENGINE.pairs]
    return np.array(whole) // n_layers


def smallest_sum(single: FloatArray, costs: IntArray) -> IntArray:
    """Return the pair of each layer with the smallest sum of losses within `BITS`, exactly."""
    costs = costs // np.gcd.reduce(costs)
    room = int(len(single) * costs.max() * BITS / 16)
    smallest, picks = np.zeros(room + 1), []
    for row in single:
        options = np.full((costs.size, room + 1), np.inf)
        for option, cost in enumerate(costs):
            options[option, cost:] = smallest[: room + 1 - cost] + row[option]
        picks.append(options.argmin(axis=0))
        smallest = options.min(axis=0)
    result = []
    for pick in reversed(picks):
        result.append(pick[room])
        room -= costs[result[-1]]
    return np.array(result[::-1])


def stated(setting: IntArray, pairs: IntArray) -> str:
    """Return how many layers have each pair."""
    counts = [int((setting == pair).all(axis=-1).sum()) for pair in pairs]
    names = [" + ".join(dict.fromkeys(pair)) for pair in ENGINE.pairs]
    return ", ".join(f"{n} layers {name}" for n, name in zip(counts, names, strict=True) if n)


def seconds(options: argparse.Namespace) -> Iterator[Row]:
    """Measure a profile of formats in a process of its own."""
    words = [word for name in options.formats for word in ("--formats", name)]
    words += ["--context", "60"] if options.quick else []
    run = "import sys; from kvalloc.cli.main import main; sys.exit(main())"
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder, "m.formats.safetensors")
        command = [sys.executable, "-c", run, "profile", options.model, *words, "-o", str(output)]
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        clock = time.perf_counter() - start
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        formats = FormatLosses.load(output).formats
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    note = f"{len(formats)} formats; {used:.0f} s of the processor"
    name = f"kvalloc profile {options.model}, formats of {', '.join(options.formats)}"
    yield {"name": name, "figure": clock, "unit": "s", "at_most": SECONDS, "note": note}


if __name__ == "__main__":
    sys.exit(main())
