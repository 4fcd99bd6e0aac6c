"""Decoding beside kvpress at the same kept share: a section of bench_runtime.py.

kvpress needs older transformers, so this runs in the environment that ``make peers`` makes; from
another one `rows_from_there` starts it. Presses decode with kvpress's own attention: one that
decides per head evicts nothing, and looks for keys that no query attends to at each token.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from _common import Row, median_of, ratio_of
from results import rows_in
from runtime_rows import Decoding

from kvalloc.accounting.costs import plain_bytes
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.models.loading import shape_of

FOLDER = Path(__file__).resolve().parent
PYTHON = FOLDER.parent / ".venv-kvpress" / "bin" / "python"
PEERS = ("kvpress:SnapKV", "kvpress:AdaKV(SnapKV)")
"""One that frees what it evicts, and one that only masks it."""


def here() -> bool:
    """Whether kvpress is installed in this environment."""
    return importlib.util.find_spec("kvpress") is not None


def rows_from_there(arguments: Sequence[str]) -> Iterator[dict[str, Any]]:
    """The rows as measured in the environment with kvpress; none, and why, where there is none."""
    if not PYTHON.exists():
        phrase = "peers: not measured, there is no .venv-kvpress; 'make peers' makes it"
        print(phrase, file=sys.stderr, flush=True)
        return
    script = str(FOLDER / "bench_runtime.py")
    command = [str(PYTHON), script, *arguments, "--only", "peers"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    if not (rows := rows_in(ran.stdout)):
        raise RuntimeError(f"{PYTHON} ended with code {ran.returncode}, see above")
    yield from rows


def run_there(*words: str) -> int:
    """Run this script with these words before its options where kvpress is; return its code."""
    if not PYTHON.exists():
        print("there is no .venv-kvpress; 'make peers' makes it", file=sys.stderr)
        return 2
    return subprocess.call([str(PYTHON), sys.argv[0], *words, *sys.argv[1:]])


class Peer:
    """A press's cache of a prompt in several rows, and what it left on the modules.

    Parameters
    ----------
    model : PreTrainedModel
    name : str
        Such as ``kvpress:SnapKV``.
    share : float
        Of the prompt's entries, to keep.
    ids : Tensor of int64, (1, n_tokens)
    rows : int
        Rows to decode.
    """

    def __init__(self, model: Any, name: str, share: float, ids: torch.Tensor, rows: int) -> None:
        from kvalloc.interop.kvpress import KvpressMethod, PeerName, read_peer_name

        request = read_peer_name(name)
        peer = PeerName(press=request.press, inner=request.inner, share=share)
        result: Any = KvpressMethod(name=peer).compress(model, ids[0].tolist())
        self.cache, self.stored_bytes = result.cache, result.stored_bytes
        self.kept_share = result.kept_bytes / plain_bytes(shape_of(model), ids.shape[1])
        self._layers = [layer.self_attn for layer in model.get_decoder().layers]
        self._masks = [
            None if hidden is None else hidden.expand(rows, -1, -1).nonzero(as_tuple=True)
            for hidden in result.hidden
        ]
        self.cache.batch_repeat_interleave(rows)

    @contextmanager
    def on_the_modules(self) -> Iterator[Any]:
        """Its masks are where kvpress's attention looks for them; the cache to decode with."""
        for module, mask in zip(self._layers, self._masks, strict=True):
            module.masked_key_indices = mask
        try:
            yield self.cache
        finally:
            for module in self._layers:
                module.masked_key_indices = None


def peer_rows(
    decoding: Decoding, profiles: Mapping[str, BudgetProfile], names: Sequence[str], share: float
) -> Iterator[Row]:
    """Compare tokens a second with those of each press, and the bytes that both store.

    Parameters
    ----------
    decoding : Decoding
    profiles : mapping of str to BudgetProfile
        By level.
    names : sequence of str
        The presses.
    share : float
        Of the prompt's entries, kept by all.
    """
    rows, ids = decoding.rows, decoding.ids
    ours = {level: decoding.cache(profile) for level, profile in profiles.items()}
    stored = {level: cache.retained_bytes // rows for level, cache in ours.items()}
    peers = {name: Peer(decoding.model, name, share, ids, rows) for name in names}

    def run(peer: Peer) -> None:
        with peer.on_the_modules() as cache:
            decoding.run(cache)

    calls: dict[str, Callable[[], object]] = {
        **{level: partial(decoding.run, cache) for level, cache in ours.items()},
        **{name: partial(run, peer) for name, peer in peers.items()},
    }
    timed = decoding.in_turns(calls)
    speed = {name: rows * decoding.new_tokens / median_of(timed, name) for name in calls}
    for name, peer in peers.items():
        for level in ours:
            yield {
                "name": f"decode by {level} / {name}, {decoding}, tokens a second",
                **ratio_of(timed, name, level),
                "note": f"{speed[level]:.1f} and {speed[name]:.1f} tokens/s; {stored[level]:,} "
                f"bytes a row stored and {peer.stored_bytes:,}; it keeps {peer.kept_share:.1%}; "
                f"transformers {version('transformers')}",
            }
