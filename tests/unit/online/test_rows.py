"""Rows of one batch: each gets what it would get alone, whatever the others are."""

import copy
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from other_attention import STAND_IN, attention_on_cpu
from prompt_runs import assert_kept_as_alone, padded_rows, run
from runtime_oracle import VOCABULARY

import kvalloc
from kvalloc.accounting.costs import full_bytes
from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.models.loading import shape_of
from kvalloc.online.decision import PromptSize
from kvalloc.online.default import Default
from kvalloc.online.per_prompt import PromptTarget
from kvalloc.runtime.options import CacheOptions

NEW = 22
LONG, MIDDLE, SHORT = 280, 120, 5
"""Too long to be read again, read twice, kept whole."""

ATOL = 1e-4
"""Of logits of about 10: what falls between two codes is rounded either way."""


@pytest.fixture
def model(tiny):
    return tiny.tiny_model(head_dim=16, max_position_embeddings=512).double()


def rows_of(tiny, lengths):
    return [tiny.prompt(tokens, seed=seed) for seed, tokens in enumerate(lengths)]


def n_ways(cache):
    """In how many ways the rows of a cache are kept."""
    return len(set(cache.methods))


def cache_for(model, columns, rows, options):
    """What `kvalloc.apply` makes for a batch."""
    rows = [own[0] for own in rows]
    lengths = [len(own) for own in rows]
    size = PromptSize(
        tokens=columns, lengths=tuple(lengths), rows=tuple(own.numpy() for own in rows)
    )
    if not Default.applies(**{**options, "decode_every": None}):
        return PromptTarget.parse(**options).cache(model, size)
    names = ("fitted", "decode_every")
    kept = CacheOptions(**{name: options[name] for name in names if name in options})
    return Default.parse(options["budget"], kept).cache(model, size)


def answer(model, cache, ids, mask, places):
    """Logits of a prompt's last column of each row and of NEW tokens that follow it, each its own.

    Returns (rows, 1 + NEW, n_words).
    """
    rows, last = torch.arange(len(ids)), places.argmax(dim=1)
    logits = [run(model, ids, cache, mask, position_ids=places)[rows, last]]
    place = places[rows, last]
    for _ in range(NEW):
        mask, place = torch.nn.functional.pad(mask, (0, 1), value=1), place + 1
        token = 2 + place[:, None] % (VOCABULARY - 2)  # whatever the padding
        logits.append(run(model, token, cache, mask, position_ids=place[:, None])[:, -1])
    return torch.stack(logits, dim=1)


def assert_rows_as_alone(model, rows, side="left", **options):
    """In a batch and alone the same budgets, the same entries, and nearly the same logits."""
    ids, mask, places = padded_rows(rows, side)
    lengths = [int(own.shape[1]) for own in rows]
    cache = cache_for(model, int(ids.shape[1]), rows, options)
    logits = answer(model, cache, ids, mask, places)
    for row, (own, tokens) in enumerate(zip(rows, lengths, strict=True)):
        alone = cache_for(model, tokens, [own], options)
        whole = torch.ones_like(own)
        expected = answer(model, alone, own, whole, whole.cumsum(dim=1) - 1)[0]
        profile = cache.row_profiles[row]
        assert np.array_equal(profile.budgets_for(tokens), alone.profile.budgets_for(tokens))
        assert profile.policy == alone.profile.policy
        assert np.array_equal(cache.kept_tokens_by_row[row], alone.kept_tokens)
        columns = torch.cat([mask[row].nonzero()[:, 0], torch.arange(NEW) + ids.shape[1]])
        assert_kept_as_alone(cache, row, alone, columns)
        torch.testing.assert_close(logits[row], expected, atol=ATOL, rtol=0)
    return cache


@pytest.mark.parametrize(
    ("options", "groups"),
    [
        ({"budget": "20%"}, 3),
        ({"budget": "14%"}, 3),
        ({"budget": "50%"}, 3),
        ({"budget": "20%", "decode_every": 8}, 3),
        ({"budget": "100%"}, 1),
        ({"budget": "20%", "scorer": "snapkv"}, 1),
        ({"target_retention": 0.6}, 1),
    ],
)
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_row_in_a_batch_is_as_alone(tiny, model, options, groups, side):
    rows = rows_of(tiny, (MIDDLE, LONG, SHORT, MIDDLE - 40, SHORT + 1))
    cache = assert_rows_as_alone(model, rows, side, **options)
    assert n_ways(cache) >= groups


