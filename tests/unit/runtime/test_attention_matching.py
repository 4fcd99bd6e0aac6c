"""Attention matching: the regression against numpy, and the cache against plain forwards."""

import numpy as np
import numpy.typing as npt
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import policy, run, states_seen
from scorer_oracle import make_states

import kvalloc
from kvalloc.accounting.costs import WIDTHS
from kvalloc.errors import UnsupportedModelError
from kvalloc.models.attention import ChosenWidths
from kvalloc.runtime.policies import attention_matching
from kvalloc.runtime.policies.attention_matching import (
    VALUE_RIDGE,
    match_attention,
)
from kvalloc.runtime.quantization import quantised_values

Array = npt.NDArray[np.float64]
CONTEXT = 90
AHEAD_TOKENS = 8
ROWS = 12


# By themselves


def stacked(design, target, ridge):
    """Ridge regression as ordinary least squares with more rows."""
    n = design.shape[1]
    root = np.sqrt(ridge * np.square(design).sum() / n)
    system = np.concatenate([design, root * np.eye(n)])
    aim = np.concatenate([target, np.zeros((n, target.shape[1]))])
    return np.asarray(np.linalg.lstsq(system, aim, rcond=None)[0])


def matched_by_hand(weights, values, kept, change=0.0):
    """Values of one head's kept entries, from weights (n_queries, n_tokens).

    Rounding changes the logits of those kept.
    """
    mass, own = weights.sum(axis=1, keepdims=True), weights[:, kept] * np.exp(change)
    shares = own / (own.sum(axis=1, keepdims=True) + (1 - mass).clip(min=0))
    lacking = weights @ values - shares @ values[kept]
    return values[kept] + stacked(shares, lacking, VALUE_RIDGE)


def test_queries_that_see_nothing_of_what_is_kept_change_nothing():
    weights = torch.tensor([[0.0, 1.0]])
    found = match_attention(
        weights, torch.eye(2), torch.tensor([0]), changes=torch.tensor([[True]])
    )
    assert torch.equal(found, torch.eye(2)[:1])


@pytest.mark.parametrize("lost", [0.0, float("nan")])
def test_a_system_that_cannot_be_solved_changes_nothing(lost, monkeypatch):
    """Equal queries and a ridge below the rounding; logits that overflow."""
    monkeypatch.setattr(attention_matching, "VALUE_RIDGE", 1e-40)
    weights = torch.full((4, 8), 0.125) + lost
    values = torch.randn(8, 4)
    found = match_attention(weights, values, torch.arange(6), changes=torch.tensor([[True]]))
    assert torch.equal(found, values[:6])


def test_values_that_are_fixed_stay_and_the_others_make_up_for_all():
    rng = np.random.default_rng(3)
    weights, values = rng.dirichlet(np.ones(9), 5), rng.normal(size=(9, 4))
    kept, fixed = np.array([0, 2, 3, 6, 7]), np.array([True, False, True, False, False])
    found = match_attention(
        *map(torch.from_numpy, (weights, values, kept)),
        changes=torch.tensor([[True]]),
        fixed=torch.from_numpy(fixed),
    ).numpy()
    shares = weights[:, kept] / weights[:, kept].sum(axis=1, keepdims=True)
    lacking = weights @ values - shares @ values[kept]
    assert np.array_equal(found[fixed], values[kept][fixed])
    expected = values[kept][~fixed] + stacked(shares[:, ~fixed], lacking, VALUE_RIDGE)
    np.testing.assert_allclose(found[~fixed], expected, atol=1e-9)


