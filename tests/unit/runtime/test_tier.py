"""A slow tier: what is attended to is what the entries say, read again and in pages."""

import copy
import re
import resource
from pathlib import Path

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from attention_cases import kept_of
from factories import make_shape
from hostile_files import Tensors
from live_storage import peak_bytes
from transformers import DynamicCache

import kvalloc
from kvalloc.accounting.costs import PAGE, paging_bytes, range_bytes
from kvalloc.errors import InputError
from kvalloc.models.attention import intercept_attention
from kvalloc.runtime import CacheOptions
from kvalloc.runtime.attention.call import AttentionCall
from kvalloc.runtime.attention.tiered import attend_again
from kvalloc.runtime.making import build_cache
from kvalloc.runtime.packed import LayerEntries
from kvalloc.runtime.tier import LayerTier, Reads, Records

CONTEXT, READ = 90, 0.1


def tier_cache(model, *, bits=3, tier="ram", read=READ, every=None, share=0.3):
    """Return an empty cache whose heads keep different numbers of entries, beside a tier."""
    profile = tiny.by_head(tiny.make_profile(model, CONTEXT, share, scorer="keydiff"))
    widths = np.full_like(profile.budgets, bits)
    widths[list(profile.shape.sliding_layers)] = 16
    options = CacheOptions(tier=tier, read=read, decode_every=every)
    return build_cache(model, profile.replace(bits=widths), options)


def answered(queries, near, stored, tier, row, *, softcap=None, sinks=None):
    """Return what one token of a row is answered, by sums over all entries, in float64.

    Parameters
    ----------
    queries : Tensor, (n_kv_heads, group, head_dim)
        Scaled.
    near : list of (Tensor, Tensor)
        Keys and values that followed, of each KV head.
    stored : LayerEntries
        Pages, then kept entries.
    tier : LayerTier
    row : int
    """
    capped = (lambda x: x) if softcap is None else (lambda x: softcap * (x / softcap).tanh())
    queries, heads, every = queries.double(), len(queries), []
    for head in range(heads):
        piece, count = tiny.pieces_of(stored)[row, head], int(tier.pages.counts[row, head])
        members = tier.pages.members[row * heads + head, :count]
        members = [[c for c in own.tolist() if c >= 0] for own in members]
        logits = capped(queries[head] @ piece.keys.double().T)
        logits[:, :count] += torch.tensor([len(own) for own in members]).double().log()
        beside = capped(queries[head] @ near[head][0].double().T)
        if sinks is not None:
            beside = torch.cat([beside, sinks[head].double()[:, None]], dim=1)
        mass = torch.cat([logits, beside], dim=1).softmax(dim=1)[:, : len(piece.keys)].sum(dim=0)
        every.append((piece, members, logits, beside, mass))
    pages = [(float(m), h, p) for h, own in enumerate(every) for p, m in enumerate(own[4])]
    reads = tier.reads(stored.lengths)
    whole = sorted(one for one in pages if one[2] < len(every[one[1]][1]))
    single = sorted(one for one in pages if one[2] >= len(every[one[1]][1]))
    chosen = (
        whole[len(whole) - int(reads.pages[row]) :] + single[len(single) - int(reads.again[row]) :]
    )
    found = []
    for head, (piece, members, logits, beside, _) in enumerate(every):
        own = [place for _, other, place in chosen if other == head]
        columns = [c for place in own if place < len(members) for c in members[place]]
        columns += [int(piece.positions[place]) for place in own if place >= len(members)]
        exact = [each[row, head][columns].double() for each in tier.everything()]
        others = [place for place in range(len(piece.keys)) if place not in own]
        read = capped(queries[head] @ exact[0].T)
        weights = torch.cat([logits[:, others], read, beside], dim=1).softmax(dim=1)
        values = [piece.values[others].double(), exact[1], near[head][1].double()]
        found.append(weights[:, : -1 if sinks is not None else None] @ torch.cat(values))
    return torch.stack(found)