@pytest.mark.parametrize(
    ("kind", "attention"),
    [("gemma3", "sdpa"), ("gemma3", "flex_attention"), ("llama", STAND_IN)],
)
def test_every_kind_of_attention_serves_rows_of_different_ways(tiny, kind, attention):
    model = tiny.tiny_model(kind, attention, head_dim=16, max_position_embeddings=512).double()
    with attention_on_cpu(attention):
        cache = assert_rows_as_alone(model, rows_of(tiny, (LONG, SHORT, MIDDLE)), budget="50%")
    assert n_ways(cache) > 1


def test_rows_of_several_lengths_are_solved_each_for_its_own(tiny, fitted_file):
    model = tiny.tiny_model(head_dim=16).double()
    rows = rows_of(tiny, (50, MIDDLE, SHORT, MIDDLE - 3))
    cache = assert_rows_as_alone(model, rows, budget="20%", fitted=str(fitted_file))
    details = list(dict.fromkeys(profile.detail for profile in cache.row_profiles))
    assert all("predicted loss" in details[i] for i in (0, 1, 3))
    assert details[2].startswith("row 2: nothing evicted")


def test_rows_share_the_bytes_of_all_by_their_losses(tiny, model, fitted_file):
    """Solved together: in no more bytes they lose less; alone a row has the budget."""
    options = CacheOptions(fitted=fitted_file, allow_other_model=True)  # a longer context
    shape = shape_of(model)
    default = Default(share=0.3, options=options)
    across = replace(default, options=replace(options, across="rows"))

    def read(lengths):
        ids, mask, places = padded_rows(rows_of(tiny, lengths), "left")
        size = PromptSize(tokens=max(lengths), lengths=lengths)
        caches = default.cache(model, size), across.cache(model, size)
        for cache in caches:
            run(model, ids, cache, mask, position_ids=places)
        return caches

    lengths = (LONG, 60, MIDDLE, 60)
    alone, cache = read(lengths)
    lost = [sum(one.predicted_loss for one in own.row_profiles) for own in (alone, cache)]
    assert lost[1] < 0.8 * lost[0]
    granted = 0.3 * full_bytes(shape, sum(lengths))
    assert 0.9 * granted < cache.retained_bytes <= granted
    shares = [profile.requested["value"] for profile in cache.row_profiles]
    assert shares[1] == shares[3] > shares[2] > shares[0]
    for few in ((MIDDLE,), (MIDDLE, MIDDLE), (MIDDLE, SHORT)):
        for one, other in zip(*(own.row_profiles for own in read(few)), strict=True):
            assert np.array_equal(one.budgets, other.budgets)


def test_rows_share_nothing_without_a_fitted_file(model, fitted_file):
    with pytest.raises(InputError, match="across='rows' shares bytes .* tiny was not measured"):
        kvalloc.apply(model, budget="20%", across="rows")
    with pytest.raises(InputError, match="across shares a budget .* goes with budget='20%'"):
        kvalloc.apply(model, budget="20%", memory="1MiB", across="rows", fitted=fitted_file)


@pytest.mark.parametrize("side", ["left", "right"])
def test_chunks_are_what_one_piece_is(tiny, model, side):
    """Of the row that is evicted while it is read, each chunk's best stay, and as many."""
    lengths = (MIDDLE, LONG, SHORT)
    ids, mask, places = padded_rows(rows_of(tiny, lengths), side)
    size = PromptSize(tokens=LONG, lengths=lengths)
    whole = Default.parse("20%").cache(model, size)
    run(model, ids, whole, mask, position_ids=places)
    chunked = Default.parse("20%").cache(model, replace(size, chunked=True))
    for end in range(70, LONG + 1, 70):
        new = slice(end - 70, end)
        run(model, ids[:, new], chunked, mask[:, :end], position_ids=places[:, new])
    assert n_ways(chunked) > 1
    in_chunks, at_once = (own.kept_tokens_by_row.sum(axis=2) for own in (chunked, whole))
    assert np.array_equal(in_chunks[[0, 2]], at_once[[0, 2]])
    assert abs(in_chunks[1] - at_once[1]).max() <= 1  # scales of other heads take more
    for layer, row in itertools.product(range(4), (0, 2)):
        kept = [own.kept_indices(layer)[row] for own in (chunked, whole)]
        assert all(
            torch.equal(*(own[own >= 0] for own in heads)) for heads in zip(*kept, strict=True)
        )


