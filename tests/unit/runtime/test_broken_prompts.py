"""A prompt that breaks off in one of its chunks: the cache never calls it whole."""

import copy

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import failing_with, run

import kvalloc
from kvalloc.errors import InputError, KVAllocError, SolverError, UnsupportedRequestError
from kvalloc.extensions.making import make_cache
from kvalloc.runtime.forwards import Forward
from kvalloc.runtime.policies.score import Score
from kvalloc.runtime.selection import keep_best

CONTEXT, CHUNK = 90, 30
KINDS = ["layer", "head", "bits", "repeated", "decode_every"]


def cache_of(model, kind):
    scorer = "reconstruction" if kind == "repeated" else "xkv"
    profile = tiny.make_profile(model, CONTEXT, 0.4, scorer=scorer)
    if kind == "bits":
        profile = profile.replace(bits=np.full_like(profile.budgets, 8))
    if kind == "head":
        profile = tiny.by_head(profile, spread=9)
    every = 4 if kind == "decode_every" else None
    return make_cache(model, profile, decode_every=every, prompt_tokens=CONTEXT)


def check_refused(model, cache, path, reason):
    """Neither the rest of the prompt nor what follows it, nor a file, nor a copy of it."""
    assert not cache.prompt_complete
    assert cache.interrupted is not None
    assert "interrupted" in repr(cache)
    said = rf"{reason}.*cache\.reset\(\)"
    for one in (cache, copy.deepcopy(cache)):
        for tokens in (CHUNK, 1):
            with pytest.raises(UnsupportedRequestError, match=said):
                run(model, tiny.prompt(tokens), one)
        # longer than what arrived: transformers 5.2 itself fails on a shorter one before it asks
        with pytest.raises(UnsupportedRequestError, match=said):
            model.generate(tiny.prompt(CONTEXT + 3), past_key_values=one, max_new_tokens=2)
    with pytest.raises(UnsupportedRequestError, match=said):
        kvalloc.save_cache(cache, path)
    assert not path.exists()
    with pytest.raises(UnsupportedRequestError, match="cannot crop"):
        cache.crop(-1)


def check_as_new(model, cache, kind):
    """A whole prompt leaves in it what it leaves in a new cache."""
    ids, question = tiny.prompt(CONTEXT), tiny.prompt(8, seed=1)
    new = cache_of(model, kind)
    for one in (cache, new):
        for chunk in ids.split(CHUNK, dim=1):
            run(model, chunk, one)
    assert cache.prompt_complete
    assert cache.interrupted is None
    assert torch.equal(run(model, question, cache), run(model, question, new))
    assert cache.retained_bytes == new.retained_bytes < new.full_bytes


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@pytest.mark.parametrize("kind", KINDS)
def test_an_error_within_a_chunk(model, tmp_path, kind, error):
    """When some layers have seen it, they disagree; before any has, it can come again."""
    cache, ids = cache_of(model, kind), tiny.prompt(CONTEXT)
    plain = run(model, ids, None)

    def fail(*_):
        raise error

    run(model, ids[:, :CHUNK], cache)
    for layer in (0, 2):
        assert cache.interrupted is None
        handle = model.model.layers[layer].register_forward_pre_hook(fail)
        with pytest.raises(error):
            run(model, ids[:, CHUNK:], cache)
        handle.remove()
        # what Ctrl-C left open ends with the next forward
        assert torch.equal(run(model, ids, None), plain)
        assert model.config._attn_implementation == "sdpa"
    check_refused(model, cache, tmp_path / "c.kv", "failed half-way")
    cache.reset()
    check_as_new(model, cache, kind)