@pytest.mark.parametrize(
    ("bits", "dim", "changes"),
    [(3, 16, {}), (3, 64, {"softcap": 5.0}), (4, 128, {"sinks": True}), (5, 80, {}), (8, 32, {})],
)
@pytest.mark.usefixtures("either_way")
def test_attention_is_the_sum_over_what_is_read_and_what_answers_as_it_is(bits, dim, changes):
    """Of rows of unequal length, with padding among what followed; each token reads for itself."""
    generator = torch.Generator().manual_seed(bits)
    batch, heads, group, n, near, new = 2, 2, 3, 150, 6, 3
    keys, values = (torch.randn(batch, heads, n, dim, generator=generator) for _ in range(2))
    visible = torch.ones(batch, n, dtype=torch.bool)
    visible[1, :40] = False
    tier = LayerTier(Records("ram"), READ)
    tier.add(keys[:, :, :100], values[:, :, :100], visible[:, :100])
    tier.add(keys[:, :, 100:], values[:, :, 100:], visible[:, 100:])
    kept = torch.rand(batch, heads, n, generator=generator) < torch.tensor([0.2, 0.6])[:, None]
    kept &= visible[:, None]
    counts = kept.sum(dim=-1).numpy()
    whole = kept_of(keys, values, torch.arange(n, dtype=torch.int32), kept, counts)
    packed = tier.packed(LayerEntries.whole(whole), np.full(heads, bits))
    sinks = torch.randn(heads * group, generator=generator) if changes.get("sinks") else None
    shown = torch.ones(batch, near, dtype=torch.bool)
    shown[0, 1] = False
    call = AttentionCall(
        queries=3 * torch.randn(batch, heads * group, new, dim, generator=generator),
        keys=torch.randn(batch, heads, near, dim, generator=generator),
        values=torch.randn(batch, heads, near, dim, generator=generator),
        scaling=dim**-0.5,
        visible=shown,
        softcap=changes.get("softcap"),
        sink_logits=sinks,
    )
    found = attend_again(call, packed.kept, tier)
    for row, token in np.ndindex(batch, new):
        columns = shown[row, : near - new + token + 1].nonzero()[:, 0]
        expected = answered(
            call.queries[row, :, token].view(heads, group, dim) * call.scaling,
            [
                (call.keys[row, head, columns], call.values[row, head, columns])
                for head in range(heads)
            ],
            packed,
            tier,
            row,
            softcap=call.softcap,
            sinks=None if sinks is None else sinks.view(heads, group),
        )
        own = found[row, token].double().view(expected.shape)
        torch.testing.assert_close(own, expected, atol=1e-4, rtol=1e-4)


