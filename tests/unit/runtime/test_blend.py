"""Documents read one by one, put together: keys at their places, tokens computed anew, depths."""

import math

import families
import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run
from transformers import DynamicCache

import kvalloc
from kvalloc.errors import InputError, ModelMismatchError, UnsupportedModelError
from kvalloc.extensions.answering import answer
from kvalloc.extensions.saved import save_cache
from kvalloc.models.attention import intercept_attention
from kvalloc.models.loading import shape_of

LENGTHS = (60, 50, 70)
QUESTION = tiny.prompt(9, seed=77)[0]
BEFORE = tiny.prompt(7, seed=78)[0]


def texts():
    return [tiny.prompt(length, seed=length) for length in LENGTHS]


def document(model, ids, share=1.0, **changes):
    profile = tiny.make_profile(model, ids.shape[1], share, shape=shape_of(model), **changes)
    cache = kvalloc.make_cache(model, profile)
    run(model, ids, cache)
    cache.read_ids = ids
    return cache


def documents(model, share=1.0, **changes):
    return [document(model, ids, share, **changes) for ids in texts()]


def read(model, ids, places=None):
    cache = DynamicCache(config=model.config)
    with torch.no_grad():
        model(ids, past_key_values=cache, position_ids=places)
    return cache


def same(cache, other):
    pairs = zip(cache.layers, other.layers, strict=True)
    return all(torch.equal(a.keys, b.keys) and torch.equal(a.values, b.values) for a, b in pairs)


@pytest.mark.parametrize("share", [1.0, 0.5])
@pytest.mark.parametrize("bits", [None, 8])
def test_one_document_in_its_place_is_that_document_bit_for_bit(tmp_path, share, bits):
    model = tiny.tiny_model()
    widths = None if bits is None else np.full((tiny.N_LAYERS, tiny.N_KV_HEADS), bits)
    [cache, *_] = documents(model, share, bits=widths)
    kvalloc.save_cache(cache, tmp_path / "a.kv")
    for one in (cache, tmp_path / "a.kv"):
        found = kvalloc.blend(model, [one])
        assert found is not cache
        expected = run(model, QUESTION[None], tiny.copy.deepcopy(cache))
        assert torch.equal(run(model, QUESTION[None], found), expected)


