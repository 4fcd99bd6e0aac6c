"""A slow tier: an 8-bit copy of every entry seen, from which attention reads what it needs."""

from __future__ import annotations

import os
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from kvalloc.accounting import IntArray
from kvalloc.accounting.costs import PAGE, SCALE_BYTES
from kvalloc.errors import InputError, option
from kvalloc.runtime.kept import KeptEntries
from kvalloc.runtime.packed import NO_COLUMN, LayerEntries, longer

RAM = "ram"
"""Name of the tier that lies in memory, off the device where that is a GPU."""

READ = 0.05
"""Share of the entries seen that a KV head reads for each decoded token, by default."""

AGAIN = 1 / 3
"""Share of what is read that kept entries are."""

DIRECTIONS = 8
"""Steps in which the direction is found in which keys differ most."""

CODES = 127.0
"""Largest code of a number at 8 bits."""

SCALES_BYTES = 2 * SCALE_BYTES
"""Of a record's two scales, float16: of its key and of its value."""


class Records:
    """Records of equal size, one behind the other, in memory or in a file of a folder.

    The file has no name, so that no other process writes to it and nothing is left where this one
    ends. Copies of a cache add to the same records, each behind what is there.

    Parameters
    ----------
    place : str or Path
        `RAM`, or a folder.
    before : Tensor of uint8, (n, size), optional
        What comes before all that is added, such as a map of a saved cache.

    Raises
    ------
    InputError
        If no file can be made in the folder.
    """

    def __init__(self, place: str | Path, before: Tensor | None = None) -> None:
        self.n_before = 0 if before is None else len(before)
        self.place, self.before = str(place), before if self.n_before else None
        self._file: Any = None
        self._stored: Tensor | None = None  # with some room behind, in memory
        self._count, self._lock = 0, threading.Lock()
        if self.place != RAM:
            try:
                self._file = tempfile.TemporaryFile(dir=place, buffering=0)  # noqa: SIM115
            except OSError as error:
                raise self._unwritable(error) from error
            weakref.finalize(self, self._file.close)

    def _unwritable(self, error: OSError) -> InputError:
        return InputError(
            f"the tier in {self.place} cannot be written: {error.strerror or error}; name a folder "
            f"with room, or {option('tier', RAM)}"
        )

    def __deepcopy__(self, memo: object) -> Records:
        return self

    @property
    def nbytes(self) -> int:
        """Return the bytes of all records."""
        before = 0 if self.before is None else self.before.nbytes
        return before + (0 if self._stored is None else self._count * int(self._stored.shape[1]))

    def add(self, records: Tensor) -> int:
        """Store records of uint8, (n, size), and return the number of the first.

        Raises
        ------
        InputError
            If there is no room for them in the folder.
        """
        records = records.cpu()
        with self._lock:
            first, end = self._count, self._count + len(records)
            if self._file is None:
                self._in_memory(records, end)
            else:
                self._in_file(records, first)
            self._count = end
        return self.n_before + first

    def _in_memory(self, records: Tensor, end: int) -> None:
        if self._stored is None or end > len(self._stored):
            grown = records.new_empty(max(end, 2 * self._count), records.shape[1])
            if self._stored is not None:
                grown[: self._count] = self._stored[: self._count]
            self._stored = grown
        self._stored[self._count : end] = records

    def _in_file(self, records: Tensor, first: int) -> None:
        size = int(records.shape[1])
        rest, offset = records.numpy().tobytes(), first * size
        try:
            while len(rest):
                written = os.pwrite(self._file.fileno(), rest, offset)
                rest, offset = rest[written:], offset + written
        except OSError as error:
            raise self._unwritable(error) from error
        if offset:  # an empty file has no map
            shape = (first + len(records), size)
            self._stored = torch.from_numpy(np.memmap(self._file, np.uint8, mode="c", shape=shape))

    @property
    def parts(self) -> tuple[Tensor | None, Tensor | None]:
        """Return what comes before, and what was added with some room behind, on the host."""
        return self.before, self._stored

    def read(self, numbers: Tensor) -> Tensor:
        """Return the records of these numbers, uint8, (n, size), on the host."""
        before, added = self.parts
        if before is None or added is None:
            only = added if before is None else before
            assert only is not None
            return only.index_select(0, numbers)
        late = numbers >= self.n_before
        found = before.index_select(0, numbers.masked_fill(late, 0))
        found[late] = added.index_select(0, numbers[late] - self.n_before)
        return found