def test_pages_hold_every_evicted_entry_once_beside_its_like():
    generator = torch.Generator().manual_seed(1)
    centres = 5 * torch.randn(20, 16, generator=generator)
    kinds = torch.randint(20, (2, 2, 300), generator=generator)
    keys = centres[kinds] + torch.randn(2, 2, 300, 16, generator=generator)
    visible = torch.ones(2, 300, dtype=torch.bool)
    visible[0, :37] = False
    kept = (torch.rand(2, 2, 300, generator=generator) < 0.3) & visible[:, None]
    tier = LayerTier(Records("ram"), READ)
    tier.add(keys, keys, visible)
    positions = torch.arange(300, dtype=torch.int32)
    whole = kept_of(keys, keys, positions, kept, kept.sum(dim=-1).numpy())
    tier.packed(LayerEntries.whole(whole), np.full(2, 3))
    pages, spread = tier.pages, []
    for row, head in np.ndindex(2, 2):
        gone = (visible[row] & ~kept[row, head]).nonzero()[:, 0]
        members = pages.members[row * 2 + head]
        assert sorted(members[members >= 0].tolist()) == gone.tolist()
        count = -(-len(gone) // PAGE)
        assert pages.counts[row, head] == count
        assert ((members >= 0).sum(dim=1) > 0).tolist() == [True] * count + [False] * (
            len(members) - count
        )
        by_position = [gone[i : i + PAGE] for i in range(0, len(gone), PAGE)]
        for some in ([own[own >= 0] for own in members[:count]], by_position):
            own = [keys[row, head, one.long()] for one in some]
            spread.append(sum(float((one - one.mean(dim=0)).square().sum()) for one in own))
    assert all(similar < 0.4 * near for similar, near in zip(*[iter(spread)] * 2, strict=True))


@pytest.mark.parametrize(("n", "dim"), [(1000, 64), (1030, 64), (300, 16)])
def test_making_pages_of_one_head_after_the_other_takes_what_is_said_and_makes_the_same(n, dim):
    shape = make_shape(n_layers=1, n_kv_heads=3, head_dim=dim)
    generator = torch.Generator().manual_seed(n)
    keys, values = torch.randn(2, 1, 3, n, dim, generator=generator)
    visible, kept = torch.ones(1, n, dtype=torch.bool), torch.rand(1, 3, n) < 0.3
    positions, counts = torch.arange(n, dtype=torch.int32), kept.sum(dim=-1).numpy()
    whole = LayerEntries.whole(kept_of(keys, values, positions, kept, counts))
    made = []
    for in_pieces in (False, True):
        tier = LayerTier(Records("ram"), READ, in_pieces=in_pieces)
        tier.add(keys, values, visible)
        taken = peak_bytes(lambda: made.append((tier.packed(whole, np.full(3, 8)), tier)))  # noqa: B023
    (parts, tier), (own, alone) = [(one.parts[0], tier) for one, tier in made]
    assert taken <= paging_bytes(n, shape) + own.keys.nbytes + own.values.nbytes + n * 3 * 4
    assert torch.equal(alone.pages.members, tier.pages.members)
    assert torch.equal(own.values, parts.values)


def test_what_is_read_is_within_the_share():
    numbers = np.random.default_rng(0).integers(0, 4000, (3, 2000))
    tokens = numbers[0] + 1
    kept = np.minimum(numbers[1], tokens)
    pages = -(-(tokens - kept) // PAGE)
    for share in (0.01, 0.05, 0.5, 1.0):
        reads = Reads.of(share, tokens, kept, pages)
        total = reads.again + PAGE * reads.pages
        assert (total <= np.maximum(share * tokens, 1)).all()
        assert (reads.again >= np.minimum(kept, (share * tokens / 3).astype(int))).all()
        assert ((reads.again <= kept) & (reads.pages <= pages)).all()


class Oracle:
    """The full cache of a twin in float32, whose attention is `answered` of what a cache stores."""

    def __init__(self, model):
        self.model = tiny.eager_twin(model)
        self.off = 0.01 if model.dtype == torch.float32 else 0.1  # 8 bits, and what halves make
        self.cache = DynamicCache(config=self.model.config)

    def logits(self, cache, ids, mask):
        """Return the logits of tokens that ``cache`` is to see next; ``mask`` of all columns."""
        tiers = [copy.deepcopy(layer) for layer in cache.layers] if cache.reduced else None

        def attention(states, compute):
            if tiers is None or tiers[states.layer].entries is None:
                return compute(states.mask)
            layer = tiers[states.layer]
            new, (batch, heads) = states.queries.shape[2], states.keys.shape[:2]
            group, total = states.queries.shape[1] // heads, states.keys.shape[2]
            columns, output = layer.tier.columns, torch.zeros(*states.queries.shape)
            exact = [own.clone() for own in (states.keys, states.values)]
            for own, held in zip(exact, layer.tier.everything(), strict=True):
                off = (own[:, :, :columns] - held).abs().amax(dim=(1, 3))[mask[:, :columns] > 0]
                assert off.amax() < self.off * own.abs().amax()
                own[:, :, :columns] = held
            for row, token in np.ndindex(batch, new):
                shown = mask[row, : total - new + token + 1].bool()
                queries = states.queries[row, :, token].view(heads, group, -1) * states.scaling
                if new * READ < 1:  # else they read all together
                    shown[:columns] = False
                near = [
                    [own[row, head, : len(shown)][shown] for own in exact] for head in range(heads)
                ]
                if new * READ >= 1:
                    both = zip(queries.double(), near, strict=True)
                    each = [
                        (asked @ keys.double().T).softmax(dim=1) @ values.double()
                        for asked, (keys, values) in both
                    ]
                    found = torch.stack(each)
                else:
                    found = answered(queries, near, layer.entries, layer.tier, row)
                output[row, :, token] = found.float().flatten(0, 1)
            return output.transpose(1, 2), None

        with torch.no_grad(), intercept_attention(self.model, attention):
            return self.model(ids, attention_mask=mask, past_key_values=self.cache).logits


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-4), (torch.bfloat16, 0.5)])
@pytest.mark.usefixtures("either_way")
def test_the_cache_answers_as_the_oracle(dtype, bound):
    """Rows of unequal length, over settlings, by single tokens and turns short and long."""
    model = tiny.tiny_model(dtype=dtype)
    oracle, cache = Oracle(model), tier_cache(model, every=8)
    mask = (torch.arange(CONTEXT) >= torch.tensor([[0], [31]])).long()
    for new in (CONTEXT, 1, 1, 1, 9, 1, 1, 1, 12, 1, 3, 1, 1):
        ids, seen = tiny.prompt(new, 2, seed=new), cache.get_seq_length()
        if seen:
            mask = torch.nn.functional.pad(mask, (0, new), value=1)
        expected = oracle.logits(cache, ids, mask)
        with torch.no_grad():
            found = model(ids, attention_mask=mask, past_key_values=cache).logits
        shown = mask[:, seen:].bool()
        differs = (found.float() - expected).abs().amax(dim=-1)[shown]
        assert float(differs.max()) < bound
    assert cache.arrival.settled > CONTEXT + 16
    assert (cache.kept_tokens < cache.get_seq_length()).any()