@pytest.mark.parametrize(("tokens", "error"), [(1, KeyboardInterrupt), (30, ValueError)])
@pytest.mark.parametrize("kind", [*KINDS, "whole"])
def test_a_turn_that_breaks_off_was_not_read(kind, tokens, error):
    """The cache goes on from the end of the turn before, without a reset."""
    model, turns = tiny.tiny_model(), [tiny.prompt(n, seed=n) for n in (CONTEXT, 10, tokens)]
    if kind == "whole":
        cache = make_cache(model, tiny.make_profile(model, CONTEXT, 1.0))
    else:
        cache = cache_of(model, kind)
    for turn in turns[:2]:
        run(model, turn, cache)
    before, size = copy.deepcopy(cache), cache.retained_bytes
    for _ in range(2):
        with failing_with(error, model):
            run(model, turns[2], cache)
    run(model, turns[2], None)  # what Ctrl-C left open ends with the next forward of the model
    assert (cache.interrupted, cache.retained_bytes) == (None, size)
    assert cache.get_seq_length() == before.get_seq_length()
    for turn in (turns[2], tiny.prompt(70, seed=9), tiny.prompt(1)):
        assert torch.equal(run(model, turn, cache), run(model, turn, before))
    assert (cache.kept_tokens == before.kept_tokens).all()


def test_queries_before_a_turn_that_failed_in_attention_still_vote(model, monkeypatch):
    """The layer had stored the turn's keys, and not yet noted its queries."""
    caches = [cache_of(model, "head") for _ in range(2)]
    for cache in caches:
        for chunk in (*tiny.prompt(CONTEXT).split(CHUNK, dim=1), tiny.prompt(20, seed=1)):
            run(model, chunk, cache)
    attend = Forward.attend

    def fail(forward, states, compute):
        if states.layer == 1:
            raise ZeroDivisionError
        return attend(forward, states, compute)

    with monkeypatch.context() as patch, torch.no_grad(), pytest.raises(ZeroDivisionError):
        patch.setattr(Forward, "attend", fail)
        model(tiny.prompt(9, seed=2), past_key_values=caches[0])
    for cache in caches:
        cache.end_turn()
    assert tiny.same_kept(*caches)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda cache: cache.crop(-1), r"failed half-way.*cache\.reset"),
        (lambda cache: cache.end_turn(), r"failed half-way.*cache\.reset"),
        (lambda cache: cache.reset(), "not after a reset within one"),
    ],
)
@pytest.mark.parametrize("kind", KINDS[:4])
def test_a_cache_is_not_changed_amid_a_forward(model, kind, change, said):
    """It would be cut in some layers and not in others; afterwards a reset helps as ever."""
    cache, hooked = cache_of(model, kind), model.model.layers[1]
    for tokens in (CONTEXT, 3):
        run(model, tiny.prompt(tokens), cache)
    handle = hooked.register_forward_hook(lambda *_: change(cache))
    with pytest.raises(KVAllocError, match=said):
        run(model, tiny.prompt(1), cache)
    handle.remove()
    cache.reset()
    check_as_new(model, cache, kind)


@pytest.mark.parametrize("scores", ["not finite", "too few"])
@pytest.mark.parametrize("kind", ["layer", "head", "repeated", "decode_every"])
def test_what_is_checked_at_the_end_leaves_nothing_half_done(model, monkeypatch, kind, scores):
    """Of all layers the host asks once, when all have evicted: the cache then needs a reset."""
    cache = cache_of(model, kind)

    def keep(self, states, budgets, **limits):
        found = self.scores(states, sinks=limits["sinks"])
        if scores == "not finite":
            return keep_best(found.masked_fill(found > 0, torch.inf), budgets, **limits)
        fewer = int(max(states.layers or (states.layer,)) > 0)
        return keep_best(found, budgets - fewer, **limits)

    error = InputError if scores == "not finite" else SolverError
    said = "score that is not finite" if scores == "not finite" else "the policy score kept"
    with monkeypatch.context() as patched:
        patched.setattr(Score, "keep", keep)
        with pytest.raises(error, match=said):
            for tokens in (CONTEXT, *[1] * 8):
                run(model, tiny.prompt(tokens), cache)
    with pytest.raises(UnsupportedRequestError, match=r"half-way.*cache\.reset\(\)"):
        run(model, tiny.prompt(1), cache)
    cache.reset()
    check_as_new(model, cache, kind)
