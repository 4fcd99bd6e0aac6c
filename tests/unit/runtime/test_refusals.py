"""What cannot work is refused before anything runs, in a line that says what to do."""

import copy
import dataclasses
import io
import pickle
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import run
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvalloc
from kvalloc.errors import (
    InputError,
    KVAllocError,
    ModelMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
)
from kvalloc.extensions.answering import answer
from kvalloc.extensions.lossless import verify_with
from kvalloc.extensions.making import make_cache
from kvalloc.formats.budget_profile import Policy
from kvalloc.runtime.making import Way, build_rows

CONTEXT = 60
WIDE = Policy(scorer="xkv", scorer_parameters={"window": 9}, sinks=2, window=4)


@pytest.mark.parametrize("mask", [None, torch.arange(CONTEXT)[None] > 3])
def test_chunks_that_are_not_announced_stay_within_the_budget_of_all_tokens_seen(model, mask):
    """They are turns; where the cache knows the prompt's length, chunks of it are one prompt."""
    profile, seen = tiny.make_profile(model, CONTEXT, 0.3), []
    ids, settings = tiny.prompt(CONTEXT), {"max_new_tokens": 2, "do_sample": False}
    chunks = {"prefill_chunk_size": 25}
    settings |= {"attention_mask": None if mask is None else mask.long()}

    def granted(columns):
        hidden = 0 if mask is None else int((~mask).sum())
        least = profile.policy.protected_tokens
        return np.maximum(profile.budgets_for(columns - hidden), least)

    cache = make_cache(model, profile, decode_every=25)
    with model.register_forward_pre_hook(lambda *_: seen.append(cache.kept_tokens)):
        model.generate(ids, past_key_values=cache, **chunks, **settings)
    # chunks of 25, 25 and 10 tokens, and one that was decoded
    expected = [0, granted(25), granted(50), granted(50) + 10]
    assert all((own == most).all() for own, most in zip(seen, expected, strict=True))
    cache.end_turn()
    assert (cache.kept_tokens == granted(CONTEXT + 1)).all()
    announced = make_cache(model, profile, prompt_tokens=CONTEXT)
    model.generate(ids, past_key_values=announced, **chunks, **settings)
    assert (announced.kept_tokens == granted(CONTEXT) + 1).all()
    with kvalloc.apply(model, profile) as applied:
        model.generate(ids, **chunks, **settings)
    assert (applied.last_cache.kept_tokens == granted(CONTEXT + 1)).all()


# What a user can meet, one by one


def profile_of(model, budgets=0.3, **options):
    return tiny.make_profile(model, CONTEXT, budgets, **options)


def read(model, rows=1, **changes):
    """A cache that has read a prompt."""
    scorer = changes.pop("scorer", "xkv")
    cache = make_cache(model, profile_of(model, scorer=scorer), **changes)
    run(model, tiny.prompt(CONTEXT, rows), cache)
    return cache


def forward(model, cache=None, **arguments):
    """A forward of which nothing is stored where it is refused."""
    cache = made(model) if cache is None else cache
    arguments = {"input_ids": tiny.prompt(CONTEXT)} | arguments
    before = cache.retained_bytes, cache.get_seq_length()
    try:
        with torch.no_grad():
            model(past_key_values=cache, **arguments)
    except KVAllocError:
        assert (cache.retained_bytes, cache.get_seq_length()) == before
        raise


def masked(model, mask):
    forward(model, read(model), input_ids=tiny.prompt(2), attention_mask=mask)


def one_hidden(model):
    mask = torch.ones(1, CONTEXT + 2)
    mask[0, 5] = 0
    masked(model, mask)


def made_for(model, budgets=0.3, **shape):
    """A cache by the profile of a model of another shape."""
    profile = profile_of(model, budgets)
    other = dataclasses.replace(profile.shape, **shape)
    table = np.repeat(profile.budgets[:, :1], other.n_kv_heads, axis=1)
    profile = profile.replace(shape=other, budgets=table)
    make_cache(model, profile, allow_other_model="model_id" not in shape)


def with_kinds_of_tokens(model):
    """Of arguments that a decoder takes for each token, those that are known are repeated."""
    profile = tiny.make_profile(model, CONTEXT, 0.3, scorer="reconstruction")
    forward(model, made(model, profile), token_type_ids=torch.zeros(1, CONTEXT))
    forward(model, made(model, profile), kinds=torch.zeros(1, CONTEXT))


def full_layers_for_sliding(model):
    model = tiny.tiny_model("gemma3")
    shape = tiny.shape_of(model, layer_types=("full",) * 4, sliding_window=None)
    make_cache(model, profile_of(model, shape=shape))


def unfit(model, budgets=0.3, **parameters):
    make_cache(model, profile_of(model, budgets, parameters=parameters))


def at_peak(model, **changes):
    """A profile that was decided for a memory."""
    return profile_of(model).replace(fits_a_peak=True, **changes)


