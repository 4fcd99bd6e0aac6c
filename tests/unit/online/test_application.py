"""``kvalloc.apply``: how long it lasts, what it takes, and what it refuses on entering."""

import copy
import io
import pickle
import warnings

import pytest
import torch
from prompt_runs import CONTEXT, SINKS, TARGET, applied, generate
from transformers import (
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
)

import kvalloc
from kvalloc.errors import InputError, KVAllocError, UnsupportedRequestError, naming_flags
from kvalloc.models.names import cache_keyword
from kvalloc.online import conflicts
from kvalloc.online.conflicts import CONFLICTS, check_conflicts

# ``kvalloc.apply``: how long it lasts, what it takes, and what it refuses on entering


@pytest.fixture
def model(tiny):
    return tiny.tiny_model()


def test_calls_nest_last_until_they_are_removed_and_survive_exceptions(tiny, model):
    ids, profile = tiny.prompt(CONTEXT), tiny.make_profile(model, CONTEXT, 0.3)
    earlier = kvalloc.apply(model, target_retention=0.6, **TARGET)
    with pytest.raises(KeyError), kvalloc.apply(model, profile) as later:
        generate(model, ids)
        assert (earlier.last_cache, later.last_cache.profile) == (None, profile)
        raise KeyError
    generate(model, ids)
    assert earlier.last_cache.profile is not profile
    later = kvalloc.apply(model, profile)
    earlier.remove()  # below the later one, which goes on
    generate(model, ids)
    assert later.last_cache.profile is profile
    later.remove()
    later.remove()
    assert "generate" not in vars(model)
    assert type(model(ids, use_cache=True).past_key_values) is DynamicCache
    with pytest.raises(UnsupportedRequestError, match="apply\\(\\) again"), earlier:
        pass


@pytest.mark.parametrize("options", [{"budget": "50%"}, {"target_retention": 0.6, **TARGET}])
def test_whole_texts_that_nothing_follows_are_said_to_lose_nothing(tiny, model, options):
    """Once, at the caller's line; never of answers, nor of forwards that go on."""
    texts = [tiny.prompt(CONTEXT + more) for more in range(3)]
    with torch.no_grad():
        plain = [model(one).logits for one in texts]
    with warnings.catch_warnings(), torch.no_grad(), kvalloc.apply(model, **options) as applied:
        warnings.simplefilter("error")
        for one in texts:
            generate(model, one, max_new_tokens=1)
            generate(model, one)
            cache = model(one).past_key_values
            model(one[:, :2], **cache_keyword(model, cache))
        generate(model, texts[0])
        assert applied.last_cache.retained_bytes < cache.full_bytes
        with pytest.warns(UserWarning, match="nothing followed it.*the full cache's") as said:
            found = [model(one).logits for one in texts]
    assert all(map(torch.equal, plain, found))  # as the warning has it
    assert [one.filename for one in said] == [__file__]


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("options", [{"budget": "50%"}, {"target_retention": 0.6, **TARGET}, None])
def test_a_forward_that_makes_a_cache_makes_a_reduced_one(tiny, model, options, padded):
    """What ``generate()`` would have read it into; both go on alike, and so does the decoder."""
    ids = tiny.prompt(CONTEXT, batch=2)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    inputs["attention_mask"][1, : 9 * padded] = 0
    given = {"profile": tiny.make_profile(model, CONTEXT, 0.4)} if options is None else options
    with torch.no_grad(), kvalloc.apply(model, **given) as applied:
        expected = generate(model, ids, attention_mask=inputs["attention_mask"])
        by_generate = applied.last_cache
        inputs["position_ids"] = (inputs["attention_mask"].cumsum(1) - 1).clamp(min=0)
        found = model(**inputs)
        cache = applied.last_cache
        assert cache is found.past_key_values is not by_generate
        again = model.model(*inputs.values()).past_key_values
        assert again is applied.last_cache is not cache
        assert cache.profile == again.profile == by_generate.profile
        assert torch.equal(found.logits, model(**inputs, use_cache=False).logits)
        first = found.logits[:, -1:].argmax(-1)
        assert torch.equal(first, expected[:, CONTEXT : CONTEXT + 1])
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, 1), value=1)
        answers = [
            generate(model, torch.cat([ids, first], 1), attention_mask=mask, past_key_values=one)
            for one in (cache, again)
        ]
    assert all(torch.equal(each[:, : expected.shape[1]], expected) for each in answers)
    assert (cache.kept_tokens_by_row == again.kept_tokens_by_row).all()
    assert cache.retained_bytes < 0.8 * cache.full_bytes


