"""A cache that stores entries at fewer bits, however the tokens arrive.

The oracle is that of the other files, over the numbers that the cache really stores: what the
model computed is replaced by what comes back from storage, the evicted entries are hidden.
"""

import random

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from other_attention import attention_on_cpu
from prompt_runs import padding_mask, run
from runtime_cells import widths

from kvalloc.accounting.costs import WIDTHS, head_bytes
from kvalloc.extensions.making import make_cache

CONTEXT = 150


def pytest_generate_tests(metafunc):
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(metafunc.config.getoption("--rounded-models")))


def account(cache):
    """Bytes of all that is stored, from the numbers of entries and the formula alone."""
    profile, total = cache.profile, 0
    for index, layer in enumerate(cache.layers):
        if not hasattr(layer, "kept"):  # transformers' own
            total += sum(own.untyped_storage().nbytes() for own in (layer.keys, layer.values))
            continue
        total += layer.keys.nbytes + layer.values.nbytes
        if layer.kept is not None:
            lengths, bits = layer.kept.lengths, profile.bits[index]
            total += int(head_bytes(lengths, bits, profile.shape).sum())
    return total


def padding(draw, batch, tokens):
    """A mask, (batch, tokens): no padding, or rows of different lengths padded on one side."""
    lengths = [tokens, *(draw.randint(max(tokens // 3, 1), tokens) for _ in range(batch - 1))]
    side = draw.choice(["left", "right", "none"])
    return padding_mask([tokens] * batch if side == "none" else lengths, side)


def test_random_models_answer_as_a_float64_oracle(seed):
    """Of random size, with random widths, policies and turns; `make test-matrix` takes 1,000.

    The prompt comes at once, or in chunks that are announced; rows of it and of questions have
    different lengths. What is stored takes the bytes of the account.
    """
    draw = random.Random(seed)
    attention = draw.choice(["sdpa", "eager", "flex_attention", "padding_only"])
    with attention_on_cpu(attention):
        check_random_model(draw, attention)


def check_random_model(draw, attention):
    n_kv_heads, head_dim = draw.choice([1, 2, 4]), draw.choice([8, 16, 32])
    n_query_heads = n_kv_heads * draw.choice([1, 2, 3])
    family = draw.choice(["llama", "qwen2", "qwen3", "mistral", "gemma3"])
    model = tiny.tiny_model(
        family,
        attention,
        seed=draw.randrange(10**6),
        num_hidden_layers=4 if family == "gemma3" else draw.randint(1, 4),
        num_attention_heads=n_query_heads,
        num_key_value_heads=n_kv_heads,
        head_dim=head_dim,
        hidden_size=n_query_heads * 8,
        initializer_range=draw.choice([0.1, 0.2, 0.3]),
    )
    context, batch = draw.randint(1, 160), draw.randint(1, 3)
    reference = draw.choice([context, draw.randint(20, 160)])  # of a prompt of another length
    share = draw.choice([1.0, *[draw.uniform(0.2, 1.0)] * 4])
    profile = tiny.make_profile(model, reference, share)
    widths = np.full_like(profile.budgets, 16)
    for layer in profile.shape.full_layers:
        widths[layer] = draw.choices(list(WIDTHS), k=n_kv_heads)
    if draw.random() < 0.5:
        profile = tiny.by_head(profile, spread=draw.randint(0, 12))
    else:
        widths[:] = widths[:, :1]
    widths[profile.shape.full_layers[0], 0 if profile.level == "head" else slice(None)] = 5
    if exact := draw.random() < 0.2:
        widths[:] = 16
    policy = draw.choice(["score", "score", "attention_matching", "critical", "nacl"])
    every, arrival = draw.choice([None, None, 4, 7]), draw.choice(["at once", "announced"])
    cache = make_cache(
        model,
        profile.replace(bits=widths),
        policy=policy,
        decode_every=every,
        prompt_tokens=context if arrival == "announced" else None,
    )
    shadow, seen = tiny.Shadow(model, torch.float64), torch.zeros(batch, 0, dtype=torch.long)
    combined = policy == "attention_matching"

    def feed(mask, chunk):
        nonlocal seen
        ids = tiny.prompt(mask.shape[1], batch, seed=seen.shape[1])
        for part, shown in zip(ids.split(chunk, dim=1), mask.split(chunk, dim=1), strict=True):
            seen = torch.cat([seen, shown], dim=1)
            logits, expected = run(model, part, cache, seen), shadow.logits(part, seen)
            assert not shown.any() or tiny.worst(logits, expected, seen) < (1e-4 if exact else 1e-3)
            shadow.follow(cache, combined=combined)

    def mask_of(tokens, whole):
        # a float64 twin answers windows that are all padding by not-a-number
        whole |= family == "gemma3"
        one = torch.ones(batch, tokens, dtype=torch.long)
        return one if whole else padding(draw, batch, tokens)

    chunk = context if arrival == "at once" else draw.randint(9, 60)
    feed(mask_of(context, False), chunk)
    shadow.follow(cache, combined=combined)
    for tokens in [draw.choice([1, 1, draw.randint(2, 200)]) for _ in range(draw.randint(2, 10))]:
        feed(mask_of(tokens, whole=tokens == 1), tokens)
        assert combined or tokens == 1 or cache.retained_bytes == account(cache)


@pytest.mark.parametrize("policy", ["merge", "attention_matching", "critical", "nacl"])
def test_policies_decide_and_merge_before_anything_is_rounded(model, policy):
    plain = tiny.by_head(tiny.make_profile(model, CONTEXT, 0.5), spread=40)
    profile = plain.replace(bits=widths(plain, "mixed_bits", by_head=True))
    ids, question = tiny.prompt(CONTEXT, 2), tiny.prompt(4, 2, seed=1)
    caches = [make_cache(model, each, policy=policy) for each in (profile, plain)]
    for cache in caches:
        run(model, ids, cache)
    assert tiny.same_kept(*caches)
    few, many = (run(model, question, cache) for cache in caches)
    assert torch.isfinite(few).all()
    assert not torch.equal(few, many)
