"""Decoding beside kvpress at the same kept share: a section of bench_runtime.py.

kvpress needs older transformers, so this runs in the environment that ``make peers`` makes; from
another one `rows_from_there` starts it. Presses decode with kvpress's own attention: one that
decides per head evicts nothing, and looks for keys that no query attends to at each token.
"""

from __future__ import annotations

import importlib.util
import json
import statistics
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from _common import ratio_of

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
        said = "peers: not measured, there is no .venv-kvpress; 'make peers' makes it"
        print(said, file=sys.stderr, flush=True)
        return
    script = str(FOLDER / "bench_runtime.py")
    command = [str(PYTHON), script, *arguments, "--only", "peers", "--json"]
    ran = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    try:
        printed = json.loads(ran.stdout)
    except json.JSONDecodeError as error:
        raise RuntimeError(f"{PYTHON} ended with code {ran.returncode}, see above") from error
    versions = printed["where"]["versions"]
    for row in printed["rows"]:
        yield {**row, "note": f"{row['note']}; transformers {versions['transformers']}"}


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

        asked = read_peer_name(name)
        peer = PeerName(press=asked.press, inner=asked.inner, share=share)
        found: Any = KvpressMethod(name=peer).compress(model, ids[0].tolist())
        self.cache, self.stored_bytes = found.cache, found.stored_bytes
        self.kept_share = found.kept_bytes / full_bytes(found, ids.shape[1])
        self._layers = [layer.self_attn for layer in model.get_decoder().layers]
        self._masks = [
            None if hidden is None else hidden.expand(rows, -1, -1).nonzero(as_tuple=True)
            for hidden in found.hidden
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


def full_bytes(found: Any, n_tokens: int) -> int:
    """Bytes of K and V of the whole prompt, one row."""
    return sum(
        2 * layer.keys.shape[1] * n_tokens * layer.keys.shape[3] * layer.keys.element_size()
        for layer in found.cache.layers
    )


def peer_rows(
    model: Any,
    ours: Mapping[str, Any],
    names: Sequence[str],
    *,
    share: float,
    ids: torch.Tensor,
    rows: int,
    new_tokens: int,
    decode: Callable[[Any], None],
    in_turns: Callable[[Mapping[str, Callable[[], object]]], Any],
) -> Iterator[dict[str, Any]]:
    """Tokens a second of our caches over those of each press, and the bytes that both store.

    Parameters
    ----------
    model : PreTrainedModel
    ours : mapping of str to BudgetCache
        By level, each with one row of the prompt.
    names : sequence of str
        The presses.
    share : float
        Of the prompt's entries, kept by all.
    ids : Tensor of int64, (1, n_tokens)
        The prompt.
    rows, new_tokens : int
        Rows, and tokens that `decode` adds to each.
    decode, in_turns : callable
        As the other sections measure.
    """
    stored = {level: cache.retained_bytes for level, cache in ours.items()}
    peers = {name: Peer(model, name, share, ids, rows) for name in names}
    for cache in ours.values():
        cache.batch_repeat_interleave(rows)

    def run(peer: Peer) -> None:
        with peer.on_the_modules() as cache:
            decode(cache)

    calls: dict[str, Callable[[], object]] = {
        **{level: lambda one=cache: decode(one) for level, cache in ours.items()},
        **{name: lambda one=peer: run(one) for name, peer in peers.items()},
    }
    found = in_turns(calls)
    speed = {name: rows * new_tokens / statistics.median(found[name][0]) for name in calls}
    for name, peer in peers.items():
        for level in ours:
            yield {
                "name": f"decode by {level} / {name}, {rows} rows of {ids.shape[1]:,}, "
                "tokens a second",
                **ratio_of(found, name, level),
                "stored_bytes": stored[level],
                "peer_stored_bytes": peer.stored_bytes,
                "peer_kept_share": peer.kept_share,
                "note": f"{speed[level]:.1f} and {speed[name]:.1f} tokens/s; {stored[level]:,} "
                f"bytes a row stored and {peer.stored_bytes:,}; it keeps {peer.kept_share:.1%}",
            }


if __name__ == "__main__":
    sys.exit("this is a section of bench_runtime.py: run that with --only peers")
