"""A reduced cache against a plain one: prefill with eviction, decoding, batch that fits, bytes.

    python benchmarks/bench_runtime.py cache [--quick]
    python benchmarks/bench_runtime.py cache --only peers --peer kvpress:SnapKV
    python benchmarks/bench_runtime.py late | decoding | gpu | plan | blend
    python benchmarks/bench_runtime.py lossless

Other parts are in files of their own: what the default's ways cost (`runtime_late`), decoding on
the CPU beside what bounds it (`runtime_decoding`), a CUDA device (`runtime_gpu`), what
`kvalloc plan` predicts (`runtime_plan`), answers without loss
(`runtime_lossless`), and documents that were read one by one (`runtime_blend`). Of ``cache``:

Compared calls run interleaved in one process; a figure is the median of the ratios of each round,
with their quartiles, in time on the clock and, on the CPU, in processor time. One round before the
first is not counted. A prompt takes seconds and its ratio is steady, so ``--repeats`` rounds do;
decoded tokens take less and swing more, so all that decodes has ``--decode-rounds``, in each of
which every cache goes on by ``--new-tokens`` in each row.

- prefill: one prompt of ``--prefill-tokens`` with eviction, by layer and by head, against the
  same with a plain cache.
- decode: tokens a second at ``--batch`` rows of ``--tokens``. The prompt is prefilled for real,
  once for each cache, and its row repeated. In the same turns also what bounds the ratio: the model
  with a cache of a few tokens, whose time no cache can save, and a plain cache of as many entries
  as are kept by layer, which reads the same bytes. On the CPU in float32 all of it twice, both
  times from the end of the prompt: with the model's products as torch makes them, and by oneDNN
  (`packed_products`), for all caches alike, because some processors take most of a step for them.
- batch, a part of decode: rows that fit into the bytes of K and V that a plain cache of ``--batch``
  rows takes, both with the prompt and 63 decoded tokens in each row , however many the
  rounds decode. The reduced cache is brought to that many rows, its storage is measured, and
  it decodes.
- kernel (CPU): tokens a second with the kernel in C over those of torch's operations, by level and
  for heads at 8 and 4 bits.
- bits: tokens a second at 8 and 4 bits over those at 16, the same entries by head.
- peers: tokens a second beside presses of kvpress at the same kept share, and the bytes that both
  store, in the environment that ``make peers`` makes; left out where there is none.

``--shape 8b`` is a model of 8 billion parameters' shape with random weights, in bfloat16, and
made-up budgets; its prefill is as long as ``--context``. ``--shape tiny`` tries the same paths.
``--quick`` takes short prompts, two rows and two rounds where nothing else is asked for.
"""

from __future__ import annotations

import argparse
import copy
import importlib
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from importlib import resources
from typing import Any

import numpy as np
import runtime_peers
import torch
from _common import InTurns, Row, guarded, in_turns, parser_of, print_rows, ratio_of
from packed_products import packed_products
from runtime_rows import (
    Decoding,
    bits_rows,
    fits_rows,
    kernel_rows,
    kernel_state,
    prefill,
    stored_bytes,
)
from transformers import DynamicCache

import kvalloc
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.models.loading import load_model, shape_of

PREFILL_TARGET = 1.08
DECODE_TARGETS = {"layer": 4.0, "head": 3.5}
DENSE_RATIO = 4.2
"""What plain caches of the same bytes reached when the targets for decoding were set."""
FEW_TOKENS = 8
BATCH_TARGET = 4.5
SINKS, WINDOW = 4, 8
PARTS = {"cache": ""}
PARTS |= {
    name: f"runtime_{name}" for name in ("late", "decoding", "gpu", "plan", "lossless", "blend")
}
QUICK = {"prefill_tokens": 512, "tokens": 512, "batch": 2, "repeats": 2, "decode_rounds": 2}
LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
}
SHAPES = {
    "8b": LLAMA_8B,
    "tiny": LLAMA_8B
    | {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4, "vocab_size": 1024}
    | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32},
}


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] in PARTS:
        name = sys.argv.pop(1)
        if PARTS[name]:
            result: int = importlib.import_module(PARTS[name]).main()
            return result
    arguments = parse_arguments()
    model, profiles = (made_up if arguments.shape else real)(arguments)
    device = arguments.device or f"cpu, {torch.get_num_threads()} threads, {kernel_state()}"
    name = f"shape {arguments.shape}" if arguments.shape else arguments.model
    print(
        f"{name}, {arguments.dtype} on {device}; {arguments.share} kept; "
        f"rounds: {arguments.repeats} of prefill, {arguments.decode_rounds} of decoding"
    )
    rows = all_rows(model, profiles, arguments)
    return print_rows(rows, arguments, "kvalloc", "torch", "transformers", "kvpress")


