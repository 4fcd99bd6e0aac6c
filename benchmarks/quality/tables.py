"""Tables of quality cells: KL by position of every method, and what of the best peer's is left."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.accounting.costs import WIDTHS
from kvalloc.prompts.cases import POSITIONS
from kvalloc.prompts.intervals import TAILS, resampled_means, tails
from kvalloc.runtime import quantization

Row = Mapping[str, Any]

CELLS_FOLDER = Path(__file__).resolve().parent / "cells"
HELD_OUT = "held-out"
SEED = 9
"""Of the held-out prompts. A fresh one whenever a method was changed by what cells had shown."""
DEFAULT, UNFITTED = "default", "default before fit"
LEAST_KL = 0.001
"""Nats below which two losses count as equal."""
ROUNDING = hashlib.sha256(repr((WIDTHS, quantization.ROUNDING)).encode()).hexdigest()[:8]
"""Digest of how kvalloc rounds; rows of methods that it rounds for hold while this is the same."""
ANYWHERE = "at all positions"
LEAST_PROMPTS = 3
"""Fewer say nothing of where a peer is better."""
SPARE_BYTES = 1.1
"""A method is compared at a share of the bytes if it takes at most so many times these."""


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A method's loss over that of the best peer, and its 95% interval."""

    ratio: float
    low: float | None
    high: float | None
    n_prompts: int
    peer: str

    def __str__(self) -> str:
        ends = "no interval" if self.low is None else f"{self.low:.2f}..{self.high:.2f}"
        return f"{self.ratio:.2f} [{ends}] of {self.peer}, {self.n_prompts} prompts"

    def cells(self) -> dict[str, str]:
        """Return the cells of a row of RESULTS.md."""
        ends = {} if self.low is None else {"low": f"{self.low:.2f}", "high": f"{self.high:.2f}"}
        return {"figure": f"{self.ratio:.2f}", **ends, "prompts": f"{self.n_prompts}"}


def cell_file(model_id: str, cell: str) -> Path:
    """Return the path of the rows of a model's cell."""
    name = model_id.split("/")[-1].lower().removesuffix(".gguf")
    return CELLS_FOLDER / name / f"{cell}.jsonl"


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a file of cells; a line that a kill left half-written is passed over."""
    if not path.exists():
        return []
    rows = []
    for line in path.read_text(encoding="utf-8").splitlines():
        try:
            rows.append(json.loads(line))
        except json.JSONDecodeError:
            continue
    return rows


def current(rows: Sequence[Row]) -> list[Row]:
    """The latest row of each method, share and prompt, if the prompt has not changed since."""
    digests = {(row["cell"], row["seed"], row["number"]): row["digest"] for row in rows}
    latest = {
        (row["cell"], row["digest"], row["method"], row["share"]): row
        for row in rows
        if digests[row["cell"], row["seed"], row["number"]] == row["digest"]
    }
    return [*latest.values()]


def earlier_rounding(row: Row) -> bool:
    """Whether kvalloc rounded, and rounds otherwise since the row was measured."""
    peer = row["method"] == "full" or "quanto" in row["method"] or "HQQ" in row["method"]
    default = row["method"] in (DEFAULT, UNFITTED)
    rounds = not peer and (default or row["method"].endswith("bits"))
    return rounds and row.get("rounding") != ROUNDING


def at_share(rows: Sequence[Row], share: float) -> list[Row]:
    """Return rows measured at a share of the bytes, and rows without a share that fit into it."""
    return [
        row
        for row in rows
        if row["method"] != "full"
        and (
            row["share"] == share
            if row["share"] is not None
            else row["bytes"] <= SPARE_BYTES * share
        )
    ]


def mean_kl(row: Row) -> float | None:
    """Return the mean KL of the tokens after the eviction, nats; None without such tokens."""
    return weighed(row, [count for _, count in by_position(row)])


def by_position(row: Row) -> list[tuple[float | None, int]]:
    """KL and number of tokens of each range of positions; no token beyond the answer's end."""
    return [row["kl"].get(name, (None, 0)) for name in POSITIONS]


def weighed(row: Row, counts: Sequence[int]) -> float | None:
    """Mean over the positions' pieces, each as often as `counts` say."""
    total = sum(counts)
    kls = [kl for kl, _ in by_position(row)]
    if not total:
        return None
    return sum(kl * count for kl, count in zip(kls, counts, strict=True) if count) / total