def decoded(model, cache, ids):
    with torch.no_grad():
        found = [model(one, past_key_values=cache).logits for one in ids.split(1, dim=1)]
    return torch.cat(found, dim=1)


def test_rows_answer_as_alone_in_a_file_as_in_memory_and_after_going_back(tmp_path):
    """In float64: a number between two codes is rounded by its last bit, which a batch changes."""
    model = tiny.tiny_model().double()
    prompt, ids = tiny.prompt(CONTEXT, 2), tiny.prompt(40, 2, seed=3)
    caches = [tier_cache(model, tier=place, every=16) for place in ("ram", tmp_path)]
    for cache in caches:
        with torch.no_grad():
            model(prompt, past_key_values=cache)
    assert not list(tmp_path.iterdir())  # its file has no name
    together = decoded(model, caches[0], ids[:, :20])
    turned = copy.deepcopy(caches[0])
    turned.reorder_cache(torch.tensor([1, 0]))
    again, whole = copy.deepcopy(caches[0]), decoded(model, caches[0], ids[:, 20:])
    assert torch.equal(decoded(model, again, ids[:, 20:]), whole)  # of the same records
    found = decoded(model, turned, ids.flip(0)[:, 20:]).flip(0)
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-3)
    assert torch.equal(decoded(model, caches[1], ids), torch.cat([together, whole], dim=1))
    assert caches[0].tier_bytes > caches[1].tier_bytes > 0  # the copies' entries as well
    caches[1].crop(-5)
    assert torch.equal(decoded(model, caches[1], ids[:, 35:]), whole[:, 15:])
    for row in range(2):
        alone = tier_cache(model, every=16)
        with torch.no_grad():
            model(prompt[row, None], past_key_values=alone)
        found = decoded(model, alone, ids[row, None])
        expected = torch.cat([together, whole], dim=1)[row]
        torch.testing.assert_close(found[0], expected, atol=1e-4, rtol=1e-3)
    alone.reset()
    with torch.no_grad():
        model(prompt[1, None], past_key_values=alone)
    assert torch.equal(decoded(model, alone, ids[1, None]), found)


