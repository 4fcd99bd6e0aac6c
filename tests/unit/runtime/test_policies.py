"""What every policy must do, what each one does, by head, merging, and what the page says of it."""

import inspect
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import runtime_oracle as tiny
import scorer_oracle
import torch
from other_attention import attention_on_cpu
from prompt_runs import AT_ONCE, padding_mask, policy, run
from runtime_cells import COMBINING
from scorer_oracle import SCORERS, make_states

from kvalloc.errors import InputError, UnsupportedRequestError
from kvalloc.extensions.making import make_cache
from kvalloc.models.attention import intercept_attention
from kvalloc.problem.registry import plugin_options
from kvalloc.runtime import plan
from kvalloc.runtime.policies import (
    get_policy,
    policy_class,
    policy_names,
)
from kvalloc.runtime.policies import merge as merge_file
from kvalloc.runtime.policies.score import Score
from kvalloc.scorers import get_scorer, scorer_class, scorer_names
from kvalloc.scorers.projected_values import projected_value_norms

# What every policy must do, what each one does, and that all go through the cache right


N_TOKENS = 40
LIMITS = {"sinks": 2, "window": 4}


def states_of(**changes):
    values = {"batch": 2, "n_tokens": N_TOKENS, "hidden_size": 9}
    return make_states(**{**values, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", policy_names())
def test_budgets_are_met_exactly_for_each_row_and_head(name, dtype):
    budgets = torch.tensor([[6, 13], [40, 7]])
    states = states_of(dtype=dtype)
    kept = policy(name).keep(states, budgets, **LIMITS)
    assert kept.dtype == torch.bool
    assert torch.equal(kept.sum(dim=-1), budgets)
    assert kept[..., :2].all()
    assert kept[..., -4:].all()
    assert torch.equal(kept, policy(name).keep(states, budgets, **LIMITS))


@pytest.mark.parametrize("name", policy_names())
@pytest.mark.parametrize("budget", [5, 41])
def test_budgets_that_cannot_be_are_refused(name, budget):
    budgets = torch.full((2, 2), 20)
    budgets[1, 0] = budget
    with pytest.raises(InputError, match=f"budget of {budget} entries"):
        policy(name).keep(states_of(), budgets, **LIMITS)


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_critical_takes_its_two_stages(alpha):
    states = states_of(batch=1)
    made = policy("critical", alpha=alpha)
    budget, sinks, window = 16, 2, 4
    kept = made.keep(states, torch.full((1, 2), budget), sinks=sinks, window=window)
    scores = made.scorer.score(states, sinks=sinks)
    norms = projected_value_norms(states)
    for head in range(2):
        free = set(range(sinks, N_TOKENS - window))
        room = budget - sinks - window
        first = sorted(free, key=lambda t: (-scores[0, head, t].item(), t))[: int(alpha * room)]
        weighted = (scores[0, head] + 1e-4) * norms[0, head]
        rest = sorted(free - set(first), key=lambda t: (-weighted[t].item(), t))
        expected = {0, 1, *range(36, 40), *first, *rest[: room - len(first)]}
        assert set(kept[0, head].nonzero()[:, 0].tolist()) == expected
    by_score = policy("score").keep(states, torch.full((1, 2), budget), **LIMITS)
    assert torch.equal(kept, by_score) == (alpha == 1)


def naive_proxy_scores(states, proxies):
    attention = scorer_oracle.full_attention(states)[:, :, proxies].sum(axis=2)
    batch, heads, tokens = attention.shape
    found = attention.reshape(batch, 2, heads // 2, tokens).mean(axis=2)
    return found


def test_nacl_without_chance_keeps_proxies_and_their_best():
    states, proxies = states_of(), [36, 37, 38, 39]
    made = policy("nacl", random_share=0.0)
    kept = made.keep(states, torch.full((2, 2), 17), sinks=2, window=1)
    scores = naive_proxy_scores(states, proxies)
    must = {0, 1, 39, *proxies}
    for place in np.ndindex(2, 2):
        free = sorted(set(range(40)) - must, key=lambda t: -scores[*place, t])
        expected = must | set(free[: 17 - len(must)])
        assert set(kept[place].nonzero()[:, 0].tolist()) == expected


def test_nacl_draws_by_seed_layer_and_head():
    # All scores are equal, so only chance can tell heads, layers and seeds apart.
    states = states_of(batch=1)
    states = replace(states, keys=torch.zeros_like(states.keys))
    budgets = torch.full((1, 2), 20)

    def drawn(seed, layer):
        made = policy("nacl", seed=seed, random_share=1.0)
        return made.keep(replace(states, layer=layer), budgets, **LIMITS)

    first = drawn(0, 0)
    assert torch.equal(first, drawn(0, 0))
    assert not torch.equal(first, drawn(1, 0))
    assert not torch.equal(first, drawn(0, 1))
    assert not torch.equal(first[0, 0], first[0, 1])
    # a head that is shown alone draws what it draws next to the others
    alone = replace(
        states,
        queries=states.queries[:, 3:],
        keys=states.keys[:, 1:],
        values=states.values[:, 1:],
        first_head=1,
    )
    made = policy("nacl", seed=0, random_share=1.0)
    second = made.keep(alone, budgets[:, 1:], **LIMITS)
    assert torch.equal(second[0, 0], first[0, 1])


def test_nacl_draws_from_the_softmax_of_its_scores():
    # One entry is drawn of two; its frequency over many seeds is its share of the softmax.
    states = states_of(batch=1, n_kv_heads=1, group=1, n_tokens=4)
    scores = scorer_oracle.full_attention(states)[0, 0, -1]
    counts = np.zeros(4)
    n_seeds = 600
    for seed in range(n_seeds):
        made = policy("nacl", seed=seed, random_share=1.0, proxy_share=0.25)
        kept = made.keep(states, torch.tensor([[3]]), sinks=1, window=1)
        counts += kept[0, 0].numpy()
    expected = np.exp(scores[1]) / (np.exp(scores[1]) + np.exp(scores[2]))
    # five standard deviations
    assert abs(counts[1] / n_seeds - expected) < 5 * np.sqrt(0.25 / n_seeds)


def test_nacl_with_more_proxies_than_budget_keeps_the_last_ones():
    kept = policy("nacl", proxy_share=0.5).keep(states_of(), torch.full((2, 2), 10), **LIMITS)
    assert kept[1, 1].nonzero()[:, 0].tolist() == [0, 1, *range(32, 40)]


# through the cache

CONTEXT = 120


@pytest.mark.parametrize("name", [*policy_names(), *SCORERS])
def test_chunks_keep_the_same_entries(model, name):
    """As long as nothing has to go before the last chunk."""
    ids = tiny.prompt(CONTEXT, 2)
    for budget, sizes in ((60, [20, 3, 37, CONTEXT - 60]), (CONTEXT - 6, [50, 3, CONTEXT - 60, 7])):
        profile = tiny.make_profile(model, CONTEXT, [budget] * tiny.N_LAYERS)
        whole = make_cache(model, profile, policy=name)
        in_chunks = make_cache(model, profile, policy=name, prompt_tokens=CONTEXT)
        run(model, ids, whole)
        if name in COMBINING and not in_chunks.methods[0].policy.holds:
            with pytest.raises(UnsupportedRequestError, match="in one piece"):
                run(model, ids[:, :50], in_chunks)
            continue
        for chunk in ids.split(sizes, dim=1):
            run(model, chunk, in_chunks)
        for cache in (whole, in_chunks):  # some wait for what follows
            run(model, tiny.prompt(16, 2, seed=3), cache)
            assert cache.reduced
        assert tiny.same_kept(whole, in_chunks)


@pytest.mark.usefixtures("either_way")
@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("family", ["gemma2", "gpt-oss"])
@pytest.mark.parametrize("options", [{}, {"policy": "h2o"}, {"policy": "cake"}, AT_ONCE])
def test_soft_caps_and_sink_logits_are_carried(family, options, level):
    """Entries are ranked and attended to with the logits that these models have."""
    model = tiny.tiny_model(family, "eager", sliding_window=16)
    for key, weight in model.named_parameters():
        if key.endswith("sinks"):
            torch.nn.init.normal_(weight, std=2.0)
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    profile = tiny.by_head(profile) if level == "head" else profile
    cache, shadow = make_cache(model, profile, **options), tiny.Shadow(model)
    for tokens in (CONTEXT, 7, 1):
        ids = tiny.prompt(tokens, 2, seed=tokens)
        assert tiny.worst(run(model, ids, cache), shadow.logits(ids)) < 1e-4
        if tokens == CONTEXT:
            shadow.follow(cache, combined=options is AT_ONCE)


def test_parameters_build_the_policy_again():
    own = {"attention_matching": {"rows": 5}}
    for name in policy_names():
        made = policy(name, **own.get(name, {}))
        assert get_policy(name, scorer=made.scorer, **made.parameters()) == made


# Merging: entry by entry in loops, and as a full cache with hidden entries; rows


MERGED_CONTEXT = 120
Loops = tuple[np.ndarray, np.ndarray]


def merged_in_loops(keys, values, kept, protected, *, threshold=None, weights="exponential"):
    """One head, (n_tokens, head_dim): each evicted entry into its nearest kept one."""
    keys, values = keys.astype(np.float64), values.astype(np.float64)
    targets = [t for t in kept if t not in protected]
    sources = [t for t in range(len(keys)) if t not in set(kept)]
    units = keys / np.linalg.norm(keys, axis=-1, keepdims=True)
    nearest = {}
    for i in sources if targets else []:
        cosines = [float(units[i] @ units[j]) for j in targets]
        nearest[i] = (targets[int(np.argmax(cosines))], max(cosines))
    if threshold is None:
        threshold = float(np.mean([u for _, u in nearest.values()])) if nearest else 0.0
    pairs = {i: pair for i, pair in nearest.items() if pair[1] >= threshold - 1e-9}
    distances = [np.linalg.norm(keys[i] - keys[j]) for i, (j, _) in pairs.items()]
    spread = float(np.mean(distances)) if distances else 1.0
    new_keys, new_values = keys.copy(), values.copy()
    for target in targets:
        shares = {target: math.e if weights == "exponential" else 1.0}
        for i, (j, cosine) in pairs.items():
            if j == target:
                gap = float(np.linalg.norm(keys[i] - keys[j]))
                gauss = math.exp(-(gap**2) / (2 * spread**2))
                shares[i] = math.exp(cosine) if weights == "exponential" else gauss
        total = sum(shares.values())
        new_keys[target] = sum(share / total * keys[i] for i, share in shares.items())
        new_values[target] = sum(share / total * values[i] for i, share in shares.items())
    return new_keys, new_values


@pytest.mark.parametrize("block", [3, 1024])
@pytest.mark.parametrize(
    ("family", "parameters"),
    [
        ("llama", {}),
        ("gemma3", {}),
        ("llama", {"threshold": 0.75}),
        ("llama", {"threshold": 0.0, "weights": "gaussian"}),
    ],
)
@pytest.mark.usefixtures("unrounded")
def test_the_cache_answers_as_over_the_combined_entries(monkeypatch, family, parameters, block):
    """Also where a layer keeps everything, and where only sinks and window stay."""
    monkeypatch.setattr(merge_file, "_BLOCK_ENTRIES", block)
    model, ids = tiny.tiny_model(family), tiny.prompt(MERGED_CONTEXT, 2)
    full = tiny.shape_of(model).full_layers
    profile = tiny.make_profile(model, MERGED_CONTEXT, [MERGED_CONTEXT, 6, 36, 50][-len(full) :])
    profile = tiny.by_head(profile, spread=5)
    own = profile.policy.replace(name="merge", parameters=parameters)
    cache = make_cache(model, profile.replace(policy=own))
    sinks, window, changed = profile.policy.sinks, profile.policy.window, 0
    protected = {*range(sinks), *range(MERGED_CONTEXT - window, MERGED_CONTEXT)}
    run(model, ids, cache)
    with torch.no_grad():
        kept = tiny.kept_of(cache)
        oracle = tiny.Oracle(model, ids, kept)
        for layer, positions in kept.items():
            stored = oracle.cache.layers[layer]
            for row, head in np.ndindex(*positions.shape[:2]):
                keys, values = stored.keys[row, head], stored.values[row, head]
                mine = positions[row, head][positions[row, head] >= 0].tolist()
                merged = merged_in_loops(
                    keys.numpy(), values.numpy(), mine, protected, **parameters
                )
                changed += int(not np.allclose(merged[0], keys))
                for tensor, change in zip((keys, values), merged, strict=True):
                    tensor.copy_(torch.from_numpy(change))
        for tokens in (1, 5, 1):
            question = tiny.prompt(tokens, 2, seed=tokens)
            logits = model(question, past_key_values=cache).logits
            assert (logits - oracle.logits(question)).abs().max() < 1e-4
    assert changed >= 4
    assert (cache.kept_tokens[[*full]] == profile.budgets[[*full]] + 7).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_combined_in_float32(dtype):
    states = make_states(batch=2, dtype=dtype)
    made = policy("merge")
    budgets = torch.full((2, 2), 15)
    kept = made.keep(states, budgets, sinks=2, window=4)
    found = made.combine(states, kept, budgets, sinks=2, window=4)
    whole = replace(states, keys=states.keys.float(), values=states.values.float())
    expected = made.combine(whole, kept, budgets, sinks=2, window=4)
    # rounded once, at the end
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[kept], theirs[kept].to(dtype))


def test_a_row_that_keeps_everything_leaves_the_others_their_fitted_values():
    """Each row is as it would be alone."""
    model, ids = tiny.tiny_model(), tiny.prompt(MERGED_CONTEXT, 2)
    profile = tiny.by_head(tiny.make_profile(model, MERGED_CONTEXT, 0.4))
    mask = padding_mask((5, MERGED_CONTEXT))
    together, alone = (make_cache(model, profile, **AT_ONCE) for _ in range(2))
    with torch.no_grad():
        model(ids, attention_mask=mask, past_key_values=together)
        model(ids[1:], past_key_values=alone)
    for layer, own in zip(together.layers, alone.layers, strict=True):
        assert layer.kept.lengths[0].tolist() == [5, 5]
        pieces, of_row = tiny.pieces_of(layer.kept), tiny.pieces_of(own.kept)
        for head in range(tiny.N_KV_HEADS):
            found, expected = pieces[1, head].values, of_row[0, head].values
            torch.testing.assert_close(found, expected, atol=2e-3, rtol=1e-3)


# Masks as models of each attention show them


@pytest.fixture(params=["flex_attention", "padding_only"])
def attention(request):
    with attention_on_cpu(request.param):
        yield request.param


@pytest.mark.parametrize("scorer", [name for name in SCORERS if get_scorer(name).later is None])
def test_scorers_read_masks_of_either_kind(attention, scorer):
    """Padding and causal attention, as the model shows them: the same scores as on sdpa."""
    ids, mask = tiny.prompt(90, 2), padding_mask((90, 41))
    own = get_scorer(scorer)
    scores = []
    for name in (attention, "sdpa"):
        model = tiny.tiny_model("llama", name)
        seen = []

        def look(states, compute, seen=seen):
            if states.layer == 0:  # later layers differ by rounding
                seen.append(own.score(states, sinks=2))
            return compute(states.mask)

        with torch.no_grad(), intercept_attention(model, look):
            model(ids, attention_mask=mask)
        scores += seen
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-7)


# docs/policies.md says what is there


PAGE = Path(__file__).parents[3] / "docs" / "policies.md"


def rows():
    lines = [line for line in PAGE.read_text(encoding="utf-8").splitlines() if "| `" in line]
    cells = [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines]
    return {row[0].strip("| `"): row[1:] for row in cells}


def test_every_policy_and_scorer_has_a_row():
    kinds = {name: row[0] for name, row in rows().items()}
    expected = {
        **dict.fromkeys(scorer_names(), "scorer"),
        **dict.fromkeys(policy_names(), "policy"),
    }
    assert kinds == expected


def test_parameters_and_defaults_are_those_of_the_code():
    for name, row in rows().items():
        cls = policy_class(name) if row[0] == "policy" else scorer_class(name)
        options = {key: option for key, option in plugin_options(cls).items() if key != "scorer"}
        stated = dict(
            re.match(r"(\w+)(?:=(\S+))?$", text).groups()
            for text in re.findall(r"`([a-z_]+(?:=[^`]*)?)`", row[3])
            if text.partition("=")[0] in options
        )
        assert stated.keys() == options.keys(), name
        for key, option in options.items():
            assert option.default is not inspect.Parameter.empty
            wanted = None if option.default is None else str(option.default)
            found = stated[key]
            assert (found or "none").lower() == (wanted or "none").lower(), (name, key)


# Layers of a short prompt evict together


@pytest.mark.parametrize("name", ["score", "attention_matching", "merge"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_layers_that_evict_together_keep_what_each_keeps_alone(name, dtype, monkeypatch):
    model = tiny.tiny_model().to(dtype)
    profile = tiny.by_head(tiny.make_profile(model, N_TOKENS, 0.5, scorer="lookahead"), spread=9)
    bits = np.resize([8, 16, 4, 3, 8], profile.budgets.shape)
    profile = profile.replace(bits=bits, policy=profile.policy.replace(name=name))
    ids = tiny.prompt(N_TOKENS, 2)
    mask = torch.ones_like(ids)
    mask[1, :7] = 0
    together, calls = make_cache(model, profile), []
    scores = Score.scores
    monkeypatch.setattr(
        Score, "scores", lambda *own, **more: calls.append(1) or scores(*own, **more)
    )
    run(model, ids, together, mask)
    n_together = len(calls)
    monkeypatch.setattr(plan, "layers_together", lambda *_: 1)
    alone = make_cache(model, profile)
    run(model, ids, alone, mask)
    assert n_together < len(calls) - n_together
    for one, other in zip(together.stores.values(), alone.stores.values(), strict=True):
        for part, expected in zip(one.kept.parts, other.kept.parts, strict=True):
            assert np.array_equal(part.segments, expected.segments)
            assert np.array_equal(part.lengths, expected.lengths)
            assert torch.equal(part.positions, expected.positions)
            assert part.kind == expected.kind
            stored = [one.untyped_storage().nbytes() for one in part.tensors()]
            assert stored == [one.nbytes for one in expected.tensors()]
    found, expected = (run(model, ids[:, :3], cache) for cache in (together, alone))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)


def test_no_layer_waits_where_memory_is_bounded(model):
    profile = tiny.make_profile(model, N_TOKENS, 0.5)
    assert plan.layers_together(N_TOKENS, profile, None) > 1
    assert plan.layers_together(N_TOKENS, profile, 10**9) == 1
    assert plan.layers_together(N_TOKENS, profile.replace(fits_a_peak=True), None) == 1
    assert plan.layers_together(plan.SHORT_TOKENS + 1, profile, None) == 1