def shared_kl(rows: Sequence[Row]) -> list[float | None]:
    """Mean KL of each row over the tokens that all of them predicted after their eviction."""
    counts = np.array([[count for _, count in by_position(row)] for row in rows])
    return [weighed(row, counts.min(axis=0).tolist()) for row in rows]


def by_method(rows: Iterable[Row]) -> dict[str, dict[str, dict[str, Row]]]:
    """Method, cell and prompt's digest of each row; methods in the order in which they came."""
    result: dict[str, dict[str, dict[str, Row]]] = defaultdict(lambda: defaultdict(dict))
    for row in rows:
        result[str(row["method"])][row["cell"]][row["digest"]] = row
    return result


def position_table(rows: Sequence[Row], cells: Sequence[str]) -> list[str]:
    """Methods x cells: KL by position, the bytes, the exact tokens, and prompts."""
    lines = [
        f"{'':28s}{'bytes':>7s}{'exact':>6s}{'prompts':>8s}"
        + "".join(f"{cell:>20s}" for cell in cells)
        + f"{'mean':>8s}"
    ]
    for method, result in by_method(rows).items():
        subset = [row for item in result.values() for row in item.values()]
        counts = sorted({len(result[cell]) for cell in cells})
        of_cells = [mean_of([mean_kl(row) for row in result[cell].values()]) for cell in cells]
        whole = mean_of(of_cells) if None not in of_cells else None
        lines.append(
            f"{method:28s}{np.mean([row['bytes'] for row in subset]):>7.1%}"
            f"{np.mean([row['exact'] for row in subset]):>6.0f}"
            f"{counts[0] if len(counts) == 1 else f'{counts[0]}-{counts[-1]}':>8}"
            + "".join(f"{pieces(list(result[cell].values())):>20s}" for cell in cells)
            + f"{shown(whole):>8s}"
        )
    return lines


def pieces(rows: Sequence[Row]) -> str:
    """KL at each range of positions, means over prompts; - where all was exact or ended."""
    columns = zip(*map(by_position, rows), strict=True)
    means = [mean_of([kl for kl, _ in column]) for column in columns]
    return "/".join(map(shown, means[: len(reached(rows))])) or "-"


def reached(rows: Sequence[Row]) -> list[str]:
    """The ranges of positions that an answer reaches."""
    return [name for name in POSITIONS if any(name in row["kl"] for row in rows)]


def tail_table(rows: Sequence[Row], cells: Sequence[str]) -> list[str]:
    """Methods x cells, and all cells: what `tail` says, none if no row has the KL of each token."""
    if not any(row.get("kls") for row in rows):
        return []
    lines = [f"{'':28s}{'tokens':>8s}" + "".join(f"{cell:>24s}" for cell in (*cells, "all"))]
    for method, result in by_method(rows).items():
        known = [[row for row in result[cell].values() if row.get("kls")] for cell in cells]
        known.append([row for subset in known for row in subset])
        count = sum(len(row["kls"]) for row in known[-1])
        lines.append(
            f"{method:28s}{count:>8,}" + "".join(f"{tail(subset):>24s}" for subset in known)
        )
    return lines


def tail(rows: Sequence[Row]) -> str:
    """Mean, 99% and 99.9% of the KL of all tokens of rows, and the share of equal choices."""
    if not rows:
        return "-"
    kls = np.concatenate([row["kls"] for row in rows])
    result = tails(kls.tolist())
    agreed = np.average([row["agree"] for row in rows], weights=[len(row["kls"]) for row in rows])
    figures = [shown(float(kls.mean())), *(shown(result[name]) for name in TAILS)]
    return "/".join([*figures, f"{agreed:.1%}"])


def shown(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}".removeprefix("0")