def test_a_forward_that_brings_or_makes_no_cache_stays_plain(tiny, model):
    ids, profile = tiny.prompt(CONTEXT), tiny.make_profile(model, CONTEXT, 0.4)
    with torch.no_grad(), kvalloc.apply(model, profile) as earlier:
        assert model(ids, use_cache=False).past_key_values is None
        own = DynamicCache(config=model.config)
        assert model(ids, past_key_values=own).past_key_values is own
        model.config.use_cache = False
        assert model(ids).past_key_values is None
        model.config.use_cache = True
        with pytest.raises(ValueError, match="input_ids or inputs_embeds"):
            model()
        assert earlier.last_cache is None
        with kvalloc.apply(model, profile) as later:
            assert model(ids).past_key_values is later.last_cache is not None
        assert model(ids).past_key_values is earlier.last_cache is not None
    assert type(model(ids).past_key_values) is DynamicCache


def test_a_forward_that_cannot_be_reduced_says_why_each_time(tiny):
    model, ids = tiny.tiny_model(attention="eager"), tiny.prompt(CONTEXT)
    with torch.no_grad():
        expected = model(ids, output_attentions=True)
        with kvalloc.apply(model, tiny.make_profile(model, CONTEXT, 0.4)) as applied:
            with pytest.warns(UserWarning, match="a plain cache.*output_attentions") as said:
                found = [model(ids, output_attentions=True) for _ in range(2)]
            assert [one.filename for one in said] == [__file__] * 2
            assert applied.last_cache is None
            assert model(ids).past_key_values is applied.last_cache
    for one in found:
        assert type(one.past_key_values) is DynamicCache
        assert torch.equal(one.logits, expected.logits)
        assert all(map(torch.equal, one.attentions, expected.attentions))


OWN = {
    "generate": lambda model, ids, own: generate(model, ids, past_key_values=own),
    "forward": lambda model, ids, own: model(ids[:, own.get_seq_length() :], past_key_values=own),
}


@pytest.mark.parametrize("how", OWN)
def test_a_cache_of_another_kind_is_said_each_time_or_refused(tiny, model, how, recwarn):
    ids, read = tiny.prompt(CONTEXT), DynamicCache(config=model.config)
    warnings.simplefilter("default")  # shows what a line warned of once, unless it is always shown
    with torch.no_grad():
        model(ids[:, :-1], past_key_values=read)
        with kvalloc.apply(model, budget="40%") as applied:
            recwarn.clear()
            static = StaticCache(config=model.config, max_cache_len=2 * CONTEXT)
            for own in (DynamicCache(), copy.deepcopy(read), copy.deepcopy(read), static):
                OWN[how](model, ids, own)
            said = [str(one.message) for one in recwarn]
            said = [one for one in said if "keeps all entries" in one]
            assert ["Static" in one for one in said] == [False] * 3 + [True]
            assert applied.last_cache is None
        with (
            kvalloc.apply(model, budget="40%", memory="1MB"),
            pytest.raises(UnsupportedRequestError, match="memory would be exceeded by a plain"),
        ):
            OWN[how](model, ids, DynamicCache(config=model.config))


def test_nothing_plain_is_made_where_a_memory_is_given(tiny, model):
    ids = tiny.prompt(CONTEXT)
    embeds = model.get_input_embeddings()(ids)
    with torch.no_grad(), kvalloc.apply(model, memory="60KiB") as applied:
        for _ in range(2):
            with pytest.raises(UnsupportedRequestError, match="output_attentions"):
                model(ids, output_attentions=True)
        assert applied.last_cache is None
        assert model(inputs_embeds=embeds).past_key_values is applied.last_cache is not None
        with pytest.raises(InputError, match="memory"):
            model(tiny.prompt(4 * CONTEXT))


def test_generate_batch_says_that_it_is_plain_or_is_refused(tiny):
    model, prompt = tiny.tiny_model(), tiny.prompt(CONTEXT)[0].tolist()
    options = {
        "generation_config": GenerationConfig(
            max_new_tokens=2, do_sample=False, eos_token_id=1, pad_token_id=0
        ),
        "continuous_batching_config": ContinuousBatchingConfig(num_blocks=8, max_batch_tokens=64),
    }
    (expected,) = model.generate_batch([prompt], **options).values()
    with kvalloc.apply(model, budget="40%") as applied:
        with pytest.warns(UserWarning, match=r"a plain cache.*generate_batch\(\) keeps all"):
            (found,) = model.generate_batch([prompt], **options).values()
        assert applied.last_cache is None
        with (
            kvalloc.apply(model, budget="40%", memory="1MB"),
            pytest.raises(UnsupportedRequestError, match=r"exceeded by a plain.*generate_batch"),
        ):
            model.generate_batch([prompt], **options)
    assert found.generated_tokens == expected.generated_tokens
    assert "init_continuous_batching" not in vars(model)