@pytest.mark.parametrize("family", ["qwen3", "phi", "glm4", "nanochat", "smollm3"])
def test_turned_keys_are_those_of_a_document_read_at_its_place(family):
    """Alone, at positions behind another: values the same, keys within float32."""
    model = families.family(family)
    found = kvalloc.blend(model, documents(model))
    place = 0
    for ids in texts():
        there = torch.arange(place, place + ids.shape[1])
        expected = read(model, ids, there[None])
        for layer, other in zip(found.layers, expected.layers, strict=True):
            torch.testing.assert_close(layer.keys[:, :, there], other.keys, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(
                layer.values[:, :, there], other.values, rtol=1e-4, atol=1e-4
            )
        place += ids.shape[1]
    assert found.get_seq_length() == sum(LENGTHS)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_computed_anew_is_all_read(attention, dtype):
    model = tiny.tiny_model(attention=attention, dtype=dtype)
    found = kvalloc.blend(
        model, documents(model), question=QUESTION, before=BEFORE, recompute="100%"
    )
    ids = torch.cat([BEFORE[None], *texts()], dim=1)
    assert torch.equal(found.read_ids, ids)
    tolerance = 1e-4 if dtype == torch.float32 else 0.1
    for layer, other in zip(found.layers, read(model, ids).layers, strict=True):
        for own, expected in ((layer.keys, other.keys), (layer.values, other.values)):
            error = (own - expected).float().norm() / expected.float().norm()
            assert error < tolerance


def test_reduced_documents_keep_their_entries_at_their_widths():
    model = tiny.tiny_model()
    widths = np.array([[8, 4], [16, 8], [4, 4], [8, 8]])
    own = documents(model, 0.5, level="head", bits=widths)
    found = kvalloc.blend(model, own, question=QUESTION, before=BEFORE, recompute=0.3)
    for index, layer in enumerate(found.layers):
        place, expected = len(BEFORE), [torch.arange(len(BEFORE))] * tiny.N_KV_HEADS
        for cache in own:
            kept = cache.kept_indices(index)[0]
            pairs = zip(expected, kept, strict=True)
            expected = [torch.cat([old, new[new >= 0] + place]) for old, new in pairs]
            place += cache.get_seq_length()
        for head, columns in enumerate(expected):
            piece = tiny.pieces_of(layer.kept)[0, head]
            assert piece.positions.tolist() == columns.tolist()
            assert piece.bits == widths[index, head]
    assert found.retained_bytes < 0.6 * found.full_bytes


def test_what_a_reduced_document_evicted_is_not_seen():
    """All kept entries computed anew from all that is kept: those of a masked reading."""
    model = tiny.tiny_model()
    own = documents(model, 0.5)
    found = kvalloc.blend(model, own)
    logits = run(model, QUESTION[None], found)
    shadow = tiny.Shadow(model)
    for layer, part in enumerate(found.layers):
        keys, values, positions = part.kept.padded(np.array([0]))
        assert keys.shape == values.shape
        shadow.shown[layer] = tiny.visible(found.kept_indices(layer), sum(LENGTHS))
        dense = [torch.zeros(1, tiny.N_KV_HEADS, sum(LENGTHS), tiny.HEAD_DIM) for _ in range(2)]
        for numbers, one in zip((keys, values), dense, strict=True):
            for head in range(tiny.N_KV_HEADS):
                there = positions[0, head] < sum(LENGTHS)
                one[0, head, positions[0, head, there].long()] = numbers[0, head, there]
        shadow.cache.update(*dense, layer)
    torch.testing.assert_close(shadow.logits(QUESTION[None]), logits, rtol=1e-4, atol=1e-4)


def test_a_blend_goes_on_as_any_other(tmp_path):
    """Answers, generate, saving, turns within the budget; documents stay as they are."""
    model = tiny.tiny_model()
    own = documents(model, 0.5)
    before = [tiny.copy.deepcopy(cache) for cache in own]
    cache = kvalloc.blend(model, own, question=QUESTION, recompute=0.3)
    first = list(answer(model, cache, QUESTION, max_new_tokens=5))
    again = kvalloc.blend(model, own, question=QUESTION, recompute=0.3)
    ids = torch.cat([*texts(), QUESTION[None]], dim=1)
    out = model.generate(ids, past_key_values=again, max_new_tokens=5, do_sample=False)
    assert out[0, ids.shape[1] :].tolist() == first
    kvalloc.save_cache(cache, tmp_path / "all.kv")
    loaded = kvalloc.load_cache(tmp_path / "all.kv", model)
    assert torch.equal(loaded.read_ids[0], torch.cat(texts(), dim=1)[0])
    run(model, tiny.prompt(80, seed=5), cache)
    cache.end_turn()
    granted = cache.profile.budgets_for(cache.get_seq_length())
    assert (cache.kept_tokens <= granted).all()
    assert all(same(*pair) for pair in zip(own, before, strict=True))


@pytest.mark.parametrize("share", [0.05, 0.3])
def test_tokens_that_count_are_computed_anew(share):
    """By hand: attention of the question times the root of how far values move."""
    model = tiny.tiny_model()
    own = documents(model)
    turned = kvalloc.blend(model, own)
    found = kvalloc.blend(model, own, question=QUESTION, recompute=share)
    moved = (found.layers[2].keys != turned.layers[2].keys).any(dim=3).any(dim=1)[0]
    whole = read(model, torch.cat(texts(), dim=1))
    change = (whole.layers[1].values - turned.layers[1].values).square().sum(dim=(0, 1, 3))
    weights = []

    def look(states, compute):
        n_tokens, new = states.keys.shape[2], states.queries.shape[2]
        keys = states.keys.repeat_interleave(2, dim=1)
        logits = states.queries @ keys.transpose(-1, -2) * states.scaling
        seen = torch.ones(new, n_tokens, dtype=torch.bool).tril(n_tokens - new)
        logits = logits.masked_fill(~seen, -torch.inf)
        weights.append(logits.softmax(dim=-1)[..., :-new].mean(dim=(0, 1, 2)))
        return compute(states.mask)

    twin = tiny.eager_twin(model)
    cache = DynamicCache(config=twin.config)
    for index, layer in enumerate(turned.layers):
        cache.update(layer.keys, layer.values, index)
    with torch.no_grad(), intercept_attention(twin, look):
        twin(QUESTION[None], past_key_values=cache)
    attention = torch.stack(weights[tiny.N_LAYERS // 2 :]).mean(dim=0)
    ranks = (attention * change.sqrt()).argsort(descending=True)
    count = math.ceil(share * sum(LENGTHS))
    # the first document's are what they were, but for rounding
    assert set(moved.nonzero()[:, 0].tolist()) <= set(ranks[: count + 1].tolist())
    behind = [int(place) for place in ranks[: count - 1] if place >= LENGTHS[0]]
    assert set(behind) <= set(moved.nonzero()[:, 0].tolist())


def test_what_cannot_be_blended_is_refused_in_one_line(tmp_path, monkeypatch):
    model = tiny.tiny_model()
    own = documents(model)
    by_width = [
        document(model, texts()[0], 0.5, bits=np.full((tiny.N_LAYERS, tiny.N_KV_HEADS), bits))
        for bits in (8, 4)
    ]
    empty = kvalloc.make_cache(model, tiny.make_profile(model, 60))
    two = kvalloc.make_cache(model, tiny.make_profile(model, 60))
    run(model, tiny.prompt(60, 2), two)
    padded = kvalloc.make_cache(model, tiny.make_profile(model, 60))
    with torch.no_grad():
        mask = torch.ones(1, 60, dtype=torch.long)
        mask[:, :5] = 0
        model(tiny.prompt(60), attention_mask=mask, past_key_values=padded)
    unknown = document(model, texts()[0])
    unknown.read_ids = None
    save_cache(own[0], tmp_path / "chat.kv", notes={"chat": True})
    save_cache(own[0], tmp_path / "forged.kv", notes={"ids": ["1"] * LENGTHS[0]})
    ask = {"question": QUESTION}
    for given, options, said in (
        ([], {}, "no document"),
        (by_width, {}, "other widths"),
        ([empty], {}, "no complete prompt"),
        ([two], {}, "2 texts at once"),
        ([padded], {}, "holds padding"),
        ([tmp_path / "chat.kv"], {}, "chat form"),
        ([unknown], ask, "which tokens"),
        ([unknown], {**ask, "ids": [[1, 2]]}, "60 tokens, and 2 are given"),
        ([tmp_path / "forged.kv"], ask, "which tokens"),
        ([3], {}, "is a int, expected the path"),
        (own, {"recompute": 0.2}, "give question="),
        (own, {"question": []}, "no tokens"),
        ([own[0]] * 18, ask, "was made for 1,024"),
    ):
        with pytest.raises(InputError, match=said) as error:
            kvalloc.blend(model, given, **options)
        assert "\n" not in str(error.value)
    kvalloc.save_cache(own[0], tmp_path / "a.kv")
    for other in (tiny.tiny_model(seed=3), tiny.tiny_model(rope_theta=500.0)):
        allow = other.config.rope_parameters != model.config.rope_parameters
        with pytest.raises(ModelMismatchError):
            kvalloc.blend(other, [tmp_path / "a.kv"], allow_other_model=allow)
    with pytest.raises(ModelMismatchError, match="another"):
        kvalloc.blend(tiny.copy.deepcopy(model), own)
    with pytest.raises(UnsupportedModelError, match="not of full attention"):
        kvalloc.blend(tiny.tiny_model("gemma3"), own)
    longer = tiny.tiny_model(
        rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    )
    with pytest.raises(UnsupportedModelError, match="depends on the length"):
        kvalloc.blend(longer, own)