class LayerTier:
    """What the slow tier holds of one layer: every entry up to the latest eviction, at 8 bits.

    Each record is a token's key and value in one KV head. Numbers of a channel are taken from the
    middle of its range among the first tokens, in units of half of that range, and rounded with
    one scale for the key and one for the value.

    Parameters
    ----------
    records : Records
        Those of all layers of a cache.
    share : float
        Of the entries seen, how many each KV head reads for a decoded token, at most.
    in_pieces : bool
        Whether one row and KV head is brought in after the other, and never a layer: so that
        `kvalloc.accounting.costs.paging_bytes` lie beside what is stored, and no more.
    """

    def __init__(self, records: Records, share: float, *, in_pieces: bool = False) -> None:
        self.records, self.share, self.in_pieces = records, share, in_pieces
        self.forget()

    def forget(self) -> None:
        """Begin anew with no entries."""
        self.numbers = torch.empty(
            0, 0, dtype=torch.long, device="cpu"
        )  # of head 0, (n_columns, batch)
        self._visible = torch.empty(0, 0, dtype=torch.bool, device="cpu")  # (batch, n_columns)
        # of keys and values the middle and half, (2, 2, n_segments, 1, dim)
        self.ranges = torch.empty(2, 2, 0, 1, 0, device="cpu")
        self.pages: Pages | None = None
        self._reads: Reads | None = None  # until entries change

    @property
    def beside_entries(self) -> list[Tensor]:
        """Return what lies with the kept entries, and not in the slow tier."""
        return [self.ranges] if self.pages is None else [self.ranges, self.pages.bias]

    @property
    def tables(self) -> list[Tensor]:
        """Return what says on the host which records are whose, and what is in which page."""
        pages = [] if self.pages is None else [self.pages.members]
        return [self.numbers, self._visible, *pages]

    def reads_all(self, new_tokens: int) -> bool:
        """Return whether so many tokens may together read everything."""
        return new_tokens * self.share >= 1 and not self.in_pieces

    def _pieces(self, n_segments: int) -> list[slice]:
        """Return the segments that are worked on together."""
        step = 1 if self.in_pieces else n_segments
        return [slice(first, first + step) for first in range(0, n_segments, step)]

    @property
    def columns(self) -> int:
        """Return the number of columns whose entries are here."""
        return len(self.numbers)

    def reads(self, kept: IntArray) -> Reads:
        """Return what each row reads for a token, given its stored entries and pages."""
        assert self.pages is not None
        if self._reads is None:
            seen = self._visible.sum(dim=1).numpy() * kept.shape[1]
            stored, pages = kept.sum(axis=1), self.pages.counts.sum(axis=1)
            self._reads = Reads.of(self.share, seen, stored - pages, pages)
        return self._reads

    def add(self, keys: Tensor, values: Tensor, visible: Tensor) -> None:
        """Add the entries of the next columns.

        Parameters
        ----------
        keys, values : Tensor, (batch, n_kv_heads, n, head_dim)
        visible : Tensor of bool, (batch, n)
            False marks padding, which is stored and never read.

        Raises
        ------
        InputError
            If there is no room for them.
        """
        batch, n_heads, n_new, _ = keys.shape
        if not n_new:
            return
        both = [own.detach().flatten(0, 1) for own in (keys, values)]
        pieces = self._pieces(batch * n_heads)
        if not self.columns:
            hidden = ~visible.to(keys.device).repeat_interleave(n_heads, dim=0)[..., None]
            ranges = [[_range(own[one].float(), hidden[one]) for one in pieces] for own in both]
            self.ranges = torch.stack([torch.cat(own, dim=1) for own in ranges])
            self.numbers = self.numbers.new_empty(0, batch)
            self._visible = self._visible.new_empty(batch, 0)
        records = torch.cat([self._coded(both, one).cpu() for one in pieces])
        first = self.records.add(records.transpose(0, 1).flatten(0, 1))
        numbers = first + torch.arange(0, n_new * batch * n_heads, n_heads, device="cpu").view(
            n_new, batch
        )
        self.numbers = torch.cat([self.numbers, numbers])
        self._visible = torch.cat([self._visible, visible], dim=1)

    def _coded(self, both: Sequence[Tensor], piece: slice) -> Tensor:
        """Return records of some segments, (n_segments, n, size)."""
        coded = [
            _coded(own[piece].float(), middle[piece], half[piece])
            for own, (middle, half) in zip(both, self.ranges, strict=True)
        ]
        parts = [scale.view(torch.uint8) for _, scale in coded]
        return torch.cat([*parts, *(codes.view(torch.uint8) for codes, _ in coded)], dim=-1)

    @property
    def saved(self) -> dict[str, Tensor]:
        """Return what a file has of a layer beside its records."""
        assert self.pages is not None
        return {"ranges": self.ranges[..., 0, :].flatten(0, 1), "pages": self.pages.members}

    def ordered(self) -> Tensor:
        """Return all records, uint8, (n_columns * batch * n_kv_heads, size), on the host."""
        n_heads = self.ranges.shape[2] // self.numbers.shape[1]
        return self.records.read(
            (self.numbers[..., None] + torch.arange(n_heads, device="cpu")).flatten()
        )

    def load(self, saved: Mapping[str, Tensor], visible: Tensor, first: int) -> int:
        """Take `saved`; return the number after the last record.

        Parameters
        ----------
        saved : mapping of Tensor
        visible : Tensor of bool, (batch, n_columns)
            Which entries are no padding.
        first : int
            Number of the first of the layer's `ordered` records.
        """
        batch, columns = visible.shape
        n_segments, self._visible = int(saved["ranges"].shape[1]), visible
        self.ranges = saved["ranges"].view(2, 2, n_segments, 1, -1)
        end = first + columns * n_segments
        self.numbers = torch.arange(first, end, n_segments // batch, device="cpu").view(
            columns, batch
        )
        self.pages = Pages.of(saved["pages"], batch)
        return end

    def select(self, rows: Tensor) -> None:
        """Let row i go on with what row ``rows[i]`` holds."""
        if not self.columns:
            return
        batch, self.numbers = int(self.numbers.shape[1]), self.numbers[:, rows]
        self._visible, self._reads = self._visible[rows], None
        self.pages = None if self.pages is None else self.pages.of_rows(rows)
        by_row = self.ranges.view(2, 2, batch, -1, *self.ranges.shape[3:])
        self.ranges = by_row[:, :, rows.to(by_row.device)].flatten(2, 3)

    def entries(self, columns: Tensor, segments: Tensor) -> tuple[Tensor, Tensor]:
        """Return keys and values of some entries, float32, (n, head_dim) each.

        Parameters
        ----------
        columns, segments : Tensor of int64, (n,)
            Where each stands in its row, and of which row and KV head it is:
            ``row * n_kv_heads + head``.
        """
        n_heads = self.ranges.shape[2] // self.numbers.shape[1]
        own = segments.cpu()
        numbers = self.numbers[columns.cpu(), own // n_heads] + own % n_heads
        records = self.records.read(numbers).to(segments.device, non_blocking=True)
        return self._decoded(records, self.ranges[:, :, segments, 0])

    def everything(self) -> tuple[Tensor, Tensor]:
        """Return keys and values of all entries, float32, (batch, n_kv_heads, n, head_dim)."""
        keys, values = self._segments(slice(None))
        shape = int(self.numbers.shape[1]), -1, self.columns, int(keys.shape[-1])
        return keys.view(shape), values.view(shape)

    def _segments(self, piece: slice) -> tuple[Tensor, Tensor]:
        """Return keys and values of some segments, float32, (n_segments, n, head_dim)."""
        n_segments = int(self.ranges.shape[2])
        heads = torch.arange(n_segments // int(self.numbers.shape[1]), device="cpu")
        numbers = (self.numbers.T[:, None] + heads[:, None]).flatten(0, 1)[piece]
        records = self.records.read(numbers.flatten()).to(self.ranges.device)
        return self._decoded(records.view(*numbers.shape, -1), self.ranges[:, :, piece])

    def _decoded(self, records: Tensor, ranges: Tensor) -> tuple[Tensor, Tensor]:
        """Return the numbers of records, (..., head_dim) each; ranges are (2, 2, ..., head_dim)."""
        scales = records[..., :SCALES_BYTES].contiguous().view(torch.float16).float() / CODES
        found, first = [], SCALES_BYTES
        for place, (middle, half) in enumerate(ranges):
            end = first + int(half.shape[-1])
            codes = records[..., first:end].view(torch.int8).float()
            found.append((codes * scales[..., place, None]).mul_(half).add_(middle))
            first = end
        return found[0], found[1]

    def kept(self, entries: LayerEntries) -> LayerEntries:
        """Return kept entries as the tier has them, as numbers of the model's type."""
        (part,) = entries.parts
        positions, lengths = part.positions[part.positions != NO_COLUMN], self.kept_of(part.lengths)
        segments = np.repeat(np.arange(lengths.size), lengths.ravel())
        own = torch.from_numpy(segments).to(positions.device)
        keys, values = self.entries(positions.long(), own)
        return LayerEntries.whole(
            KeptEntries(
                keys=keys.to(entries.like[0].dtype),
                values=values.to(entries.like[1].dtype),
                positions=positions,
                lengths=lengths,
            )
        )

    def kept_of(self, lengths: IntArray) -> IntArray:
        """Return how many of the stored entries are no pages, (batch, n_kv_heads)."""
        return lengths if self.pages is None else lengths - self.pages.counts

    def packed(self, kept: LayerEntries, bits: IntArray) -> LayerEntries:
        """Return kept entries at fewer bits, behind pages of all others.

        Parameters
        ----------
        kept : LayerEntries
            Numbers of the model's type.
        bits : ndarray of int64, (n_kv_heads,)
            All the same.
        """
        (part,) = kept.parts
        batch, n_heads = part.lengths.shape
        gone = self._visible.repeat_interleave(n_heads, dim=0)
        segments = np.repeat(np.arange(part.lengths.size), part.lengths.ravel())
        gone[torch.from_numpy(segments), part.positions.long().cpu()] = False
        found = [self._paged(one, gone[one]) for one in self._pieces(len(gone))]
        members = pad_sequence([own for of_piece, *_ in found for own in of_piece], True, -1)
        self._reads, self.pages = None, Pages.of(members, batch)
        answers = KeptEntries(
            keys=torch.cat([keys for _, keys, _ in found]).to(kept.like[0].dtype),
            values=torch.cat([values for *_, values in found]).to(kept.like[1].dtype),
            positions=part.positions.new_full((int(self.pages.counts.sum()),), NO_COLUMN),
            lengths=self.pages.counts,
        )
        return LayerEntries.packed(longer(answers, part), bits)

    def _paged(self, piece: slice, gone: Tensor) -> tuple[Tensor, ...]:
        """Return the members of some segments' pages, and their mean keys and values, (n, dim)."""
        keys, values = self._segments(piece)
        members = _similar(keys, gone.to(keys.device))
        there = members >= 0
        weights = (there / there.sum(dim=-1, keepdim=True).clamp(min=1))[..., None]
        rows = torch.arange(len(keys), device=keys.device)[:, None, None]
        both = (own[rows, members].mul_(weights).sum(dim=2) for own in (keys, values))
        means = [mean[there[..., 0]] for mean in both]
        return members, *means


@dataclass(frozen=True, kw_only=True)
class Reads:
    """How many kept entries and how many pages the KV heads of a row read together for a token.

    Attributes
    ----------
    again, pages : ndarray of int64, (batch,)
    """

    again: IntArray
    pages: IntArray

    @classmethod
    def of(cls, share: float, seen: IntArray, kept: IntArray, pages: IntArray) -> Reads:
        """Share out what may be read: at least `AGAIN` of it is kept entries, the rest whole pages.

        Parameters
        ----------
        share : float
            Of the entries seen, how many are read, at least one.
        seen, kept, pages : ndarray of int64, (batch,)
            Entries seen, those that are kept, and pages of the others, in all KV heads.
        """
        most = np.maximum((share * seen).astype(np.int64), 1)
        whole = np.minimum((most * (1 - AGAIN) / PAGE).astype(np.int64), pages)
        return cls(again=np.clip(most - whole * PAGE, 0, kept), pages=whole)


@dataclass(frozen=True, kw_only=True, eq=False)
class Pages:
    """Evicted entries in pages of similar keys, each of which answers as one entry.

    Attributes
    ----------
    counts : ndarray of int64, (batch, n_kv_heads)
        Pages of each segment, which are the first of its stored entries.
    members : Tensor of int32, (n_segments, n_pages, PAGE)
        Columns of each page's entries, on the host; -1 for none.
    bias : Tensor of float32, (n,)
        Logarithm of the size of each page, of one segment's after those of another.
    """

    counts: IntArray
    members: Tensor
    bias: Tensor

    @classmethod
    def of(cls, members: Tensor, batch: int) -> Pages:
        """Return the pages of these members, whose bias is on their device; see `members`."""
        sizes = (members >= 0).sum(dim=-1)
        return cls(
            counts=(sizes > 0).sum(dim=1).view(batch, -1).cpu().numpy(),
            members=members.to("cpu", torch.int32),
            bias=sizes[sizes > 0].float().log(),
        )

    def of_rows(self, rows: Tensor) -> Pages:
        """Return those of these rows."""
        of_row = torch.split(self.bias, self.counts.sum(axis=1).tolist())
        members = self.members.view(len(self.counts), -1, *self.members.shape[1:])
        return Pages(
            counts=self.counts[rows.numpy()],
            members=members[rows.to(members.device)].flatten(0, 1),
            bias=torch.cat([of_row[row] for row in rows.tolist()]),
        )


def _similar(keys: Tensor, gone: Tensor) -> Tensor:
    """Return pages of entries with similar keys: halved along the direction of most difference.

    Parameters
    ----------
    keys : Tensor of float32, (n_segments, n, head_dim)
    gone : Tensor of bool, (n_segments, n)
        Entries that are put into pages.

    Returns
    -------
    Tensor of int64, (n_segments, n_pages, PAGE)
        Columns, -1 for none; of each segment ``page_counts`` pages of which none is empty, first.
    """
    (n_segments, n), dim = gone.shape, int(keys.shape[-1])
    count = gone.sum(dim=1)
    pages = -(-count // PAGE)
    levels = max(int(pages.max()) - 1, 0).bit_length()
    room = PAGE << levels
    order = (~gone).byte().argsort(dim=1, stable=True)
    columns = torch.nn.functional.pad(order, (0, max(room - n, 0)))[:, :room]
    for _ in range(levels):  # one row a group: its columns, of which the first `count` are there
        there = torch.arange(columns.shape[1], device=keys.device) < count[:, None]
        segment = torch.arange(len(columns), device=keys.device) * n_segments // len(columns)
        own = keys[segment[:, None], columns]
        own.sub_(_mean(own, there)[:, None]).mul_(there[..., None])
        along = own.new_ones(len(own), dim, 1)
        for _ in range(DIRECTIONS):
            along = own.mT @ (own @ along)
            along = along / along.norm(dim=1, keepdim=True).clamp(min=1e-30)
        ranks = (own @ along)[..., 0].masked_fill(~there, torch.inf).argsort(dim=1, stable=True)
        columns = columns.gather(1, ranks)
        first = -(-pages // 2)
        split = -(-count * first // pages.clamp(min=1))
        half = columns.shape[1] // 2
        behind = (torch.arange(half, device=keys.device) + split[:, None]).clamp(max=2 * half - 1)
        columns = torch.stack([columns[:, :half], columns.gather(1, behind)], dim=1).flatten(0, 1)
        count = torch.stack([split, count - split], dim=1).flatten()
        pages = torch.stack([first, pages - first], dim=1).flatten()
    there = torch.arange(PAGE, device=keys.device) < count[:, None]
    found = columns.masked_fill(~there, -1).view(n_segments, -1, PAGE)
    filled = (found[..., 0] >= 0).byte().argsort(dim=1, stable=True, descending=True)
    return found.gather(1, filled[..., None].expand_as(found))


def _mean(numbers: Tensor, there: Tensor) -> Tensor:
    """Return the mean of those that are there, (n_groups, dim)."""
    count = there.sum(dim=1, keepdim=True).clamp(min=1)
    return (numbers * there[..., None]).sum(dim=1) / count


def _range(numbers: Tensor, hidden: Tensor) -> Tensor:
    """Return the middle of each channel's numbers and half their range, (2, n_segments, 1, dim)."""
    low = numbers.masked_fill(hidden, torch.inf).amin(dim=1, keepdim=True)
    high = numbers.masked_fill(hidden, -torch.inf).amax(dim=1, keepdim=True)
    none = low > high  # a row of padding alone
    middle, half = ((high + low) / 2).masked_fill(none, 0), ((high - low) / 2)
    return torch.stack([middle, half.masked_fill(none | (half == 0), 1)])


def _coded(numbers: Tensor, middle: Tensor, half: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes of int8, as the numbers, and the scale of each vector, float16, (..., 1)."""
    units = (numbers - middle) / half
    scale = units.abs().amax(dim=-1, keepdim=True).clamp(2.0**-14, 65504).half()
    codes = (units / scale.float() * CODES).round_().clamp_(-CODES, CODES)
    return codes.to(torch.int8), scale