def test_a_cache_of_rows_of_different_ways_is_a_cache_like_others(tiny, model):
    lengths = (MIDDLE, SHORT, LONG, SHORT)
    ids, mask, places = padded_rows(rows_of(tiny, lengths), "left")
    size = PromptSize(tokens=LONG, lengths=lengths)
    cache = Default.parse("20%").cache(model, size)
    assert n_ways(cache) > 1
    with pytest.raises(UnsupportedRequestError, match="attention_mask covers"):
        run(model, ids, cache, mask[:, 1:], position_ids=places)
    assert (cache.batch, cache.retained_bytes, cache.interrupted) == (0, 0, None)
    first = run(model, ids, cache, mask, position_ids=places)
    assert cache.reduced
    assert cache.retained_bytes < 0.25 * cache.full_bytes

    def more(own, tokens=1, rows=(0, 1, 2, 3)):
        rows, seen = list(rows), own.get_seq_length()
        shown = torch.nn.functional.pad(mask[rows], (0, seen + tokens - LONG), value=1)
        place = (shown.cumsum(dim=1) - 1)[:, -tokens:]
        return run(model, 2 + place % 90, own, shown, position_ids=place)

    twin, other = copy.deepcopy(cache), copy.deepcopy(cache)
    expected = more(cache, 3)
    assert torch.equal(more(twin, 3), expected)
    twin.crop(-3)
    assert torch.allclose(more(twin, 3), expected)
    for select in ("reorder_cache", "batch_select_indices"):
        own = copy.deepcopy(other)
        getattr(own, select)(torch.tensor([2, 0, 1, 0]))
        assert torch.allclose(more(own, 3, (2, 0, 1, 0)), expected[[2, 0, 1, 0]])
    other.batch_repeat_interleave(2)
    assert torch.allclose(
        more(other, 3, (0, 0, 1, 1, 2, 2, 3, 3)), expected[[0, 0, 1, 1, 2, 2, 3, 3]]
    )
    other.batch_select_indices(torch.tensor([2, 3]))  # of one way
    assert other.kept_tokens_by_row.shape == (2, 4, 2)
    with pytest.raises(UnsupportedRequestError, match="kept in 3 different ways"):
        kvalloc.save_cache(cache, "c.kv")
    cache.reset()
    assert (cache.batch, cache.retained_bytes) == (0, 0)
    assert torch.equal(run(model, ids, cache, mask, position_ids=places), first)


@pytest.mark.parametrize(("beams", "chunk"), [(1, None), (3, None), (2, 64)])
def test_generate_finds_padding_by_its_token(tiny, model, beams, chunk):
    model.generation_config.prefill_chunk_size = chunk
    rows = rows_of(tiny, (MIDDLE, SHORT))
    ids, mask, _ = padded_rows(rows, "left")  # padded with the token 0
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": beams}
    with kvalloc.apply(model, budget="20%") as applied:
        both = model.generate(ids, **options)
        assert n_ways(applied.last_cache) > 1
        assert torch.equal(model.generate(ids, attention_mask=mask, **options), both)
        for row, own in enumerate(rows):
            alone = model.generate(own, **options)
            assert torch.equal(both[row, -8:], alone[0, -8:])
        if chunk is None:
            made = model(ids, attention_mask=mask).past_key_values
            assert n_ways(made) > 1
            assert made.row_profiles[1].detail.startswith("row 1: ")
            assert f"{made.share:.1%}" in repr(made)