def beyond_announced(model):
    cache = made(model, prompt_tokens=CONTEXT)
    forward(model, cache, input_ids=tiny.prompt(40))
    forward(model, cache, input_ids=tiny.prompt(21))


def generated(model, *, lossless=False, **options):
    """Refused before anything runs."""
    ids = [] if "inputs_embeds" in options else [tiny.prompt(CONTEXT)]
    ran = []
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        with kvalloc.apply(model, profile_of(model), lossless=lossless):
            model.generate(*ids, max_new_tokens=2, **options)
    finally:
        assert not ran


def unverified(model):
    """A cache that has read more than the full one beside it."""
    verify_with(cache := made(model), model)
    [*answer(model, cache, tiny.prompt(CONTEXT), max_new_tokens=1, keep=True)]
    forward(model, cache, input_ids=tiny.prompt(3))
    return cache


def configured(model, **settings):
    for name, value in settings.items():
        setattr(model.generation_config, name, value)
    kvalloc.apply(model, profile := profile_of(model))
    make_cache(model, profile)


def trained(model):
    """In evaluation the same cache is filled."""
    model.gradient_checkpointing_enable()
    cache = made(model)
    try:
        forward(model.train(), cache)
    finally:
        forward(model.eval(), cache)
        assert cache.reduced


def own_attention(model):
    """An implementation of the user's own, whose masks could be of any kind."""
    AttentionInterface.register("mine", sdpa_attention_forward)
    model.set_attn_implementation("mine")
    forward(model)


def made(model, profile=None, **options):
    profile = profile_of(model) if profile is None else profile
    return make_cache(model, profile, **options)


def crop_a_part(model):
    cache = made(model, prompt_tokens=CONTEXT)
    forward(model, cache, input_ids=tiny.prompt(20))
    cache.crop(-1)


def of_copies(model):
    """Its layers attend to copies since the model was looked at."""
    cache = made(model)
    update = cache.update
    cache.update = lambda *states, **more: tuple(own.clone() for own in update(*states, **more))
    model.generate(tiny.prompt(CONTEXT), past_key_values=cache, max_new_tokens=1)


def embedded(model, cache, tokens=CONTEXT):
    embeds = model.get_input_embeddings()(tiny.prompt(tokens)).detach()
    forward(model, cache, input_ids=None, inputs_embeds=embeds)


def in_two_forms(model):
    cache = made(model, profile_of(model, scorer="reconstruction"), prompt_tokens=CONTEXT)
    forward(model, cache, input_ids=tiny.prompt(20))
    embedded(model, cache, CONTEXT - 20)


def around_drafts(model, tokens=CONTEXT + 4):
    cache = made(model, prompt_tokens=CONTEXT)
    cache.activate_past_recording()
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    forward(model, cache, input_ids=tiny.prompt(tokens), attention_mask=mask)


def decided_for_2(model):
    """Budgets that were decided from the prompts of two rows."""
    cache = build_rows(model, [Way(profile=profile_of(model), once=True) for _ in range(2)])
    run(model, tiny.prompt(CONTEXT, 3), cache)


def loaded_for(model, change):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "c.kv"
        kvalloc.save_cache(read(model), path)
        kvalloc.load_cache(path, change(copy.deepcopy(model)))


def asked(model, ids, rows=1, **options):
    """Refused before anything runs."""
    cache, ran = read(model, rows), list[int]()
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        answer(model, cache, ids, **options)
    finally:
        assert not ran