def test_values_of_wider_entries_make_up_for_rounding_those_of_narrower_ones():
    rng = np.random.default_rng(5)
    weights, values = rng.dirichlet(np.ones(14), 9), rng.normal(size=(14, 4))
    kept = np.array([0, 2, 3, 5, 6, 7, 9, 11])
    width_of = np.array([3, 8, 2, 3, 8, 2, 2, 8])
    counts = {width: np.array([[np.sum(width_of == width)]]) for width in (8, 3, 2)}
    found = match_attention(
        *(torch.from_numpy(one)[None, None] for one in (weights, values, kept)),
        changes=torch.tensor([[True]]),
        widths=ChosenWidths(counts=counts, of=torch.from_numpy(width_of)[None, None]),
    )
    expected = matched_by_hand(weights, values, kept)
    shares = weights[:, kept] / weights[:, kept].sum(axis=1, keepdims=True)
    for width in (2, 3):
        rounded = quantised_values(torch.from_numpy(expected)[None, None], width)[0, 0].numpy()
        its, wider = width_of == width, width_of > width
        lost = shares[:, its] @ (expected - rounded)[its]
        expected[wider] += stacked(shares[:, wider], lost, VALUE_RIDGE)
    np.testing.assert_allclose(found[0, 0].numpy(), expected, atol=1e-6)


# As a policy


def test_a_head_that_keeps_everything_stays_as_it_is():
    weights, values = torch.rand(2, 4, 8), torch.randn(2, 8, 4)
    rounded, kept = weights[:, :, :6] * 1.5, torch.arange(6).expand(2, 6)
    found = match_attention(
        weights, values, kept, as_stored=rounded, changes=torch.tensor([True, False])[:, None, None]
    )
    assert torch.equal(found[1], values[1, :6])
    assert not torch.equal(found[0], values[0, :6])


def test_without_rotation_nothing_can_be_matched():
    states = make_states()
    kept = torch.zeros(states.keys.shape[:3], dtype=torch.bool)
    kept[..., :9] = True
    with pytest.raises(UnsupportedModelError, match="fits no values"):
        policy("attention_matching").combine(states, kept, kept.sum(dim=-1), sinks=2, window=4)


# In a cache


def matching(profile, **parameters):
    parameters = {"rows": ROWS, **parameters}
    own = profile.policy.replace(name="attention_matching", parameters=parameters)
    return profile.replace(policy=own)


def turned(queries, positions, frequencies):
    """Queries (heads, n, head_dim), pair by pair with complex numbers."""
    half = len(frequencies)
    pairs = queries[..., :half] + 1j * queries[..., half : 2 * half]
    pairs = pairs * np.exp(1j * np.outer(positions, frequencies))
    return np.concatenate([pairs.real, pairs.imag, queries[..., 2 * half :]], axis=-1)


def expected_of(model, ids, kept, *, rows=ROWS, stored=None):
    """For each layer, values of each KV head's kept entries, from plain forwards.

    They make up for what is stored of keys.
    """
    states = states_seen(model, ids)
    found = {}
    for layer, places in kept.items():
        own = states[layer]
        n_tokens = ids.shape[1]
        queries = own.queries[0].double().numpy()
        every_second = range(n_tokens - rows + 1, n_tokens, 2)
        ahead = [n_tokens - 1 + AHEAD_TOKENS - place for place in every_second]
        rates = own.rotation.frequencies.double().numpy()
        references = turned(queries[:, list(every_second)], ahead, rates)
        group = len(queries) // places.shape[1]
        found[layer] = []
        for head in range(places.shape[1]):
            keys = own.keys[0, head, :n_tokens].double().numpy()
            logits = references[head * group : (head + 1) * group] @ keys.T * own.scaling
            if own.sink_logits is not None:
                sinks = own.sink_logits.detach()[head * group : (head + 1) * group].double()
                beside = np.broadcast_to(sinks.numpy()[:, None, None], (*logits.shape[:2], 1))
                logits = np.concatenate([logits, beside], axis=-1)
            weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
            weights = weights[..., :n_tokens] / weights.sum(axis=-1, keepdims=True)
            weights = weights.reshape(-1, n_tokens)
            mine = [int(one) for one in places[0, head] if one >= 0]
            values = own.values[0, head, :n_tokens].double().numpy()
            exact = own.keys[0, head, mine].double().numpy()
            rounded = exact if stored is None else stored[layer][head]
            change = references[head * group : (head + 1) * group] @ (rounded - exact).T
            change = (change * own.scaling).reshape(-1, len(mine))
            found[layer].append(matched_by_hand(weights, values, mine, change))
    return found