def in_memory(path):
    """Return the KiB of a mapped file that this process has looked at."""
    maps = Path("/proc/self/smaps").read_text().split(f"{path}\n")[1:]
    assert maps
    return sum(int(re.search(r"Rss: +(\d+)", one)[1]) for one in maps)


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="says what was looked at")
@pytest.mark.usefixtures("either_way")
def test_a_saved_cache_is_opened_without_its_tier_and_goes_on_as_if_it_had_not_been_saved(tmp_path):
    """Rows of unequal length; over settlings, saved once more after the first."""
    model, path = tiny.tiny_model(), tmp_path / "c.kv"
    cache, mask = tier_cache(model, every=8, read=0.03), torch.ones(2, CONTEXT, dtype=torch.long)
    mask[1, :31] = 0
    with torch.no_grad():
        model(tiny.prompt(CONTEXT, 2), attention_mask=mask, past_key_values=cache)
    for turn in range(2):
        cache.save(path)
        loaded = kvalloc.load_cache(path, model)
        assert in_memory(path) == 0
        assert (loaded.retained_bytes, loaded.share) == (cache.retained_bytes, cache.share)
        assert loaded.tier_bytes == cache.tier_bytes
        for new in (1, 3, 1, 9, 40, 1):
            ids = tiny.prompt(new, 2, seed=10 * turn + new)
            with torch.no_grad():
                expected, found = (
                    model(ids, past_key_values=one).logits for one in (cache, loaded)
                )
            assert torch.equal(found, expected)
        assert in_memory(path) > 0
        cache = loaded
    written = path.read_bytes()
    assert len(Tensors.parse(written).arrays["records"][1]) * 36 < loaded.tier_bytes


@pytest.mark.parametrize(
    "options", [{"num_beams": 2}, {"prefill_chunk_size": 25}, {"prompt_lookup_num_tokens": 3}]
)
def test_a_share_holds_pages_and_kept_entries_whatever_generate_does(options):
    model = tiny.tiny_model()
    ids = tiny.prompt(300)
    with kvalloc.apply(model, budget="12%", tier="ram", read="10%") as applied:
        settings = {"do_sample": False, "max_new_tokens": 70, "eos_token_id": 10**6, **options}
        model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
    cache = applied.last_cache
    assert cache.share <= 0.12
    assert cache.profile.requested["value"] == 0.12
    tensors = {id(own) for layer in cache.layers for own in layer.stored_tensors()}
    beside = [own for layer in cache.layers for own in layer.tier.beside_entries]
    assert {id(own) for own in beside} <= tensors
    counts = [layer.tier.pages.counts for layer in cache.layers]
    ranges = range_bytes(model.config.head_dim)
    expected = sum(4 * int(own.sum()) + ranges * own.size for own in counts)
    assert sum(own.nbytes for own in beside) == expected
    assert cache.retained_bytes < 0.2 * cache.full_bytes < cache.tier_bytes


def test_a_full_folder_ends_the_answer_in_one_line_and_what_was_said_stands(tmp_path):
    model = tiny.tiny_model()
    cache = tier_cache(model, tier=tmp_path, every=8)
    with torch.no_grad():
        model(tiny.prompt(CONTEXT), past_key_values=cache)
    ids, limits = tiny.prompt(20, seed=4), resource.getrlimit(resource.RLIMIT_FSIZE)
    written = cache.layers[0].tier.records.nbytes
    resource.setrlimit(resource.RLIMIT_FSIZE, (written + 100, limits[1]))
    said = []
    try:
        with pytest.raises(InputError, match=r"the tier in .* cannot be written") as caught:
            for one in ids.split(1, dim=1):
                said.append(decoded(model, cache, one))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert "\n" not in str(caught.value)
    assert len(said) == 7
    assert cache.interrupted


def test_folders_that_cannot_be_written_are_refused_before_anything_runs(tmp_path):
    model = tiny.tiny_model()
    (tmp_path / "file").touch()
    for place in (tmp_path / "gone", tmp_path / "file"):
        with pytest.raises(InputError, match="cannot be written"):
            kvalloc.apply(model, budget="20%", tier=place)
