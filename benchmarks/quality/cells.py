"""Measure cells: every method on the same held-out prompts, at the same bytes of a 16-bit cache.

    .venv-kvpress/bin/python benchmarks/quality/cells.py --shares 20 10 --samples 4

Runs in the environment with kvpress, peers and kvalloc side by side in one process. A cell is a
kind of prompts; each has a file of its own, a line for each prompt and method. It can be stopped
at any time: what stands there is not measured again. Several processes share the work where each
is given other ``--cells``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from quality.quantized import BACKENDS, quantized_cache
from quality.tables import (
    DEFAULT,
    HELD_OUT,
    POSITIONS,
    ROUNDING,
    SEED,
    UNFITTED,
    cell_file,
    earlier_rounding,
    read_rows,
)

import kvalloc
from kvalloc.accounting.costs import stored_bytes
from kvalloc.errors import KVAllocError
from kvalloc.evaluate.methods import AppliedMethod, CacheMethod, full_cache, rounded_cache
from kvalloc.evaluate.scoring import Outcome, known, measure
from kvalloc.formats.shipped_profiles import find_fitted
from kvalloc.interop.kvpress import KvpressMethod, read_peer_name
from kvalloc.models.loading import load_model, shape_of
from kvalloc.prompts.cases import Case
from kvalloc.prompts.tasks import TASKS

PEERS = (
    *("KVzip", "SnapKV", "CriticalKV(SnapKV)", "TOVA", "ExpectedAttention", "PyramidKV"),
    *("StreamingLLM", "KeyDiff", "AdaKV(SnapKV)", "CriticalAdaKV(SnapKV)"),
    "AdaKV(ExpectedAttention)",
)
ROUNDED = ("KVzip", "SnapKV", "CriticalKV(SnapKV)")
"""Presses that are also rounded to 8 and 4 bits, with as many more entries."""
PLAIN = (8, 4)
QUANTIZED = [(backend, bits) for backend in BACKENDS for bits in (4, 2)]
"""Backends of transformers' quantised cache, everything kept."""
CELLS: dict[str, tuple[str, dict[str, Any]]] = {
    "text": ("kl", {}),
    "own-answer": ("own", {}),
    "facts-inside": ("facts", {}),
    "facts-after": ("facts", {"after": True}),
    "facts-second-turn": ("facts", {"opened": True}),
}
"""Task of each cell, and where its question stands."""
RULER: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        name: (name, {"after": True})
        for name in (
            *("niah_single", "niah_multikey", "niah_multivalue", "niah_multiquery", "vt", "cwe"),
            *("fwe", "kv_retrieval", "dfs"),
        )
    },
    "tools": ("tools", {"after": True, "turns": 4}),
}
"""Cells of tasks by rule, the question after the compression; requests for tools in four turns."""
OF = 12
"""Prompts that are drawn at once; their order goes to and fro over the depths of the needles."""
ORDER = sorted(range(OF), key=lambda number: 5 * number % OF)
MOST_KEPT = 0.98
"""A press that keeps more is plain rounding."""


@dataclass(frozen=True, kw_only=True)
class Named:
    """A method by its name and the share of a 16-bit cache's bytes that it is asked for."""

    name: str
    share: float | None
    method: Any


def main() -> int:
    request = parse_arguments()
    loaded = load_model(request.model, dtype=request.dtype)
    methods = [
        one
        for one in methods_of(loaded, request)
        if not request.methods or one.name in request.methods
    ]
    until = time.monotonic() + request.seconds
    for number in ORDER[: request.samples]:
        for cell in request.cells:
            for row in measured(loaded, cell, number, methods, request):
                file = cell_file(loaded.model_id, cell)
                file.parent.mkdir(parents=True, exist_ok=True)
                with file.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(row) + "\n")
                if time.monotonic() > until:
                    print(f"stopped after {request.seconds:.0f} s; run again to go on")
                    return 3
    return 0


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="quality cells on held-out prompts")
    parser.add_argument("--model", default="demo")
    parser.add_argument("--dtype", default="float32", help="of the weights and the full cache")
    parser.add_argument("--shares", nargs="+", type=float, default=[50, 20, 10, 5], help="percent")
    parser.add_argument("--cells", nargs="+", default=list(CELLS), choices=[*CELLS, *RULER])
    parser.add_argument("--methods", nargs="*", help="only these, by the names of the tables")
    parser.add_argument("--samples", type=int, default=OF, help=f"prompts a cell, at most {OF}")
    parser.add_argument("--context", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=SEED, help="of the prompts")
    parser.add_argument("--answers", action="store_true", help="each cache answers itself")
    parser.add_argument("--seconds", type=float, default=1200, help="begin nothing after these")
    return parser.parse_args()