def test_a_forward_in_a_compiled_model_is_reduced(tiny, model):
    ids, compiled = tiny.prompt(CONTEXT), torch.compile(model, backend="eager")
    torch.compiler.reset()  # another test compiles the same code
    profile = tiny.make_profile(model, CONTEXT, 0.4)
    with torch.no_grad():
        full = [compiled(ids).logits for _ in range(2)]
        with kvalloc.apply(model, profile) as applied:
            for _ in range(2):
                found = compiled(ids).past_key_values
                assert found is applied.last_cache
                assert found.retained_bytes == profile.retained_bytes_at(CONTEXT)
        assert type(compiled(ids).past_key_values) is DynamicCache
    assert torch.equal(*full)
    torch.compiler.reset()


def test_a_model_in_training_and_one_that_prefills_in_chunks_run_forwards(tiny, model):
    ids, profile = tiny.prompt(CONTEXT), tiny.make_profile(model, CONTEXT, 0.4)
    model.generation_config.prefill_chunk_size = 20
    model.train()
    model(ids, labels=ids).loss.backward()
    expected = model.lm_head.weight.grad.clone()
    model.zero_grad()
    with kvalloc.apply(model, profile) as applied:
        model(ids, labels=ids).loss.backward()
    assert torch.equal(model.lm_head.weight.grad, expected)
    assert applied.last_cache.retained_bytes == profile.retained_bytes_at(CONTEXT)


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def saved(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled, saved, copy.copy])
def test_a_copy_is_a_plain_model_of_its_own(tiny, model, copied):
    """With its own weights, inside and after; of a shallow one only what it shares is not."""
    ids, profile = tiny.prompt(CONTEXT), tiny.make_profile(model, CONTEXT, 0.3)
    expected = generate(model, ids)
    with kvalloc.apply(model, profile) as earlier, kvalloc.apply(model, profile) as applied:
        earlier.remove()  # below the later one, which goes on
        generate(model, ids)
        last, twin = applied.last_cache, copied(model)
        assert "generate" not in vars(twin)
        assert "__getstate__" not in vars(twin)
        if copied is not copy.copy:
            with torch.no_grad():
                model.lm_head.weight.neg_()
            assert b"kvalloc" not in pickle.dumps(twin)
        assert torch.equal(generate(twin, ids), expected)
        assert applied.last_cache is last
        with torch.no_grad():
            made = twin(ids).past_key_values
        assert (made is applied.last_cache) == (copied is copy.copy)
        if copied is not copy.copy:
            assert not torch.equal(generate(model, ids), expected)
            with kvalloc.apply(twin, profile) as own:
                generate(twin, ids)
            assert own.last_cache is not None
    assert "__getstate__" not in vars(model)
    assert torch.equal(generate(twin, ids), expected)


def test_a_copy_keeps_a_generate_that_was_the_user_s(tiny, model):
    model.generate = pickled
    with kvalloc.apply(model, tiny.make_profile(model, CONTEXT, 0.3)):
        assert copy.deepcopy(model).generate is pickled
        assert model.generate is not pickled
    assert model.generate is pickled


def test_apply_takes_the_file_or_the_name_of_a_profile(tiny, model, tmp_path):
    profile = tiny.make_profile(model, CONTEXT, 0.4, sinks=SINKS)
    profile.save(tmp_path / "p.json")
    ids = tiny.prompt(CONTEXT)
    for given in (tmp_path / "p.json", str(tmp_path / "p.json")):
        assert applied(model, ids, given).retained_bytes == profile.retained_bytes_at(CONTEXT)
    with pytest.raises(KVAllocError, match="SmolLM2"):
        kvalloc.apply(model, "smollm2-135m-instruct-retention-90")
    with pytest.raises(InputError, match="the profile is a int, expected a BudgetProfile"):
        kvalloc.apply(model, 3)
    with pytest.raises(InputError, match="decides for each prompt and profile was decided before"):
        kvalloc.apply(model, profile, target_retention=0.9)


# The table of options that exclude each other


@pytest.mark.parametrize("conflict", CONFLICTS, ids=lambda conflict: conflict.options[0])
def test_a_row_refuses_each_of_its_options(monkeypatch, conflict):
    monkeypatch.setattr(conflicts, "CONFLICTS", (conflict,))
    for first in conflict.options:
        flag = f"--{first.replace('_', '-')}"
        for other in conflict.excluded:
            with naming_flags(), pytest.raises(InputError, match=flag):
                check_conflicts([first, other])
        if conflict.without:
            with naming_flags(), pytest.raises(InputError, match=flag):
                check_conflicts([first])
        check_conflicts([first, *conflict.without[:1]])
    check_conflicts([*conflict.excluded, *conflict.without])


def test_options_are_named_as_the_reader_writes_them():
    with pytest.raises(InputError, match="^seed draws an answer, and without temperature none"):
        check_conflicts(["seed"])
    with naming_flags(), pytest.raises(InputError, match="^--seed .* without --temperature none"):
        check_conflicts(["seed"])
    with pytest.raises(InputError, match="^solver says .* such as budget='20%'"):
        check_conflicts(["solver"])
