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
from transformers import (
    AttentionInterface,
    BloomConfig,
    BloomForCausalLM,
    DynamicCache,
    GenerationConfig,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward

import kvalloc
from kvalloc.errors import (
    InputError,
    KVAllocError,
    ModelMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
)
from kvalloc.formats.budget_profile import Policy
from kvalloc.models.loading import shape_of
from kvalloc.models.names import cache_keyword
from kvalloc.runtime import CacheOptions, answer, loading, make_cache, refusals
from kvalloc.runtime.cache import BudgetCache
from kvalloc.runtime.lossless import verify_with
from kvalloc.runtime.making import build_cache
from kvalloc.runtime.policies import get_policy
from kvalloc.scorers import get_scorer

CONTEXT = 60
WIDE = Policy(scorer="xkv", scorer_parameters={"window": 9}, sinks=2, window=4)


@pytest.fixture
def bloom():
    """A model outside the attention interface."""
    return BloomForCausalLM(BloomConfig(hidden_size=32, n_layer=2, n_head=2, vocab_size=61))


@pytest.mark.parametrize("how", ["cache", "stored", "target"])
def test_models_that_cannot_be_hooked_are_refused_however_budgets_come(bloom, how):
    ran = []
    bloom.register_forward_pre_hook(lambda *_: ran.append(1))
    profile = tiny.make_profile(bloom, CONTEXT, [20, 20], shape=shape_of(bloom))
    options = {"target_retention": 0.9} if how == "target" else {}
    with pytest.raises(UnsupportedModelError, match="BloomForCausalLM|BloomModel") as caught:
        if how == "cache":
            make_cache(bloom, profile)
        kvalloc.apply(bloom, None if how == "target" else profile, **options)
    assert "\n" not in str(caught.value)
    assert not ran
    assert "generate" not in vars(bloom)


@pytest.mark.parametrize("how", ["keyword", "config", "the model's config"])
@pytest.mark.parametrize("mask", [None, torch.arange(CONTEXT)[None] > 3])
def test_chunks_that_are_not_announced_stay_within_the_budget_of_all_tokens_seen(model, mask, how):
    """They are turns; where the cache knows the prompt's length, chunks of it are one prompt."""
    profile, seen = tiny.make_profile(model, CONTEXT, 0.3), []
    ids, settings = tiny.prompt(CONTEXT), {"max_new_tokens": 2, "do_sample": False}
    chunks = {"prefill_chunk_size": 25}
    settings |= {"attention_mask": None if mask is None else mask.long()}
    if how == "config":
        chunks = {"generation_config": GenerationConfig(**chunks)}
    elif how == "the model's config":
        model.generation_config.prefill_chunk_size = chunks.pop("prefill_chunk_size")

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


# The table, row by row


def profile_of(model, budgets=0.3, **options):
    return tiny.make_profile(model, CONTEXT, budgets, **options)


def read(model, rows=1, **changes):
    """A cache that has read a prompt."""
    scorer = changes.pop("scorer", "xkv")
    cache = make_cache(model, profile_of(model, scorer=scorer), **changes)
    with torch.no_grad():
        model(tiny.prompt(CONTEXT, rows), past_key_values=cache)
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


def full_layers_for_sliding(model):
    model = tiny.tiny_model("gemma3")
    shape = tiny.shape_of(model, layer_types=("full",) * 4, sliding_window=None)
    make_cache(model, profile_of(model, shape=shape))


def unfit(model, budgets=0.3, **parameters):
    make_cache(model, profile_of(model, budgets, parameters=parameters))


def with_compiled_layer(model):
    model.model.layers[1].compile(backend="eager")
    make_cache(model, profile_of(model))


def at_peak(model, **changes):
    """A profile that was decided for a memory."""
    return profile_of(model).replace(fits_a_peak=True, **changes)


def wrapped(model):
    """A module that copies the cache that it is given."""

    class Wrapped(torch.nn.Module):
        def forward(self, ids, cache):
            return model(ids, **cache_keyword(model, DynamicCache()))

    return Wrapped()


def own_under_memory(model):
    with kvalloc.apply(model, memory="1MB"), torch.no_grad():
        model(tiny.prompt(CONTEXT), **cache_keyword(model, DynamicCache()))


def cropped_into_prompt(model):
    cache = made(model, profile_of(model, [CONTEXT, 20, 20, 20]))
    for tokens in (CONTEXT, 2):
        forward(model, cache, input_ids=tiny.prompt(tokens))
    stored = cache.kept_tokens
    try:
        cache.crop(-3)
    finally:
        assert (cache.kept_tokens == stored).all()


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


def of_the_oldest(model):
    cache = made(tiny.tiny_model("gemma3"))
    for layer in cache.layers:
        vars(layer).pop("record_past", None)
    cache.activate_past_recording(CONTEXT)


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


def four_bits(model):
    profile = profile_of(model)
    profile = profile.replace(bits=np.full_like(profile.budgets, 4))
    return made(model, profile, policy="mpcache")


def crop_a_part(model):
    cache = made(model, prompt_tokens=CONTEXT)
    forward(model, cache, input_ids=tiny.prompt(20))
    cache.crop(-1)


def uneven(model):
    profile = tiny.by_head(profile_of(model))
    forward(model, make_cache(model, profile, policy="mpcache"))


def of_copies(model):
    """Its layers attend to copies since the model was looked at."""
    cache = made(model)
    update = cache.update
    cache.update = lambda *states, **more: tuple(own.clone() for own in update(*states, **more))
    model.generate(tiny.prompt(CONTEXT), past_key_values=cache, max_new_tokens=1)


def too_few(model):
    kept, budgets = torch.ones(1, 2, 9, dtype=torch.bool), torch.tensor([[9, 8]])
    refusals.check_kept(get_policy("score", scorer=get_scorer("xkv")), kept, budgets)


def chunk_of_undecided(model):
    cache = build_cache(
        model,
        profile_of(model),
        CacheOptions(),
        prompt_tokens=CONTEXT,
        decide=lambda decoder, rows: [],
    )
    forward(model, cache, input_ids=tiny.prompt(20))


def embedded(model, cache, tokens=CONTEXT):
    embeds = model.get_input_embeddings()(tiny.prompt(tokens)).detach()
    forward(model, cache, input_ids=None, inputs_embeds=embeds)


def in_two_forms(model):
    cache = made(model, profile_of(model, scorer="reconstruction"), prompt_tokens=CONTEXT)
    forward(model, cache, input_ids=tiny.prompt(20))
    embedded(model, cache, CONTEXT - 20)


def undecided_embeddings(model):
    decide = {"decide": lambda decoder, rows: []}
    embedded(model, build_cache(model, profile_of(model), CacheOptions(), **decide))


def around_drafts(model, tokens=CONTEXT + 4):
    cache = made(model, prompt_tokens=CONTEXT)
    cache.activate_past_recording()
    mask = torch.ones(1, 1, tokens, tokens, dtype=torch.bool)
    forward(model, cache, input_ids=tiny.prompt(tokens), attention_mask=mask)


def without_its_model(model):
    cache = read(model)
    cache.decoder = lambda: None
    cache.save("c.kv")


def loaded_for(model, change):
    with TemporaryDirectory() as folder:
        path = Path(folder) / "c.kv"
        read(model).save(path)
        kvalloc.load_cache(path, change(copy.deepcopy(model)))


def retrained(model):
    with torch.no_grad():
        next(model.parameters()).add_(1)
    return model


def given_to_other(model):
    """Which has the hooks because of a cache of its own."""
    other = tiny.tiny_model("llama")
    own = made(other)
    forward(other, read(model))
    del own


def other_tokens(model):
    """What `generate` is given begins with other tokens than it read before."""
    ids = tiny.prompt(CONTEXT)
    with kvalloc.apply(model, profile_of(model)) as applied:
        model.generate(ids, max_new_tokens=1, do_sample=False)
        ids[0, 3] += 1
        more = torch.cat([ids, ids], dim=1)
        model.generate(more, past_key_values=applied.last_cache, max_new_tokens=1)


def asked(model, ids, rows=1, **options):
    """Refused before anything runs."""
    cache, ran = read(model, rows), list[int]()
    model.register_forward_pre_hook(lambda *_: ran.append(1))
    try:
        answer(model, cache, ids, **options)
    finally:
        assert not ran


CASES = {
    "bits_are_compared": (four_bits, "at 4 bits, but the policy mpcache compares"),
    "beyond_memory": (
        lambda model: make_cache(model, at_peak(model), policy="reconstruction"),
        "decided for memory at its peak, and here the policy score takes more",
    ),
    "rounded_beyond_memory": (
        lambda model: forward(
            model,
            make_cache(model, at_peak(model, bits=np.full((4, 2), 8)), prompt_tokens=CONTEXT + 1),
        ),
        "nothing is rounded before the last one; send it in one piece",
    ),
    "assisted": (partial(generated, use_mtp=True), "leave them out, or take prompt_lookup"),
    "drafts_unannounced": (
        lambda model: made(model).activate_past_recording(),
        "say how long the prompt is.*prompt_tokens",
    ),
    "drafts_slide_out": (of_the_oldest, "takes back no drafts from sliding-window layers"),
    "drafts_read_all": (
        lambda model: read(model, policy="mpcache").activate_past_recording(),
        "the policy mpcache leaves entries unread",
    ),
    "lossless_apart": (
        lambda model: [*answer(model, unverified(model), tiny.prompt(3))],
        "has seen 63 tokens and the full one beside it 60",
    ),
    "lossless_with": (partial(generated, lossless=True, num_beams=2), "leave out num_beams"),
    "lossless_of_embeddings": (
        partial(generated, lossless=True, inputs_embeds=torch.zeros(1, CONTEXT, 32)),
        "pass input_ids instead",
    ),
    "offloaded": (lambda model: read(model).offload(0), "cannot be offloaded"),
    "other_cache": (partial(configured, cache_implementation="static"), "asks for a static cache"),
    "compiled_layers": (with_compiled_layer, "compile the whole model"),
    "given_up": (
        lambda model: wrapped(model)(tiny.prompt(CONTEXT), cache=made(model)),
        "given to Wrapped, but its layers got DynamicCache",
    ),
    "plain_beyond_memory": (
        own_under_memory,
        "exceeded by a plain cache: the DynamicCache",
    ),
    "unused": (partial(forward, use_cache=False), "use_cache=False"),
    "weights": (partial(forward, output_attentions=True), "output_attentions=True"),
    "repeats_both": (in_two_forms, "token ids and as inputs_embeds"),
    "decides_from_embeddings": (undecided_embeddings, "budget='20%' alone, or use a stored"),
    "ready_made": (
        partial(masked, mask=torch.ones(1, 1, 2, CONTEXT + 2, dtype=torch.bool)),
        "not causal, given or made by the model around its images",
    ),
    "mask_in_pieces": (around_drafts, "cannot be read in pieces"),
    "no_tokens": (partial(forward, input_ids=None), "neither input_ids nor inputs_embeds"),
    "checkpointed": (trained, "gradient checkpointing"),
    "attention": (own_attention, "flash and flex attention, not on mine"),
    "other_batch": (
        lambda model: forward(model, read(model, 2), input_ids=tiny.prompt(1, 3)),
        "a batch of 2, but this input has one of 3",
    ),
    "merges_chunks": (
        lambda model: forward(
            model,
            made(model, policy="merge", prompt_tokens=CONTEXT),
            input_ids=tiny.prompt(20),
        ),
        "policy merge merges entries.*in one piece",
    ),
    "reads_unevenly": (uneven, "policy mpcache leaves entries unread"),
    "crop_amid_prompt": (crop_a_part, "before the prompt is complete"),
    "prompt_begun": (
        lambda model: read(model).decide({"input_ids": tiny.prompt(CONTEXT)}),
        r"decide\(\) is for a new prompt, but this cache has seen one already",
    ),
    "decides_from_chunk": (chunk_of_undecided, "only a chunk of it has come"),
    "crop_slid_out": (lambda model: read(tiny.tiny_model("gemma3")).crop(-1), "already dropped"),
    "saved_incomplete": (lambda model: made(model).save("c.kv"), "nothing to save"),
    "saved_in_groups": (
        lambda model: BudgetCache.joined([((i,), made(model)) for i in (0, 1)]).save("c.kv"),
        "kept in 2 different ways",
    ),
    "saved_without_model": (without_its_model, "while its model is loaded"),
    "decided_in_file": (lambda model: loading._decided_before(model, []), "not in the file"),
    "pickled": (lambda model: pickle.dumps(read(model)), r"cache\.save"),
    "no_decode_every": (partial(made, decode_every=0), "decode_every is 0, expected"),
    "no_prompt_tokens": (partial(made, prompt_tokens=0), "prompt_tokens is 0"),
    "no_policy": (partial(made, policy=3), "policy is 3"),
    "kept_by_sliding": (
        lambda model: read(tiny.tiny_model("gemma3")).kept_indices(0),
        "layer 0 is a sliding-window layer",
    ),
    "kept_of_nothing": (lambda model: made(model).kept_indices(0), "no prompt yet"),
    "asked_in_rows": (partial(asked, ids=torch.ones(0, 5)), "this one has 0"),
    "no_rows": (
        lambda model: read(model, 2).batch_repeat_interleave(0),
        r"leave nothing of the 2 in.*cache\.reset",
    ),
    "rows_outside": (
        lambda model: read(model, 2).reorder_cache(torch.tensor([0, 2])),
        r"is \[0, 2\], but the cache holds 2, from 0 on",
    ),
    "asked_nothing": (partial(asked, ids=[]), "ask something"),
    "answers_nothing": (partial(asked, ids=[1], max_new_tokens=0), "an answer of 0 tokens"),
    "asked_of_rows": (partial(asked, ids=[1], rows=2), "holds 2 rows"),
    "asked_beyond": (
        partial(asked, ids=[1, 2], max_new_tokens=2000),
        f"{CONTEXT} tokens in the cache, a question of 2 .* 2000 are beyond the 1024 tokens",
    ),
    "other_tokens": (other_tokens, f"token 3 of these .* its {CONTEXT} tokens are another text"),
    "turn_of_nothing": (
        lambda model: forward(model, read(model), input_ids=tiny.prompt(0)),
        f"no tokens: .* has seen {CONTEXT} already",
    ),
    "turn_beyond": (
        lambda model: forward(model, read(model), input_ids=tiny.prompt(1000)),
        f"{CONTEXT} tokens in the cache and 1000 that follow are beyond the 1024 tokens",
    ),
    "given_to_other": (given_to_other, "another LlamaForCausalLM object than the LlamaModel"),
    "outside_forward": (
        lambda model: read(model).update(*torch.zeros(2, 1, 2, 1, 16), 0),
        "only inside a forward of the LlamaForCausalLM object",
    ),
    "asked_by_other": (
        lambda model: answer(tiny.tiny_model(), read(model), [1]),
        "another LlamaForCausalLM object than the one that is asked",
    ),
    "other_dtype": (
        partial(loaded_for, change=lambda model: model.half()),
        "holds float32 entries, but the model computes in float16; load the model in float32",
    ),
    "other_weights": (
        partial(loaded_for, change=retrained),
        "LlamaModel with other weights, adapters or config than this Ll.*allow_other_model=True",
    ),
    "attends_to_others": (of_copies, "attends to other keys or values than its cache returned"),
    "budget_missed": (too_few, "score kept 9 entries in KV head 1 of row 0, whose budget is 8"),
}


MORE = [
    ("other_cache", partial(generated, cache_implementation="static"), "static"),
    ("offloaded", partial(generated, cache_implementation="offloaded"), "offloaded"),
    ("unused", partial(generated, use_cache=False), "use_cache=False"),
    ("weights", partial(generated, output_attentions=True), "output_attentions"),
    ("pickled", lambda model: copy.copy(read(model)), r"cache\.save"),
    ("pickled", lambda model: torch.save(read(model), io.BytesIO()), r"cache\.save"),
    (ModelMismatchError, partial(made_for, model_id="org/giant"), "org/giant.*tiny"),
    (ModelMismatchError, partial(made_for, head_dim=64), "head_dim 64"),
    (ModelMismatchError, partial(made_for, n_kv_heads=4), "heads"),
    (ModelMismatchError, partial(made_for, n_kv_heads=4, n_query_heads=8), "heads"),
    (ModelMismatchError, partial(made_for, n_kv_heads=1), "heads"),
    (ModelMismatchError, full_layers_for_sliding, "layer_types"),
    (InputError, partial(unfit, budgets=[3] * 4), "sinks and window"),
    (InputError, partial(unfit, window=9), "last 9 tokens.*window of 4"),
    (InputError, partial(made, policy="snapvk"), "no policy or scorer 'snapvk'.* 'snapkv'"),
    (UnsupportedRequestError, one_hidden, "when they arrived"),
    (UnsupportedRequestError, partial(masked, mask=torch.ones(1, 2)), "expected 62"),
    (UnsupportedRequestError, partial(masked, mask=torch.ones(1)), "of the kind Tensor"),
    *(
        ("no_decode_every", partial(made, decode_every=wrong), "decode_every")
        for wrong in (-1, True, 2.5)
    ),
    (
        InputError,
        lambda model: make_cache(model, profile_of(model).replace(policy=WIDE)),
        "looks at the last 9 tokens",
    ),
    (UnsupportedRequestError, cropped_into_prompt, "2 have followed the latest eviction.*deepcopy"),
    (UnsupportedRequestError, beyond_announced, "prompt of 60 tokens"),
]
"""More ways to what the table says, and what is said elsewhere: files, masks, positions."""


@pytest.mark.parametrize(
    ("row", "do", "match"), [*((name, *case) for name, case in CASES.items()), *MORE]
)
def test_what_cannot_work_is_refused_in_one_line(model, row, do, match):
    table = refusals.REFUSALS
    error = next(kind for kind in table if row in (kind, *table[kind]))
    with pytest.raises(error, match=match) as caught:
        do(model)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)
    first = "" if row is error else table[error][row].split("{")[0]
    assert str(caught.value).startswith(first)


def test_every_row_of_the_table_has_a_case():
    assert set(CASES) == {name for rows in refusals.REFUSALS.values() for name in rows}