def stored_of(cache):
    """For each layer, the kept keys and values of each KV head, float64."""
    pieces = {layer: tiny.pieces_of(store.kept) for layer, store in cache.stores.items()}
    return {
        layer: [(one.keys.double().numpy(), one.values) for _, one in sorted(own.items())]
        for layer, own in pieces.items()
    }


@pytest.mark.parametrize(
    ("family", "level", "rows", "bits"),
    [
        *((family, "head", ROWS, 16) for family in ("llama", "qwen3", "phi3", "gemma3")),
        ("llama", "layer", ROWS, 16),
        ("llama", "prompt", ROWS, 16),
        ("gemma3", "layer", 2, 16),
        ("gpt-oss", "head", ROWS, 16),  # it has sinks
        *(("llama", "head", ROWS, bits) for bits in (8, 5, 4, 3)),  # makes up for rounded keys
    ],
)
@pytest.mark.usefixtures("unrounded")
def test_the_cache_stores_what_plain_forwards_say(family, level, rows, bits):
    model, ids = tiny.tiny_model(family, "eager"), tiny.prompt(CONTEXT)
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    if level != "layer":
        profile = tiny.by_head(profile).replace(by_prompt=level == "prompt")
    if bits < 16:
        profile = profile.replace(bits=np.full_like(profile.budgets, bits))
    cache = kvalloc.make_cache(model, matching(profile, rows=rows))
    run(model, ids, cache)
    kept, plain = tiny.kept_of(cache), states_seen(model, ids)
    unrounded, stored = expected_of(model, ids, kept, rows=rows), stored_of(cache)
    keys = {layer: [key for key, _ in heads] for layer, heads in stored.items()}
    keys = None if bits == 16 else keys
    for layer, heads in expected_of(model, ids, kept, rows=rows, stored=keys).items():
        for head, values in enumerate(heads):
            expected = quantised_values(torch.from_numpy(values)[None, None].float(), bits)[0, 0]
            steps = (values.max() - values.min()) / (2 ** WIDTHS[bits].values - 1)
            # a code may be the next one
            atol = 2e-3 if bits == 16 else 3 * steps
            np.testing.assert_allclose(stored[layer][head][1], expected, atol=atol)
            mine = kept[layer][0, head][kept[layer][0, head] >= 0].long()
            changed = np.abs(values - plain[layer].values[0, head, mine].numpy()).max()
            assert changed > 0.1
            assert bits == 16 or np.abs(values - unrounded[layer][head]).max() > 1e-3


@pytest.mark.usefixtures("unrounded")
def test_at_the_end_of_a_turn_its_own_entries_are_fitted():
    model, ids = tiny.tiny_model("llama", "eager"), tiny.prompt(CONTEXT + 60)
    profile = tiny.by_head(tiny.make_profile(model, CONTEXT, 0.3))
    cache = kvalloc.make_cache(model, matching(profile, rows=ROWS))
    run(model, ids[:, :CONTEXT], cache)
    first = [store.kept.padded(np.array([0])) for store in cache.stores.values()]
    run(model, ids[:, CONTEXT:], cache)
    cache.end_turn()
    plain = states_seen(model, ids)
    for before, (layer, store) in zip(first, cache.stores.items(), strict=True):
        _, values, positions = store.kept.padded(np.array([0]))
        for head, places in enumerate(positions[0]):
            known = dict(zip(before[2][0, head].tolist(), before[1][0, head], strict=True))
            own = zip(places.tolist(), values[0, head], strict=True)
            of_turn = []
            for place, value in own:
                if place in known:
                    assert torch.equal(value, known[place])
                elif place < CONTEXT + 60:
                    of_turn.append(float((value - plain[layer].values[0, head, place]).norm()))
            assert len(of_turn) > 8
            assert max(of_turn) > 0.05
