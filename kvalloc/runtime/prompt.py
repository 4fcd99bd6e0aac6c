"""Prompts: which layers evict after reading, and the second read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from kvalloc.accounting import IntArray
from kvalloc.errors import UnsupportedRequestError, option
from kvalloc.models import names
from kvalloc.models.structure import context_limit
from kvalloc.runtime import plan, refusals
from kvalloc.runtime.door import Batch, Columns
from kvalloc.runtime.evict import Eviction, Running, evict, wanted_queries
from kvalloc.runtime.notes import Notes, of_row
from kvalloc.runtime.rows import Row, alike, repeats_of, with_scattered
from kvalloc.runtime.second_read import HeldPrompt, PromptLayer, check_context
from kvalloc.runtime.tail import rows_of
from kvalloc.scorers import Scorer
from kvalloc.scorers.repeats import repeat_counts


class ReadTokens:
    """Tokens and positions of a prompt, stored for its second read.

    `positions`, int64, (n_axes, rows, n_columns), are on the host. `tokens`, (rows, n_columns,
    ...), are the decoder's arguments; `IMAGE_PLACES` are places in `features`, or -1. These,
    (n_image_tokens, hidden_size), are for the first layers.
    """

    def __init__(self) -> None:
        self.positions = torch.empty(1, 0, 0, dtype=torch.long, device="cpu")
        self.tokens: dict[str, Tensor] = {}
        self.features: list[Tensor] = []
        self.ids: Tensor | None = None

    def add(self, arguments: Mapping[str, Any], batch: Batch) -> None:
        """Note a forward of the prompt."""
        seen, end = batch.seen, batch.seen + batch.new
        read = {
            name: one.detach()
            for name in names.READ_AGAIN
            if isinstance(one := arguments.get(name), Tensor)
        }
        for name in arguments.keys() - names.BY_TOKEN.keys() - {"attention_mask"}:
            one, size = arguments[name], (batch.rows, batch.new)
            if isinstance(one, Tensor) and one.shape[:2] == size:
                raise UnsupportedRequestError(
                    f"a scorer has the model repeat a prompt, and kvalloc does not repeat {name}, "
                    "which it takes for each token; choose another scorer"
                )
        read[names.IMAGE_PLACES] = self._places(arguments, batch)
        if seen and read.keys() != self.tokens.keys():
            raise UnsupportedRequestError(
                "a scorer has the model repeat a prompt, but its chunks came as token ids and as "
                "inputs_embeds; send all in one form, or choose another scorer"
            )
        self.tokens = {
            name: torch.cat([self.tokens[name][:, :seen], new], dim=1) if seen else new
            for name, new in read.items()
        }
        positions = arguments.get("position_ids")
        if not isinstance(positions, Tensor) or not len(positions):
            positions = torch.arange(seen, end, device="cpu")[None]
        positions = positions.cpu()  # (n_axes, rows, n) where a model has several axes
        positions = positions.reshape(-1, *positions.shape[-2:]).expand(-1, batch.rows, -1)
        if seen:
            n_axes = max(len(self.positions), len(positions))
            before = self.positions[:, :, :seen].expand(n_axes, -1, -1)
            positions = torch.cat([before, positions.expand(n_axes, -1, -1)], dim=2)
        self.positions = positions

    def counted(
        self,
        rows: Sequence[Row],
        arguments: Mapping[str, Any],
        batch: Batch,
        columns: Callable[[int], Columns],
    ) -> list[Row]:
        """Return rows with their repeats, where scorers read them and all ids are known."""
        reads = [row.method.policy.scorer.reads_repeats for row in rows]
        self.ids = self._ids(arguments, batch) if any(reads) else None
        result, ids = [], None if self.ids is None else self.ids.cpu()  # the host waits
        for number, row in enumerate(rows):
            repeats = None
            if ids is not None and reads[number]:
                counts = repeat_counts(ids[number][columns(number)].numpy())
                repeats = torch.from_numpy(counts) if counts.max(initial=1) > 1 else None
            result.append(replace(row, repeats=repeats))
        return result

    def _ids(self, arguments: Mapping[str, Any], batch: Batch) -> Tensor | None:
        ids, before = arguments.get("input_ids"), self.ids
        if not isinstance(ids, Tensor) or ids.shape != (batch.rows, batch.new):
            return None
        if not batch.seen:
            return ids.clone()
        if before is None or len(before) != batch.rows or before.shape[1] < batch.seen:
            return None
        return torch.cat([before[:, : batch.seen], ids.to(before.device)], dim=1)

    def _places(self, arguments: Mapping[str, Any], batch: Batch) -> Tensor:
        features, before = arguments.get(names.IMAGE_FEATURES), self.features if batch.seen else []
        places = torch.full((batch.rows, batch.new), -1, device="cpu")
        if features:
            first = len(before[0]) if before else 0
            places_of = torch.arange(first, first + len(features[0]), device="cpu")
            places[arguments[names.IMAGE_PLACES].cpu()] = places_of
            pairs = zip(before or [one[:0] for one in features], features, strict=True)
            before = [torch.cat(pair) for pair in pairs]
        self.features = before
        return places

    def next_position(self, row: int, columns: Any) -> int:
        """Return a row's next position, after the largest of any axis.

        The first of four axes belongs to text, and counts each token of an image.
        """
        positions = self.positions[-3:, row][:, columns]
        return int(positions.max()) + 1 if positions.numel() else 0


def begin(cache: Any, running: Running, arguments: Mapping[str, Any]) -> None:
    """Plan the evictions of a forward of the prompt.

    Raises
    ------
    UnsupportedRequestError
        If the prompt does not go with budgets or policy.
    InputError
        See `check_context`.
    """
    batch, door = running.batch, cache.door
    rows: list[Row] = cache.rows if batch.seen else _new_rows(cache, batch)
    prompts, seen = door.prompt_tokens(batch), door.tokens(batch)
    rows = [replace(row, prompt=n) for row, n in zip(rows, prompts.tolist(), strict=True)]
    rows = with_scattered(rows, arguments)
    rows = cache.prompt_read.counted(rows, arguments, batch, door.columns)
    for row in rows:
        refusals.check_positions(row.method.policy, scattered=row.scattered)
    whole = [number for number, row in enumerate(rows) if row.holds]
    if any(rows[number].method.policy.scorer.later for number in whole):
        cache.prompt_read.add(arguments, batch)
        _check_room(cache, rows, prompts - seen)
    windows = (wanted_queries(row.method.policy, row.prompt, whole=row.holds) for row in rows)
    running.n_queries = running.n_queries_after = max(windows, default=0)
    heads = cache.methods[0].profile.shape.n_kv_heads
    size = batch.rows, len(cache.layers), heads
    entries = np.broadcast_to(batch.lengths[:, None, None], size).copy()
    entries += cache.kept_tokens_by_row if batch.seen else 0
    padded = seen < batch.seen + batch.new
    for group in alike(rows, [n for n, row in enumerate(rows) if not row.holds]):
        first, policy = rows[group[0]], rows[group[0]].method.policy
        if (batch.seen or not batch.completes) and policy.combines:
            raise UnsupportedRequestError(
                f"the policy {policy.name} merges entries, for which it has to see the whole "
                "prompt; send it in one piece, or choose another policy"
            )
        rounded = first.widths if batch.completes else {}
        goals = plan.prompt_targets(rows, group, prompts, entries, padded, rounded)
        eviction_of_all = Eviction.of(
            cache,
            first,
            group,
            policy,
            tokens=seen,
            prompt=prompts,
            unobserved=batch.lengths,
            widths=rounded or first.method.halves(),
            remember=not batch.completes or first.goes_on_observing,
            more=not batch.completes,
            repeats=repeats_of(rows, group),
        )
        for eviction, targets in eviction_of_all.by_layers(goals):
            cache.tell("planned", targets)
            running.planned.append((eviction, targets))
        if eviction_of_all.remember:
            running.observing.append(eviction_of_all)
        if policy.observes:
            running.n_queries = max(running.n_queries, batch.new)
    in_the_end = np.broadcast_to(prompts[:, None, None], entries.shape)
    for goal in plan.prompt_targets(rows, whole, prompts, in_the_end, padded, ()).values():
        cache.tell("planned", {layer: counts[None] for layer, counts in goal.items()})
    cache.rows = rows
    layer_counts = [
        plan.layers_together(int(batch.lengths.sum()), row.profile, row.method.options.memory)
        for row in rows
    ]
    running.layers_together = min(layer_counts, default=1)
    if not running.planned and not running.observing and not whole:
        running.n_queries = 0


def _new_rows(cache: Any, batch: Batch) -> list[Row]:
    if cache.spent:
        raise UnsupportedRequestError(
            "the budgets of this cache were decided from another prompt; make a new cache"
        )
    times, rest = divmod(batch.rows, len(cache.methods))
    if rest or not times:
        raise UnsupportedRequestError(
            f"the budgets were decided for {len(cache.methods)} rows, but this input has "
            f"{batch.rows}; call cache.reset() and decide for these rows"
        )
    for method in cache.methods:
        profile = method.profile
        if not batch.completes and method.widths(profile) and profile.fits_a_peak:
            raise UnsupportedRequestError(
                f"budgets for {option('memory')} at its peak: of a prompt in chunks nothing is "
                "rounded before the last one; send it in one piece, or solve again without "
                f"{option('bits')}"
            )
    chunks = not batch.completes
    return [
        Row(method=method, profile=method.profile, holds=method.holds(in_chunks=chunks))
        for method in cache.methods
        for _ in range(times)
    ]


def _check_room(cache: Any, rows: Sequence[Row], left: IntArray) -> None:
    decoder = cache.decoder()
    if decoder is None or (limit := context_limit(decoder)) is None:
        return
    for number, row in enumerate(rows):
        if row.holds and (later := row.method.policy.scorer.later) is not None:
            position = cache.prompt_read.next_position(number, cache.door.columns(number))
            check_context(later, position + int(left[number]), row.prompt, limit)


@torch.no_grad()
def end(cache: Any) -> None:
    """Evict in rows that stayed whole, after a second read if needed."""
    rows, tokens = cache.rows, cache.tokens
    whole = [number for number, row in enumerate(rows) if row.holds]
    padded, entries = tokens < cache.get_seq_length(), cache.kept_tokens_by_row
    for group in alike(rows, whole):
        first, policy = rows[group[0]], rows[group[0]].method.policy
        goals = plan.prompt_targets(rows, group, tokens, entries, padded, first.widths)
        if not (due := [row for row, goal in goals.items() if goal]):
            continue
        eviction_of_all = Eviction.of(cache, first, due, policy, whole=True)
        with cache.half_way():
            if policy.scorer.later is not None:
                layers = sorted({layer for goal in goals.values() for layer in goal})
                _read_again(cache, due, policy.scorer, layers)
            for eviction, targets in eviction_of_all.by_layers(goals):
                evict(cache, eviction, targets)
    cache.prompt_read = ReadTokens()
    for store in cache.stores.values():
        store.notes = Notes(observed=store.notes.observed)
    cache.rows = [plan.evicted(row, ranked=True) for row in rows]


def _read_again(cache: Any, rows: Sequence[int], scorer: Scorer, layers: Sequence[int]) -> None:
    decoder, door, stores, seen = cache.decoder(), cache.door, cache.stores, cache.get_seq_length()
    assert decoder is not None, "it has just read the prompt"
    sinks, read = cache.rows[rows[0]].profile.policy.sinks, cache.prompt_read
    by_place: dict[object, list[int]] = {}
    for row in rows:
        by_place.setdefault(door.place(row), []).append(row)
    for alike_rows in by_place.values():
        group, columns = np.array(alike_rows), door.columns(alike_rows[0])
        on_host = torch.from_numpy(group)
        layers_of_prompt = list[PromptLayer]()
        for index, layer in enumerate(cache.layers):
            entries, slides = None, index not in stores
            if not slides:
                candidates = layer.candidates(group, door.columns)
                entries = [candidates.keys, candidates.values]
            elif getattr(layer, "keys", None) is not None:
                slid = torch.arange(seen, device="cpu")[columns] - (seen - int(layer.keys.shape[2]))
                at = slid[slid >= 0].to(layer.keys.device)
                entries = [rows_of(one, group)[:, :, at] for one in (layer.keys, layer.values)]
            prompt_layer = PromptLayer(source=layer, rows=on_host, entries=entries, slides=slides)
            layers_of_prompt.append(prompt_layer)
        prompt = HeldPrompt(
            decoder=decoder,
            layers=layers_of_prompt,
            positions=read.positions[:, group][:, :, columns],
            read={name: rows_of(one, group)[:, columns] for name, one in read.tokens.items()},
            features=read.features,
        )
        notes = prompt.read_again(scorer, layers, cache.reads, sinks=sinks)
        for index, observed in notes.items():
            for place, row in enumerate(alike_rows):
                stores[index].notes.later[row, None] = of_row(observed, place)
