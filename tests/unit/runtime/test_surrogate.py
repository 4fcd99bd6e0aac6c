"""The scorer `surrogate` in a cache: an entry scores the same however and whenever it is seen."""

from dataclasses import replace

import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run, states_seen
from surrogates import fit_surrogate

from kvalloc.extensions.making import make_cache
from kvalloc.extensions.saved import load_cache, save_cache
from kvalloc.formats.fitted import FittedSurrogate
from kvalloc.prompts.texts import Prompt
from kvalloc.scorers import get_scorer
from kvalloc.scorers.repeats import repeat_counts
from kvalloc.scorers.surrogate import Surrogate

CONTEXT, PADDING = 60, 11
OWN_SCORE = Surrogate.score


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A surrogate of the tiny model, without votes."""
    path = tmp_path_factory.mktemp("surrogate") / "s.safetensors"
    ids = [tuple(tiny.prompt(CONTEXT, seed=seed)[0].tolist()) for seed in range(2, 6)]
    prompts = [Prompt(token_ids=each) for each in ids]
    fit_surrogate(tiny.tiny_model(), None, prompts, output=path, context=CONTEXT, samples=4)
    FittedSurrogate.load(path).replace(votes_weight=0.0, votes_ratio=1.0).save(path)
    return str(path)


@pytest.mark.parametrize("padding", [0, PADDING])
@pytest.mark.parametrize("level", ["layer", "head"])
@pytest.mark.parametrize("every", [None, 1, 4])
def test_an_entry_scores_the_same_at_any_time(model, file, monkeypatch, level, padding, every):
    """In chunks, behind padding, head by head, and while decoding: in layer 0 as in one read.

    The keys and values of that layer are the same whatever was evicted.
    """
    profile = tiny.make_profile(model, CONTEXT, 0.4)
    profile = tiny.by_head(profile) if level == "head" else profile
    ids, mask = tiny.prompt(CONTEXT + 12), torch.ones(1, CONTEXT + 12, dtype=torch.long)
    mask[:, :padding] = 0
    places = (mask.cumsum(-1) - 1).clamp(min=0)
    looks = []

    def score(self, states, *, sinks):
        if states.layer == 0:  # what is predicted, without votes
            looks.append((states, OWN_SCORE(replace(self, votes=0), states, sinks=sinks)))
        return OWN_SCORE(self, states, sinks=sinks)

    states = states_seen(model, ids, attention_mask=mask, position_ids=places)[0]
    shown = {name: getattr(states, name)[:, :, padding:] for name in ("keys", "values")}
    scorer = get_scorer("surrogate", file=file, window=1)
    truth = OWN_SCORE(scorer, replace(states, **shown, mask=None), sinks=0)[0]
    monkeypatch.setattr(Surrogate, "score", score)
    options = {"prompt_tokens": CONTEXT, "decode_every": every}
    cache = make_cache(model, profile, policy=f"surrogate:file={file}", **options)
    begin = 0
    for size in [30, 7, CONTEXT - 37, *[1] * (0 if every is None else 12)]:
        here = slice(begin, begin + size)
        with torch.no_grad():
            model(
                ids[:, here],
                attention_mask=mask[:, : here.stop],
                position_ids=places[:, here],
                past_key_values=cache,
            )
        begin = here.stop
    assert cache.reduced
    assert len(looks) >= (2 if every is None else 5)
    compared = 0
    for states, found in looks:
        heads = found.shape[1] // max(len(states.layers), 1)  # of layer 0, where more are shown
        for head in range(heads):
            held = torch.arange(found.shape[2])
            if states.positions is not None:
                held = states.positions[0, head].long()
            there = slice(None) if states.absent is None else ~states.absent[0, head]
            held, scores = held[there], found[0, head][there]
            ranked = scores > 0  # neither sinks nor window
            expected = truth[states.first_head + head, held]
            torch.testing.assert_close(scores[ranked], expected[ranked], rtol=1e-3, atol=0)
            compared += int((ranked & (held != torch.arange(held.numel()))).sum())
    assert compared > 20  # entries that stand elsewhere than they came


def first_best(scores, count):
    """Where the largest are; the earlier ones of equal scores, as of tokens that come twice."""
    return scores.sort(descending=True, stable=True).indices[:count].tolist()


def repeating(tokens):
    """A prompt whose first tokens come again and again: its entries count less."""
    return torch.cat([tiny.prompt(15), tiny.prompt(15), tiny.prompt(tokens)], dim=1)[:, :tokens]


@pytest.mark.parametrize("make", [tiny.prompt, repeating])
def test_the_best_stay_and_a_whole_prompt_is_ranked_likewise(file, make):
    """Layer by layer as the largest scores say; with values fitted at the end, the same entries."""
    model, ids = tiny.tiny_model(), make(CONTEXT)
    profile = tiny.make_profile(model, CONTEXT, 0.4)
    options = {"file": file, "window": tiny.WINDOW}
    own = profile.policy.replace(scorer="surrogate", scorer_parameters=options)
    immediate = make_cache(model, profile, policy=own)
    matching, chunks = profile.with_policy(own), {"prompt_tokens": CONTEXT}
    deferred = make_cache(model, matching, policy="attention_matching", **chunks)
    scorer, seen = get_scorer("surrogate", **options), states_seen(model, ids)
    times = torch.from_numpy(repeat_counts(ids[0].numpy()))
    assert (times > 1).any() == (make is repeating)
    scores = [scorer.score(one, sinks=tiny.SINKS)[0] / times.sqrt() for one in seen.values()]
    run(model, ids, immediate)
    for chunk in ids.split(CONTEXT // 2, dim=1):
        run(model, chunk, deferred)
    assert immediate.reduced
    assert deferred.reduced
    protected = {*range(tiny.SINKS), *range(CONTEXT - tiny.WINDOW, CONTEXT)}
    for head in range(tiny.N_KV_HEADS):  # of layer 0, which the others' evictions do not reach
        budget = int(profile.budgets[0, head]) - len(protected)
        best = first_best(scores[0][head], budget)
        assert {*immediate.kept_indices(0)[0, head].tolist()} == protected | {*best}
    for layer in range(tiny.N_LAYERS):  # evicted after the whole prompt was read
        for head in range(tiny.N_KV_HEADS):
            budget = int(profile.budgets[layer, head]) - len(protected)
            best = first_best(scores[layer][head], budget)
            assert {*deferred.kept_indices(layer)[0, head].tolist()} == protected | {*best}


def test_repetitions_are_counted_in_each_row_without_its_padding(model, file):
    profile, ids = tiny.make_profile(model, CONTEXT, 0.4), repeating(CONTEXT)
    policy = f"surrogate:file={file}"
    alone = make_cache(model, profile, policy=policy)
    run(model, ids, alone)
    batch = torch.cat([tiny.prompt(CONTEXT + PADDING), tiny.prompt(CONTEXT + PADDING)])
    batch[1, PADDING:] = ids
    mask = torch.ones_like(batch)
    mask[1, :PADDING] = 0
    padded = make_cache(model, profile, policy=policy)
    with torch.no_grad():
        places = (mask.cumsum(-1) - 1).clamp(min=0)
        model(batch, attention_mask=mask, position_ids=places, past_key_values=padded)
    columns = padded.kept_indices(0)[1]
    kept = [row[row >= 0] - PADDING for row in columns]
    assert torch.equal(torch.stack(kept), alone.kept_indices(0)[0])


def test_votes_count_where_they_are_larger_than_the_prediction(model, file):
    lookahead = get_scorer("lookahead", window=3, votes=7)
    for states in states_seen(model, tiny.prompt(CONTEXT)).values():
        predicted = get_scorer("surrogate", file=file, window=3).score(states, sinks=2)
        votes = 0.5 * lookahead.score(states, sinks=2)
        scorer = get_scorer("surrogate", file=file, window=3, votes=7, votes_weight=0.5)
        assert scorer.query_rows(CONTEXT) == 7
        found = scorer.score(states, sinks=2)
        assert torch.equal(found, predicted.maximum(votes))
        assert (found > predicted).any()
        assert (found > votes).any()


def test_the_fit_decides_whether_queries_vote(file, tmp_path):
    """And what is kept of a prompt competes with what followed it at a weight of its own."""
    voting = tmp_path / "voting"
    FittedSurrogate.load(file).replace(votes_weight=5.0, votes_ratio=0.5).save(voting)
    for given, (votes, weight) in (
        ({"file": file}, (0, 30.0)),
        ({"file": str(voting)}, (128, 5.0)),
        ({"file": str(voting), "votes": 0}, (0, 5.0)),
        ({"file": file, "votes": 7, "votes_weight": 2.0}, (7, 2.0)),
    ):
        scorer = Surrogate(**given)
        assert (scorer.votes, scorer.votes_weight) == (votes, weight)
        assert scorer.query_rows(CONTEXT) == votes
        assert (scorer.for_turns.votes, scorer.for_turns.votes_weight) == (256, 30.0)
        assert Surrogate(**scorer.parameters()) == scorer


def test_a_prompt_that_failed_counts_for_no_other(model, file):
    policy, profile = f"surrogate:file={file}", tiny.make_profile(model, CONTEXT, 0.4)
    caches = [make_cache(model, profile, policy=policy) for _ in range(2)]
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run(model, repeating(CONTEXT), caches[0])
    handle.remove()
    for cache in caches:
        with torch.no_grad():
            model(inputs_embeds=model.model.embed_tokens(tiny.prompt(CONTEXT)), cache=cache)
    assert tiny.same_kept(*caches)


def test_a_saved_cache_keeps_counting(model, file, tmp_path):
    policy, path = f"surrogate:file={file}", tmp_path / "saved.safetensors"
    cache = make_cache(model, tiny.make_profile(model, CONTEXT, 0.4), policy=policy)
    run(model, torch.cat([repeating(CONTEXT), tiny.prompt(CONTEXT, seed=9)]), cache)
    save_cache(cache, path)
    loaded = load_cache(path, model)
    assert cache.rows[0].repeats.equal(loaded.rows[0].repeats)
    for one in (cache, loaded):
        run(model, tiny.prompt(40, 2, seed=77), one)
        one.end_turn()
    assert tiny.same_kept(cache, loaded)