def parse_arguments(**defaults: object) -> argparse.Namespace:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--shape", choices=list(SHAPES), help="instead: random weights")
    parser.add_argument("--share", default="20%")
    parser.add_argument("--prefill-tokens", type=count, help="4096, or those of a --shape's prompt")
    parser.add_argument(
        *("--tokens", "--context"), type=count, default=8192, help="prompt of the decoded rows"
    )
    parser.add_argument("--batch", type=count, default=4)
    parser.add_argument("--new-tokens", type=count, default=8, help="decoded in each round")
    parser.add_argument("--repeats", type=count, default=7, help="rounds of prefill")
    parser.add_argument("--decode-rounds", type=count, default=9, help="rounds of decoding")
    parser.add_argument("--device")
    parser.add_argument("--dtype", help="float32, or bfloat16 with --shape")
    parser.add_argument(
        "--only", nargs="+", choices=["prefill", "decode", "kernel", "bits", "peers"]
    )
    parser.add_argument("--peer", nargs="+", default=list(runtime_peers.PEERS))
    parser.set_defaults(**defaults)
    if parser.parse_args().quick:
        parser.set_defaults(**QUICK)  # what is asked for by name stays
    result = parser.parse_args()
    if result.dtype is None:
        result.dtype = "bfloat16" if result.shape else "float32"
    if result.prefill_tokens is None:
        result.prefill_tokens = result.tokens if result.shape else 4096
    return result


def count(text: str) -> int:
    """A number of tokens, rows or rounds."""
    result = int(text) if text.isascii() and text.isdigit() else 0
    if result < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 1 on")
    return result


# What is measured


def real(arguments: argparse.Namespace) -> tuple[Any, dict[str, BudgetProfile]]:
    """A real model with budgets from its own scores."""
    loaded = load_model(arguments.model, dtype=arguments.dtype, device=arguments.device)
    scores = kvalloc.profile(loaded.model, loaded.tokenizer, [text()], samples=1, context=512)
    solved = {
        level: kvalloc.solve(scores, budget=arguments.share, level=level, context=arguments.tokens)
        for level in DECODE_TARGETS
    }
    arguments.ids = prompt_ids(loaded, max(arguments.prefill_tokens, arguments.tokens))
    return loaded.model, solved