def mean_of(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else None


def against_best(rows: Sequence[Row], mine: str, cells: Sequence[str]) -> dict[str, Ratio]:
    """The ratio in each cell, and over the mean of the cells under ``mean``.

    On the prompts that a method and all peers were put to, and the tokens that all predicted after
    their evictions; a peer that was put to fewer prompts than another, and is worse on these, is
    left out. In every resample the best peer of each cell is chosen anew, which favours the peers.
    Losses below `LEAST_KL` count as that.
    """
    methods = by_method(rows)
    peers = [name for name in methods if name not in (DEFAULT, UNFITTED)]
    result: dict[str, Ratio] = {}
    ours, best, counts = [], [], []
    for cell in cells:
        names = [mine, *in_question({peer: methods[peer][cell] for peer in peers})]
        shared = set.intersection(*(set(methods[name][cell]) for name in names))
        values = [
            shared_kl([methods[name][cell][prompt] for name in names]) for prompt in sorted(shared)
        ]
        kls = np.array([row for row in values if None not in row], dtype=np.float64)
        if len(names) < 2 or not len(kls):
            continue
        (drawn,) = resampled_means([kls])
        means = np.maximum(np.concatenate([kls.mean(axis=0)[None], drawn]), LEAST_KL)
        ours.append(means[:, 0])
        best.append(means[:, 1:].min(axis=1))
        counts.append(len(kls))
        peer = names[1 + int(means[0, 1:].argmin())]
        result[cell] = ratio_of(ours[-1] / best[-1], len(kls), peer)
    if ours:
        whole = np.sum(ours, axis=0) / np.sum(best, axis=0)
        result["mean"] = ratio_of(whole, min(counts), "the best peer of each cell")
    return result


def where_peers_are_better(
    rows: Sequence[Row],
    mine: str,
    cells: Sequence[str],
    positions: Sequence[str] = tuple(POSITIONS),
) -> list[str]:
    """Return cells, positions and peers with surely a smaller loss than a method's.

    By the 95% interval of the difference over the prompts that both were put to, at least three.
    Losses below `LEAST_KL` count as equal.
    """
    methods, result = by_method(rows), []
    peers = [name for name in methods if name not in (DEFAULT, UNFITTED)]
    for cell, position, peer in itertools.product(cells, positions, peers):
        ours, of_peer = methods[mine][cell], methods[peer][cell]
        both = [(ours[one], of_peer[one]) for one in of_peer if one in ours]
        if position in POSITIONS:
            pairs = [[row["kl"].get(position, (None, 0))[0] for row in pair] for pair in both]
        else:
            pairs = [shared_kl(pair) for pair in both]
        kls = np.array([pair for pair in pairs if None not in pair], dtype=np.float64)
        if len(kls) < LEAST_PROMPTS:
            continue
        (drawn,) = resampled_means([kls])
        drawn = np.maximum(drawn, LEAST_KL)
        if np.quantile(drawn[:, 0] - drawn[:, 1], 0.025) > 0:
            result.append(f"{peer} in {cell} {position}, {len(kls)} prompts")
    return result


def in_question(peers: Mapping[str, Mapping[str, Row]]) -> list[str]:
    """Return candidates for the best peer, without peers that are worse on all of few prompts."""

    def worse(few: Mapping[str, Row], several: Mapping[str, Row]) -> bool:
        pairs = [shared_kl([few[one], several[one]]) for one in few.keys() & several.keys()]
        known = [pair for pair in pairs if None not in pair]
        return bool(known) and all(np.greater(*np.array(known, dtype=np.float64).T))

    return [
        name
        for name, item in peers.items()
        if item and not any(len(one) > len(item) and worse(item, one) for one in peers.values())
    ]


def ratio_of(values: FloatArray, n_prompts: int, peer: str) -> Ratio:
    """The first is the estimate, the others its resamples; one prompt gives no interval."""
    low, high = np.quantile(values[1:], (0.025, 0.975)) if n_prompts > 1 else (None, None)
    return Ratio(ratio=float(values[0]), low=low, high=high, n_prompts=n_prompts, peer=peer)


def answer_table(rows: Sequence[Row], cells: Sequence[str]) -> list[str]:
    """Share of the facts that each method's own answers hold, beside the full cache's."""
    lines = []
    for method, result in by_method(rows).items():
        scores = [
            [row["score"] for row in result[cell].values() if row["score"] is not None]
            for cell in cells
        ]
        if any(scores):
            means = (
                f"{np.mean(subset):.0%} of {len(subset)}" if subset else "-" for subset in scores
            )
            lines.append(f"{method:28s}" + "".join(f"{mean:>20s}" for mean in means))
    return lines