CASES = {
    UnsupportedRequestError: [
        # What a profile asks for, and how a cache is made
        (
            lambda model: made(model, at_peak(model), policy="reconstruction"),
            "decided for memory at its peak, .* the policy score takes more.*decide by budget",
        ),
        # What the model is set to, and what a call asks for
        (partial(generated, use_mtp=True), "leave them out, or take prompt_lookup"),
        (
            lambda model: [*answer(model, unverified(model), tiny.prompt(3))],
            "has seen 63 tokens and the full one beside it 60",
        ),
        (partial(generated, lossless=True, num_beams=2), "^lossless drafts.*leave out num_beams"),
        *(
            (partial(generated, lossless=True, **options), said)
            for options, said in (
                ({"prompt_lookup_num_tokens": 3}, "drafts of another kind"),
                ({"prefill_chunk_size": 8}, "prefill_chunk_size"),
                ({"custom_generate": lambda *args, **kwargs: None}, "custom_generate"),
            )
        ),
        (
            partial(generated, lossless=True, inputs_embeds=torch.zeros(1, CONTEXT, 32)),
            "^lossless reads.*pass input_ids instead",
        ),
        (lambda model: read(model).offload(0), "cannot be offloaded"),
        (partial(generated, cache_implementation="offloaded"), "cannot be offloaded"),
        (partial(generated, cache_implementation="static"), "asks for a static cache"),
        (partial(configured, cache_implementation="static"), "asks for a static cache"),
        (partial(forward, use_cache=False), "use_cache=False"),
        (partial(generated, use_cache=False), "use_cache=False"),
        (partial(forward, output_attentions=True), "output_attentions=True"),
        (partial(generated, output_attentions=True), "output_attentions=True"),
        # One forward
        (
            partial(masked, mask=torch.ones(1, 1, 2, CONTEXT + 2).tril(CONTEXT - 2).bool()),
            "an attention mask that differs between new tokens",
        ),
        (partial(masked, mask=torch.ones(1, 2)), "expected 62"),
        (partial(masked, mask=torch.ones(1)), "of the kind Tensor"),
        (one_hidden, "when they arrived"),
        (around_drafts, "cannot be read in pieces"),
        (in_two_forms, "token ids and as inputs_embeds"),
        (with_kinds_of_tokens, "does not repeat kinds"),
        (partial(forward, encoder_hidden_states=torch.zeros(1, 1, 64)), "cross-attention"),
        (partial(forward, input_ids=None), "neither input_ids nor inputs_embeds"),
        (trained, "gradient checkpointing"),
        (own_attention, "flash and flex attention, not on mine"),
        (
            lambda model: forward(model, read(model, 2), input_ids=tiny.prompt(1, 3)),
            "a batch of 2, but this input has one of 3",
        ),
        (
            lambda model: forward(
                model, made(model, at_peak(model, bits=np.full((4, 2), 8)), prompt_tokens=61)
            ),
            "nothing is rounded before the last one; send it in one piece",
        ),
        (beyond_announced, "prompt of 60 tokens"),
        (decided_for_2, "for 2 rows, but this input has 3"),
        # What is asked of a cache
        (crop_a_part, "before the prompt is complete"),
        (lambda model: read(model).crop(-1), "0 have followed the latest eviction.*deepcopy"),
        (lambda model: read(tiny.tiny_model("gemma3")).crop(-1), "already dropped"),
        (lambda model: kvalloc.save_cache(made(model), "c.kv"), "nothing to save"),
        *(
            (lambda model, copied=copied: copied(read(model)), "it with kvalloc.save_cache")
            for copied in (pickle.dumps, copy.copy, lambda own: torch.save(own, io.BytesIO()))
        ),
    ],
    InputError: [
        (partial(unfit, budgets=[3] * 4), "sinks and window"),
        (partial(unfit, window=9), "last 9 tokens.*window of 4"),
        (lambda model: made(model, profile_of(model).replace(policy=WIDE)), "at the last 9 tokens"),
        (
            lambda model: read(tiny.tiny_model("gemma3")).kept_indices(0),
            "layer 0 is of the kind 'sliding'",
        ),
        (lambda model: made(model).kept_indices(0), "no prompt yet"),
        (partial(asked, ids=torch.ones(0, 5)), "this one has 0"),
        (partial(asked, ids=[]), "ask something"),
        (partial(asked, ids=[1], max_new_tokens=0), "an answer of 0 tokens"),
        (partial(asked, ids=[1], rows=2), "holds 2 rows"),
        (
            partial(asked, ids=[1, 2], max_new_tokens=2000),
            "60 tokens in the cache, a question of 2 .* 2000 are beyond the 1024 tokens",
        ),
        (
            lambda model: read(model, 2).batch_repeat_interleave(0),
            r"leave nothing of the 2 in.*cache\.reset",
        ),
        (
            lambda model: read(model, 2).reorder_cache(torch.tensor([0, 2])),
            r"is \[0, 2\], but the cache holds 2, from 0 on",
        ),
        (
            lambda model: forward(model, read(model), input_ids=tiny.prompt(0)),
            "no tokens: .* has seen 60 already",
        ),
        (
            lambda model: forward(model, read(model), input_ids=tiny.prompt(1000)),
            "60 tokens in the cache and 1000 that follow are beyond the 1024 tokens",
        ),
    ],
    ModelMismatchError: [
        (
            lambda model: read(model).update(*torch.zeros(2, 1, 2, 1, 16), 0),
            "only inside a forward of the LlamaModel object",
        ),
        (
            lambda model: answer(tiny.tiny_model(), read(model), [1]),
            "another LlamaForCausalLM object than the one that is asked",
        ),
        (
            partial(loaded_for, change=lambda model: model.half()),
            "holds float32 entries, but the model computes in float16; load the model in float32",
        ),
        (partial(made_for, model_id="org/giant"), "org/giant.*tiny"),
        (partial(made_for, head_dim=64), "head_dim 64"),
        (partial(made_for, n_kv_heads=4), "heads"),
        (full_layers_for_sliding, "layer_types"),
    ],
    UnsupportedModelError: [(of_copies, "attends to other keys or values than its cache returned")],
}


@pytest.mark.parametrize(
    ("error", "do", "match"), [(error, *case) for error, cases in CASES.items() for case in cases]
)
def test_what_cannot_work_is_refused_in_one_line(model, error, do, match):
    with pytest.raises(error, match=match) as caught:
        do(model)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