def made_up(arguments: argparse.Namespace) -> tuple[Any, dict[str, BudgetProfile]]:
    """Random weights of an 8B model's shape, and budgets that differ as real ones do."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**SHAPES[arguments.shape], dtype=arguments.dtype)
    with torch.device(arguments.device or "cpu"):
        model: Any = LlamaForCausalLM._from_config(config, attn_implementation="sdpa")
    model = model.to(getattr(torch, arguments.dtype)).eval()
    model.config._name_or_path = f"random-{arguments.shape}"
    context, share = arguments.tokens, float(arguments.share.rstrip("%")) / 100
    shape = shape_of(model)
    spread = np.random.default_rng(0).lognormal(0.0, 0.5, (shape.n_layers, shape.n_kv_heads))
    profiles = {}
    for level in DECODE_TARGETS:
        aim = spread if level == "head" else spread.mean(axis=1, keepdims=True) + 0 * spread
        budgets = np.floor(aim / aim.mean() * share * context).astype(np.int64)
        profiles[level] = BudgetProfile(
            shape=shape,
            level=level,  # type: ignore[arg-type]
            context_tokens=context,
            budgets=np.clip(budgets, SINKS + WINDOW, context),
            policy=Policy(
                scorer="xkv",
                scorer_parameters={"window": WINDOW},
                sinks=SINKS,
                window=WINDOW,
            ),
        )
    generator = torch.Generator().manual_seed(0)
    aim = max(arguments.prefill_tokens, context)
    ids = torch.randint(2, config.vocab_size, (1, aim), generator=generator)
    arguments.ids = ids.to(model.device)
    return model, profiles


def text() -> str:
    folder = resources.files("kvalloc.data.texts")
    names = sorted(entry.name for entry in folder.iterdir() if entry.name.startswith("profile_"))
    return "\n".join((folder / name).read_text(encoding="utf-8") for name in names)


def prompt_ids(loaded: Any, length: int) -> torch.Tensor:
    """Return the first tokens of the texts, which repeat if they are too short, (1, length)."""
    ids = loaded.tokenizer(text(), return_tensors="pt")["input_ids"]
    repeated: torch.Tensor = ids.repeat(1, -(-length // ids.shape[1]))[:, :length]
    return repeated.to(loaded.model.device)


def all_rows(
    model: Any, profiles: dict[str, BudgetProfile], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """The rows of all sections."""
    make: dict[str, Callable[[], Any]] = {
        "plain": lambda: DynamicCache(config=model.config),
        **{
            level: lambda one=one: kvalloc.make_cache(model, one) for level, one in profiles.items()
        },
    }
    decoding = Decoding(
        model=model,
        ids=arguments.ids[:, : arguments.tokens],
        rows=arguments.batch,
        new_tokens=arguments.new_tokens,
        rounds=arguments.decode_rounds,
    )
    aim = arguments.only or ["prefill", "decode", "kernel", "bits", "peers"]
    if "prefill" in aim:
        yield from guarded("prefill", lambda: prefill_rows(model, make, arguments))
    if "decode" in aim:
        yield from guarded("decode", lambda: decode_rows(decoding, make, arguments.dtype))
    if "kernel" in aim and model.device.type == "cpu":
        yield from guarded("kernel", lambda: kernel_rows(decoding, profiles))
    if "bits" in aim:
        yield from guarded("bits", lambda: bits_rows(decoding, profiles["head"]))
    if "peers" in aim:
        yield from guarded("peers", lambda: peer_rows(decoding, profiles, arguments))


def prefill_rows(
    model: Any,
    make: Mapping[str, Callable[[], Any]],
    arguments: argparse.Namespace,
    levels: Iterable[str] = DECODE_TARGETS,
) -> list[dict[str, Any]]:
    ids = arguments.ids[:, : arguments.prefill_tokens]
    result = in_turns(
        {name: lambda new=new: prefill(model, new(), ids) for name, new in make.items()},
        repeats=arguments.repeats,
    )
    plain = statistics.median(result["plain"][0])
    return [
        {
            "name": f"prefill by {level} / plain, {ids.shape[1]:,} tokens",
            **ratio_of(result, level, "plain"),
            "at_most": PREFILL_TARGET,
            "note": f"plain {plain:.2f} s",
        }
        for level in levels
    ]


def decode_rows(
    decoding: Decoding, make: Mapping[str, Callable[[], Any]], dtype: str
) -> Iterator[Row]:
    """Compare tokens a second, and count the rows that fit."""
    model, rows, new = decoding.model, decoding.rows, decoding.new_tokens
    caches = {name: prefill(model, one(), decoding.ids) for name, one in make.items()}
    full = stored_bytes(caches["plain"])
    stored = {
        level: f"{caches[level].retained_bytes:,} bytes a row retained of {full:,}"
        for level in DECODE_TARGETS
    }
    kept = caches["layer"].kept_tokens.max(axis=1)
    bounds = {
        "dense": shortened(model, caches["plain"], kept),
        "alone": shortened(model, caches["plain"], np.minimum(kept, FEW_TOKENS)),
    }
    timed = decoded_in_turns(decoding, caches | bounds)
    yield from decode_ratios(timed, str(decoding), rows * new, stored)
    if dtype == "float32" and not decoding.ids.is_cuda:
        with packed_products(model, rows):
            timed = decoded_in_turns(decoding, caches | bounds)
        yield from decode_ratios(timed, f"{decoding}, products by oneDNN", rows * new, stored)
    yield from fits_rows(caches, model=model, rows=rows, target=BATCH_TARGET)


def decoded_in_turns(decoding: Decoding, caches: Mapping[str, Any]) -> InTurns:
    """Decode with rows of copies of these caches.

    With copies, the next measurement also begins at the end of the prompt.
    """
    several = {name: copy.deepcopy(cache) for name, cache in caches.items()}
    for cache in several.values():
        cache.batch_repeat_interleave(decoding.rows)
    return decoding.in_turns(
        {name: partial(decoding.run, cache) for name, cache in several.items()}
    )


def decode_ratios(
    result: InTurns, prompt: str, tokens: int, stored: Mapping[str, str]
) -> Iterator[dict[str, Any]]:
    """Reduced against plain, and against a plain cache of the same bytes, which bounds it."""
    speed = {name: tokens / statistics.median(seconds) for name, (seconds, _) in result.items()}
    for level, target in DECODE_TARGETS.items():
        yield {
            "name": f"decode by {level} / plain, {prompt}, tokens a second",
            **ratio_of(result, "plain", level),
            "at_least": target,
            "note": f"{speed[level]:.1f} and {speed['plain']:.1f} tokens/s; {stored[level]}",
        }
        yield {
            "name": f"decode by {level} / plain cache of the same bytes, {prompt}",
            **ratio_of(result, "dense", level),
            "at_least": target / DENSE_RATIO,
            "note": f"{speed['dense']:.1f} tokens/s, {speed['dense'] / speed['plain']:.2f} of the "
            f"plain cache's; the model alone {speed['alone']:.1f}; without the model's own time "
            f"the plain cache takes {beyond_the_model(result, level):.1f} times as long",
        }


def peer_rows(
    decoding: Decoding, profiles: Mapping[str, BudgetProfile], arguments: argparse.Namespace
) -> Iterator[Row]:
    """Measure beside kvpress, in its environment."""
    if not runtime_peers.here():
        return runtime_peers.rows_from_there(options_of(arguments))
    share = float(arguments.share.rstrip("%")) / 100
    return runtime_peers.peer_rows(decoding, profiles, arguments.peer, share)


def shortened(model: Any, cache: DynamicCache, tokens: Any) -> DynamicCache:
    """A plain cache of the first so many entries of each layer."""
    short = DynamicCache(config=model.config)
    for index, (layer, count) in enumerate(zip(cache.layers, tokens.tolist(), strict=True)):
        keys, values = (states[:, :, :count].clone() for states in (layer.keys, layer.values))
        short.update(keys, values, index)
    return short


def beyond_the_model(result: InTurns, level: str) -> float:
    """Median ratio of plain to reduced, each less what the model alone takes in that round."""
    rounds = zip(*(result[name][0] for name in ("plain", level, "alone")), strict=True)
    return statistics.median(
        (plain - item) / max(ours - item, 1e-9) for plain, ours, item in rounds
    )


# What is passed on and said


def options_of(arguments: argparse.Namespace) -> list[str]:
    """Return the arguments by which another process measures the same rows."""
    result = ["--peer", *arguments.peer]
    names = ("model", "shape", "share", "tokens", "batch", "new_tokens", "decode_rounds")
    for name in (*names, "repeats", "device", "dtype", "prefill_tokens"):
        value = getattr(arguments, name)
        result += [] if value is None else [f"--{name.replace('_', '-')}", str(value)]
    return result


if __name__ == "__main__":
    sys.exit(main())