def methods_of(loaded: Any, request: argparse.Namespace) -> Iterator[Named]:
    """kvalloc's first, then those that many would pick, then the other presses."""
    model, shares = loaded.model, [share / 100 for share in request.shares]
    name = DEFAULT if find_fitted(shape_of(model)) else UNFITTED
    for share in shares:
        applied = AppliedMethod(options={"budget": f"{100 * share:g}%"})
        yield Named(name=name, share=share, method=applied)
    for bits in PLAIN:
        yield Named(name=f"{bits} bits", share=None, method=rounded_cache(model, bits))
    for backend, bits in QUANTIZED:
        make = partial(quantized_cache, model, backend, bits)
        name = f"{backend} {bits} bits"
        yield Named(name=name, share=None, method=CacheMethod(make_cache=make))
    peers = [(name, 16) for name in PEERS[:2]]
    peers += [(name, bits) for bits in PLAIN[::-1] for name in ROUNDED]
    yield from (one for press in peers for one in presses(loaded, *press, shares, request.methods))
    if "sliding" not in shape_of(model).layer_types:  # kvpress takes all layers for quantised ones
        for name in PEERS[:2]:
            yield from presses(loaded, name, 4, shares, request.methods, backend="quanto")
    for name in PEERS[2:]:
        yield from presses(loaded, name, 16, shares, request.methods)


def presses(
    loaded: Any,
    name: str,
    bits: int,
    shares: list[float],
    target: list[str] | None,
    *,
    backend: str | None = None,
) -> Iterator[Named]:
    """A press at so many entries as take these shares of the bytes, rounded by us or a backend.

    None that is not wanted, so that without kvpress the other methods can be measured.
    """
    phrase = name if bits == 16 else f"{name} at {bits} bits"
    phrase = phrase if backend is None else f"{name} + {backend} {bits} bits"
    if target and phrase not in target:
        return
    half = replace(shape_of(loaded.model), dtype_bytes=2)
    each = float(stored_bytes(1024, bits, half) / stored_bytes(1024, 16, half))
    for share in shares:
        if share / each > MOST_KEPT:
            continue
        peer = replace(read_peer_name(f"kvpress:{name}"), share=share / each)
        make = None
        if backend is None:
            peer = replace(peer, bits=bits)
        else:
            make = partial(quantized_cache, loaded.model, backend, bits)
        path = loaded.tokenizer.name_or_path
        method = KvpressMethod(name=peer, tokenizer_path=path, make_cache=make)
        yield Named(name=phrase, share=share, method=method)


def digest_of_case(case: Case) -> str:
    """Digest of the tokens that are read and of what is compared."""
    turn = case.turns[0]
    phrase = json.dumps([case.input_ids, turn.question_ids, turn.continuation_ids])
    return hashlib.sha256(phrase.encode()).hexdigest()[:12]


def measured(
    loaded: Any, cell: str, number: int, methods: list[Named], request: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Yield the missing rows of one prompt, one a method; the full cache's with the first."""
    case = prompts(loaded.tokenizer, cell, request.context, request.seed)[number]
    known = {"cell": cell, "number": number, "context": request.context, "seed": request.seed}
    known |= {"digest": digest_of_case(case), "rounding": ROUNDING}
    rows = read_rows(cell_file(loaded.model_id, cell))
    valid = (row for row in rows if row["digest"] == known["digest"] and not earlier_rounding(row))
    done = {key_of(row) for row in valid}
    missing = [one for one in methods if (one.name, one.share) not in done]
    if not missing:
        return
    full = measure(loaded.model, loaded.tokenizer, full_cache(loaded.model), case)
    if ("full", None) not in done:
        yield {**known, "method": "full", "share": None, **row_of(full.outcome)}
    answers = request.answers and bool(case.turns[-1].answers)
    for one in missing:
        begun = time.monotonic()
        try:
            result = measure(
                loaded.model, loaded.tokenizer, one.method, case, full, answers=answers
            ).outcome
        except KVAllocError as error:
            print(f"{cell}, prompt {number}, {one.name}: {error}", file=sys.stderr)
            continue
        seconds = round(time.monotonic() - begun, 2)
        print(f"{cell} {number}: {one.name} {one.share}, KL {result.kl}, {seconds} s", flush=True)
        yield {**known, "method": one.name, "share": one.share, **row_of(result)}


@cache
def prompts(tokenizer: Any, cell: str, context: int, seed: int) -> list[Case]:
    """The held-out prompts of a cell."""
    task, where = (CELLS | RULER)[cell]
    return TASKS[task].make(tokenizer, OF, context, seed=seed, split=HELD_OUT, **where)


def row_of(outcome: Outcome) -> dict[str, Any]:
    """Return the row of a cell: KL of each token and by position, bytes, right answers.

    Tokens before the eviction, the first ones, are left out; ``exact`` is their number.
    """
    kls = [kl for turn in outcome.kls for kl in turn]
    pieces = {}
    for name, piece in POSITIONS.items():
        if piece.start >= len(kls):
            break
        subset = known(kls[piece])
        pieces[name] = (
            [float(f"{sum(subset) / len(subset):.6g}"), len(subset)] if subset else [None, 0]
        )
    return {
        "bytes": round(outcome.bytes_at_16_bits / outcome.full_bytes_at_16_bits, 5),
        "kl": pieces,
        "kls": [float(f"{kl:.4g}") for kl in known(kls)],
        "exact": kls.count(None),
        "agree": outcome.top1_agreement,
        "score": outcome.score,
        "prefill_seconds": round(outcome.prefill_seconds, 3),
    }


def key_of(row: dict[str, Any]) -> tuple[str, float | None]:
    return row["method"], row["share"]


if __name__ == "__main__":
    print(f"kvalloc {kvalloc.__version__}", file=sys.stderr)
    sys.exit(main())
