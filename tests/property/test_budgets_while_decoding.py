"""Whatever comes, a cache keeps as many entries as it may, and a row is as it is alone."""

import copy

import pytest
import runtime_oracle as tiny
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_runs import assert_kept_as_alone, run
from scorer_oracle import SCORERS

import kvalloc
from kvalloc.errors import UnsupportedRequestError
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


def shown_columns(draw, n_rows, n_columns, side, *, least=0):
    """Draw which new columns are tokens of each row: behind padding, before it, or anywhere."""
    if side == "anywhere":
        row = st.lists(st.booleans(), min_size=n_columns, max_size=n_columns)
        return torch.tensor([draw(row) for _ in range(n_rows)])
    counts = [[draw(st.integers(least, n_columns) | st.just(n_columns))] for _ in range(n_rows)]
    shown = torch.arange(n_columns) < torch.tensor(counts)
    return shown if side == "right" else shown.flip(1)


@pytest.fixture(scope="module")
def exact_model():
    """A model whose scores of a batch and of a row alone hardly differ."""
    return tiny.tiny_model().double()


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_row_is_as_alone_whatever_comes_and_goes(exact_model, data):
    """Chunks and turns with padding, rows that are selected, tokens taken back, ended turns."""
    draw, model, sides = data.draw, exact_model, st.sampled_from(["left", "right", "anywhere"])
    policies = ["xkv", "h2o", "lookahead", "expected_attention", "nacl:random_share=0"]
    options = {"policy": draw(st.sampled_from(policies))}
    options["decode_every"] = draw(st.sampled_from([None, 3, 9]))
    profile, chunk = tiny.by_head(tiny.make_profile(model, 40, 0.4)), draw(st.sampled_from([99, 8]))
    side = "left" if chunk == 8 else draw(st.sampled_from(["left", "right"]))
    prompt = shown_columns(draw, draw(st.integers(1, 3)), draw(st.integers(1, 60)), side, least=1)
    cache, *alone = (
        kvalloc.make_cache(model, profile, prompt_tokens=tokens if chunk == 8 else None, **options)
        for tokens in (prompt.shape[1], *prompt.sum(dim=1).tolist())
    )
    mask = torch.zeros(len(prompt), 0, dtype=torch.long)
    steps = st.sampled_from(["read", "read", "read", "select", "crop", "end"])
    parts = [*prompt.split(chunk, dim=1)]
    for step in ["read"] * len(parts) + draw(st.lists(steps, max_size=10)):
        if step == "read":
            n_new = draw(st.sampled_from([1, 1, 2, 5, 30]))
            shown = parts.pop(0) if parts else shown_columns(draw, len(alone), n_new, draw(sides))
            mask = torch.cat([mask, shown.long()], dim=1)
            ids = tiny.prompt(shown.shape[1], len(alone), seed=mask.shape[1])
            places = (mask.cumsum(1) - 1).clamp(min=0)[:, -shown.shape[1] :]
            logits = run(model, ids, cache, mask, position_ids=places)
            for row, own in enumerate(alone):
                if shown[row].any():
                    expected = run(model, ids[row : row + 1, shown[row]], own)[0]
                    torch.testing.assert_close(logits[row, shown[row]], expected, atol=0.02, rtol=0)
        elif step == "select":
            rows = draw(st.lists(st.integers(0, len(alone) - 1), min_size=1, max_size=4))
            cache.batch_select_indices(torch.tensor(rows))
            alone, mask = [copy.deepcopy(alone[row]) for row in rows], mask[rows]
        elif step == "crop":
            kept = mask.shape[1] - draw(st.integers(1, 8))
            if kept <= 0 or not mask[:, :kept].any(dim=1).all():
                continue
            try:
                cache.crop(kept)
            except UnsupportedRequestError:  # it would reach into what was evicted
                continue
            for own, row in zip(alone, mask, strict=True):
                own.crop(-int(row[kept:].sum()))
            mask = mask[:, :kept]
        else:
            for own in (cache, *alone):
                own.end_turn()
        for row, own in enumerate(alone if not parts else ()):
            assert_kept_as_alone(cache, row, own, mask[row].nonzero()[:, 0])
