"""Whatever the budgets and the lengths, the reduced cache answers as the oracle does."""

import pytest
import runtime_oracle as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scorer_oracle import SCORERS

import kvalloc
from kvalloc.accounting.costs import plain_bytes
from kvalloc.runtime.policies import policy_names


@pytest.fixture(scope="module")
def models():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield {
        (family, attention): tiny.tiny_model(family, attention)
        for family in ("llama", "gemma3")
        for attention in ("sdpa", "eager")
    }
    torch.set_num_threads(threads)


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_any_budgets_and_any_lengths(models, data):
    family, attention = data.draw(st.sampled_from(sorted(models)))
    model = models[family, attention]
    context = data.draw(st.integers(1, 40), label="context")
    reference = data.draw(st.integers(10, 60), label="reference context")
    batch = data.draw(st.integers(1, 2), label="batch")
    n_full = len(tiny.shape_of(model).full_layers)
    least = tiny.SINKS + tiny.WINDOW
    budgets = data.draw(
        st.lists(st.integers(least, reference), min_size=n_full, max_size=n_full), label="budgets"
    )
    profile = tiny.make_profile(model, reference, budgets)
    follow = data.draw(st.lists(st.integers(1, 20), min_size=1, max_size=3), label="follow")
    every = data.draw(st.sampled_from([None, 1, 7]), label="every")
    cache = kvalloc.make_cache(model, profile, decode_every=every)
    ids = tiny.prompt(context, batch)
    with torch.no_grad():
        model(ids, past_key_values=cache)
        assert (cache.kept_tokens == profile.budgets_for(context)).all()
        stored = profile.retained_bytes_at(context, batch)
        if not profile.reduces:  # bit for bit: at the model's own width
            stored = plain_bytes(profile.shape, context, batch)
        assert cache.retained_bytes == stored
        oracle = tiny.Oracle(model, ids, tiny.kept_of(cache), cache)
        for tokens in follow:
            more = tiny.prompt(tokens, batch, seed=tokens)
            logits = model(more, past_key_values=cache).logits
            assert (logits - oracle.logits(more)).abs().max() < 1e-4
            oracle.follow(cache)
    assert cache.get_seq_length() == context + sum(follow)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_the_budget_of_all_tokens_seen_is_met_at_every_interval(models, data):
    """With any policy and scorer, whatever follows; between two evictions all of that stays."""
    model = models[data.draw(st.sampled_from(sorted(models)))]
    policy = data.draw(st.sampled_from(policy_names()), label="policy")
    scorer = data.draw(st.sampled_from(list(SCORERS)), label="scorer")
    context, every = data.draw(st.integers(1, 60)), data.draw(st.integers(1, 30), label="every")
    profile = tiny.make_profile(model, 60, data.draw(st.floats(0.2, 0.9)), scorer=scorer)
    if policy != "mpcache" and data.draw(st.booleans(), label="heads"):
        profile = tiny.by_head(profile)
        if policy in ("score", "attention_matching") and data.draw(st.booleans(), label="prompt"):
            profile = profile.replace(by_prompt=True)
    cache = kvalloc.make_cache(model, profile, policy=policy, decode_every=every)
    full, settled = list(profile.shape.full_layers), context
    with torch.no_grad():
        model(tiny.prompt(context), past_key_values=cache)
        for tokens in data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=8)):
            before = cache.kept_tokens[full]
            model(tiny.prompt(tokens, seed=tokens), past_key_values=cache)
            kept, seen = cache.kept_tokens[full], cache.get_seq_length()
            if seen - settled < every:
                assert (kept == before + tokens).all()
            else:
                settled = seen
                most = profile.budgets_for(seen)[full].clip(profile.policy.protected_tokens)
                most = most.clip(max=seen)
                # a budget may grow by two entries where one token has come
                assert most.sum() - most.size <= kept.sum() <= most.sum()
                assert profile.by_prompt or ((most - 1 <= kept) & (kept <= most)).all()
