"""Each family of models is served and right, or refused in one true line."""

import copy
import warnings

import families
import pytest
import tiny_models
import torch
import transformers
from named_models import vary_norms
from other_attention import attention_on_cpu

import kvalloc
from kvalloc.errors import InputError, UnsupportedModelError, UnsupportedRequestError
from kvalloc.models import names
from kvalloc.runtime.extension import Extension

TOKENS, PADDING = 160, 30
REFUSED = {
    "mamba": "stores no keys and values",
    "rwkv": "stores no keys and values|caches no layer",
    "bloom": "attends without transformers' attention interface",
    "t5": "encoder-decoder",
    "bart": "encoder-decoder",
    "mllama": "attend to images beside the text",
}
FITTED = [
    *("gpt-oss", "olmo3", "hunyuan", "granite", "gpt-neox", "phi", "qwen2.5-vl"),
    *("cohere", "cohere2", "glm4", "smollm3", "exaone4", "ernie4.5", "gpt-j", "nanochat"),
    *("qwen3.5", "qwen3-next", "jamba", "lfm2", "falcon-h1", "deepseek", "mimo", "gemma4 by layer"),
]
"""Families that rotate neighbours, a part of a head, backwards, or not in all layers, too; hybrids
and latents."""
FIXED = ["gpt2", "opt", "ctrl", "bart decoder"]
"""Families with positions in their embeddings."""
IMAGES = [one for one in families.WITH_IMAGES if one not in REFUSED]
TEXTS = [" ".join(f"w{i * j % 97}" for j in range(400)) for i in range(3, 9)]


def prompt(rows=1):
    torch.manual_seed(3)
    return torch.randint(4, 118, (rows, TOKENS))


def padded(rows=2):
    ids, mask = prompt(rows), torch.ones(rows, TOKENS, dtype=torch.long)
    mask[0, :PADDING] = ids[0, :PADDING] = 0
    return {"input_ids": ids, "attention_mask": mask}


def written(model, **inputs):
    settings = {"max_new_tokens": 3, "do_sample": False, "return_dict_in_generate": True}
    out = model.generate(**inputs, **settings, output_logits=True)
    return torch.stack(out.logits)


def fit(model):
    tokenizer = tiny_models.WordTokenizer()
    return kvalloc.fit(model, tokenizer, TEXTS, context=128, samples=4)


@pytest.mark.parametrize("name", REFUSED)
def test_a_family_that_is_not_served_is_refused_by_every_call(name):
    model, tokenizer = families.family(name), tiny_models.WordTokenizer()
    for call in (
        lambda: kvalloc.apply(model, budget="100%"),
        lambda: kvalloc.apply(model, budget="30%", scorer="snapkv", solver="uniform"),
        lambda: kvalloc.profile(model, tokenizer, TEXTS, context=128, samples=2),
        lambda: fit(model),
    ):
        with pytest.raises(UnsupportedModelError, match=REFUSED[name]) as caught:
            call()
        assert type(model).__name__.partition("For")[0] in str(caught.value)
        assert "\n" not in str(caught.value)


@pytest.mark.parametrize("image", [False, True])
@pytest.mark.parametrize("name", IMAGES)
def test_a_family_that_is_served_is_right_and_reduced(name, image):
    """Text and images are read as the plain model reads them."""
    model, rows, alone = families.family(name), padded(), {"input_ids": prompt()}
    if image:
        rows = padded(3) | families.with_image(name, prompt(3))
        alone = families.with_image(name, prompt())
    with torch.no_grad():
        plain, plain_alone = written(model, **rows), model(**alone, use_cache=True).logits
    for budget, n_alike in (("100%", 3), ("30%", 1)):
        with kvalloc.apply(model, budget=budget) as applied:
            found = written(model, **rows)
        torch.testing.assert_close(found[:n_alike], plain[:n_alike], atol=1e-4, rtol=0)
        assert applied.last_cache.kept_tokens_by_row[0].max() <= TOKENS + 2 - PADDING
    assert 0.1 < applied.last_cache.share <= 0.3
    with warnings.catch_warnings(), torch.no_grad(), kvalloc.apply(model, budget="30%") as applied:
        warnings.simplefilter("error")
        out = model(**alone, use_cache=True)
    assert torch.equal(out.logits, plain_alone)
    assert names.cache_among(out) is applied.last_cache
    assert 0.1 < applied.last_cache.share <= 0.3


@pytest.mark.parametrize("name", ["gemma3 with images", "smolvlm"])
def test_later_turns_of_text_and_of_an_image_follow_an_image(name):
    model, text, given = families.family(name), prompt()[:, :0], {}
    image = families.with_image(name, prompt())
    with kvalloc.apply(model, budget="20%") as applied:
        for turn in (image, {"input_ids": prompt()[:, :20]}, image):
            text = torch.cat([text, turn["input_ids"]], dim=1)
            given |= turn | {"input_ids": text}
            if name.startswith("gemma"):
                given["token_type_ids"] = (text == families.IMAGE).long()
            text = model.generate(**given, max_new_tokens=3, do_sample=False)
            given = {names.generation_argument(): (cache := applied.last_cache)}
    kept, n_images = cache.kept_by_kind, int((text == families.IMAGE).sum())
    n_text = cache.get_seq_length() - n_images
    assert {kind: n_seen for kind, (_, n_seen) in kept.items()} == {
        "text": n_text,
        "image": n_images,
    }
    counts = cache.kept_tokens[list(cache.stores)]
    assert sum(n_kept for n_kept, _ in kept.values()) == pytest.approx(counts.mean())
    assert 0 < kept["image"][0] < n_images
    assert cache.share <= 0.2


@pytest.mark.parametrize("padding", [0, PADDING])
def test_tokens_of_an_image_may_see_each_other_in_sliding_layers_alone(padding):
    model = families.family("gemma4 with images")
    model.config.get_text_config().use_bidirectional_attention = "vision"
    inputs = families.with_image("gemma4 with images", prompt(2))
    inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    inputs["attention_mask"][0, TOKENS - padding :] = 0
    with torch.no_grad():
        plain = model(**inputs).logits
        with kvalloc.apply(model, budget="30%") as applied:
            found = model(**inputs).logits
            cache = {names.generation_argument(): applied.last_cache}
            mask = torch.nn.functional.pad(inputs.pop("attention_mask"), (0, TOKENS), value=1)
            model(**inputs, attention_mask=mask, **cache)  # after a reduced prompt
    torch.testing.assert_close(found, plain, atol=1e-5, rtol=0)
    assert applied.last_cache.get_seq_length() == 2 * TOKENS


@pytest.mark.parametrize("name", ["qwen2-vl", "qwen3-vl"])
def test_a_prompt_with_images_is_read_in_pieces(name):
    """Positions of several axes are cut, and what first layers add to tokens of images."""

    class Pieces(Extension):
        def cuts(self, cache, end):
            return range(7, end, 11) if not cache.get_seq_length() else ()

    model = families.family(name)
    inputs = families.with_image(name, prompt(2))
    profile = tiny_models.equal_budgets(model, 2 * TOKENS, context_tokens=2 * TOKENS)
    cache = kvalloc.make_cache(model, profile)
    cache.extensions.append(Pieces())
    found = written(model, **inputs, **{names.generation_argument(): cache})
    torch.testing.assert_close(found, written(model, **inputs), atol=1e-5, rtol=0)
    assert cache.kept_by_kind is None  # nothing has told it of token ids


@pytest.mark.parametrize("budget", ["100%", "30%"])
def test_masks_by_kind_of_layer_stay_those_of_flex_attention(budget):
    with attention_on_cpu("flex_attention"), torch.no_grad():
        model, inputs = families.family("gemma3 with images"), padded()
        model.set_attn_implementation("flex_attention")
        plain, shown = model(**inputs).logits, inputs["attention_mask"].bool()
        with kvalloc.apply(model, budget=budget), pytest.warns(UserWarning, match="dict.*sdpa"):
            torch.testing.assert_close(model(**inputs).logits[shown], plain[shown])


@pytest.mark.parametrize("extra", [0, 5, TOKENS])
@pytest.mark.parametrize("by_kind", [True, False])
def test_windows_of_given_masks_count(by_kind, extra):
    """Sliding layers of transformers take a mask of queries and keys as it is given."""
    model, inputs = families.family("gemma3"), padded()
    shown = inputs["attention_mask"].bool()
    causal = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril() & shown[:, None, None]
    near = causal.triu(1 - model.config.sliding_window - extra)
    masks = {"full_attention": causal, "sliding_attention": near}
    inputs["attention_mask"] = masks if by_kind else near
    with torch.no_grad():
        plain = model(**inputs).logits
        with kvalloc.apply(model, budget="50%") as applied:
            torch.testing.assert_close(model(**inputs).logits[shown], plain[shown])
    assert applied.last_cache.retained_bytes < applied.last_cache.full_bytes


def test_how_many_tokens_of_images_stay_of_a_forward_with_padding():
    model, inputs = families.family("qwen2.5-vl"), families.with_image("qwen2.5-vl", prompt(2))
    mask = torch.ones(2, TOKENS).long()
    mask[1, -PADDING:] = 0
    with torch.no_grad(), kvalloc.apply(model, budget="30%") as applied:
        model(**inputs, attention_mask=mask)
    cache = applied.last_cache
    kept = cache.kept_by_kind
    assert [n_seen for _, n_seen in kept.values()] == [2 * TOKENS - PADDING - 8, 8]
    n_kept = sum(n_kept for n_kept, _ in kept.values())
    assert n_kept == pytest.approx(cache.kept_tokens_by_row.mean(axis=(1, 2)).sum())


def test_a_cache_of_the_users_own_stays_with_a_model_that_makes_one():
    model, own = families.family("smolvlm"), transformers.DynamicCache()
    with torch.no_grad(), kvalloc.apply(model, budget="30%") as applied:
        model(prompt(), **{names.generation_argument(): own})
        assert (own.get_seq_length(), applied.last_cache) == (TOKENS, None)
        model(prompt())
        assert applied.last_cache.reduced
        held = copy.deepcopy(model)
    for each in (model, held):
        out = each(prompt(), use_cache=True)
        assert type(names.cache_among(out)) is transformers.DynamicCache


def test_answers_without_loss_are_refused_for_images_which_would_not_be_read():
    model, inputs = families.family("llava"), families.with_image("llava", prompt())
    with kvalloc.apply(model, budget="30%", lossless=True):
        with pytest.raises(UnsupportedRequestError, match="token ids alone.*pixel_values; leave"):
            model.generate(**inputs)
        model.generate(inputs["input_ids"], max_new_tokens=1)


def test_budgets_decided_from_token_ids_are_refused_where_a_decoder_gets_embeddings():
    model, inputs = families.family("llava"), padded()
    line = "decided from its token ids, but the decoder got embeddings.*budget='20%' alone"
    with kvalloc.apply(model, budget="30%", scorer="snapkv", solver="uniform"):
        with pytest.raises(UnsupportedRequestError, match=line):
            written(model, **inputs)
        with torch.no_grad(), pytest.warns(UserWarning, match=f"makes a plain cache.*{line}"):
            model(**inputs)


def test_no_fit_is_named_for_a_model_that_has_none():
    model = families.family("hunyuan")
    model.model.layers[1].self_attn.query_layernorm = families.Factor(torch.linspace(-1.0, 2.0, 8))
    with pytest.raises(UnsupportedModelError, match="rotate .*budget='20%' alone, which needs no"):
        fit(model)
    with torch.no_grad(), kvalloc.apply(model, budget="30%") as applied:
        model(prompt())
    profile = applied.last_cache.profile
    assert "kvalloc fit" not in profile.detail
    assert profile.policy.name == "score"  # no values are fitted for queries further on
    with pytest.raises(InputError, match="cannot be measured, .* its queries; give budget="):
        kvalloc.apply(model, target_loss=0.1)


@pytest.mark.parametrize("name", [*FITTED, *FIXED])
def test_a_family_is_fitted_and_read_once(name, monkeypatch, tmp_path):
    """Values are fitted to queries further on, unless positions are in embeddings or latents."""
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path))
    model = families.family(name)
    vary_norms(model)
    fit(model)
    with torch.no_grad(), kvalloc.apply(model, budget="20%") as applied:
        text = model.generate(prompt(), max_new_tokens=3, do_sample=False)
        cache = {names.generation_argument(): applied.last_cache}
        text = torch.cat([text, prompt()], dim=1)  # it may have written the token of padding
        model.generate(text, attention_mask=torch.ones_like(text), max_new_tokens=3, **cache)
    profile = applied.last_cache.profile
    assert profile.detail.split("; ")[-1].startswith("predicted loss")
    assert (profile.policy.name == "score") is (name in (*FIXED, "deepseek"))
    assert applied.last_cache.share <= 0.2


def test_where_images_have_several_axes_nothing_is_rotated(monkeypatch, tmp_path):
    """A row with an image is read twice, with or without a fit; a row of text beside it is not."""
    monkeypatch.setenv("KVALLOC_CACHE", str(tmp_path))
    model, name = families.family("qwen2.5-vl"), "qwen2.5-vl"
    alone, both = families.with_image(name, prompt()), families.with_image(name, prompt())
    for key in ("input_ids", "mm_token_type_ids"):
        text = prompt() if key == "input_ids" else torch.zeros_like(prompt())
        both[key] = torch.cat([both[key], text])
    fit(model)
    policies, kept = [], []
    for inputs in (both, alone):
        for read in (lambda **one: model.generate(**one, max_new_tokens=1), model):
            with torch.no_grad(), kvalloc.apply(model, budget="20%") as applied:
                read(**inputs)
            cache = applied.last_cache
            policies.append([(one.policy.name, one.policy.scorer) for one in cache.row_profiles])
            kept.append(cache.kept_tokens_by_row[0].tolist())
    twice, once = ("score", "reconstruction"), ("attention_matching", "surrogate")
    assert policies == [[twice, once]] * 2 + [[twice]] * 2
    assert kept[0] == kept[1] == kept[2] == kept[3]
    assert "no fit: reads the prompt twice" in cache.profile.detail
    with pytest.raises(UnsupportedRequestError, match="image.* several axes, which such a file"):
        kvalloc.save_cache(cache, tmp_path / "cache.safetensors")
    profile = cache.profile
    for policy in ("lookahead", "expected_attention", "attention_matching"):
        with kvalloc.apply(model, profile, policy=policy) as applied:
            model.generate(both["input_ids"][1:], max_new_tokens=1)
            with pytest.raises(UnsupportedRequestError, match=f"{policy}.* axes; name budget='20%"):
                model.generate(**alone, max_new_tokens=1)


def test_a_turn_with_an_image_on_several_axes_goes_on_in_place():
    model, image = families.family("qwen2.5-vl"), families.with_image("qwen2.5-vl", prompt())
    with kvalloc.apply(model, budget="30%") as applied:
        text = model.generate(prompt(), max_new_tokens=3, do_sample=False)
        given = {names.generation_argument(): (cache := applied.last_cache)}
        kinds = torch.nn.functional.pad(image["mm_token_type_ids"], (text.shape[1], 0))
        ids = torch.cat([text, image["input_ids"]], dim=1)
        turn = image | {"input_ids": ids, "mm_token_type_ids": kinds}
        with pytest.warns(UserWarning, match="image in this turn.* in their places, ranks"):
            text = model.generate(**turn, **given, max_new_tokens=3)
        ids = torch.cat([text, prompt()[:, :40]], dim=1)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            model.generate(ids, **given, max_new_tokens=2)
    assert cache.rows[0].after.scorer.ahead == 0
    assert cache.share <= 0.3


def test_a_model_that_fails_in_every_sample_is_named():
    model, tokenizer = tiny_models.tiny_model(), tiny_models.WordTokenizer()

    def fail(module, args, kwargs):
        if args[0].shape[1] > 1:  # the model has been looked at
            raise RuntimeError("an odd shape")

    model.model.layers[1].register_forward_pre_hook(fail, with_kwargs=True)
    line = "LlamaForCausalLM cannot be measured.* RuntimeError: an odd shape; budget='20%' alone"
    with pytest.raises(InputError, match=line):
        kvalloc.profile(model, tokenizer, TEXTS, context=64, samples=2)


@pytest.mark.parametrize("part", ["mamba.out_proj", "self_attn.q_proj"])
def test_a_prompt_that_failed_after_a_state_comes_again(part):
    model = families.family("falcon-h1")

    def fail(*_):
        raise MemoryError

    with torch.no_grad(), kvalloc.apply(model, budget="100%") as applied:
        written(model, input_ids=prompt())
        profile = applied.last_cache.profile
    cache, ids = kvalloc.make_cache(model, profile), {"input_ids": prompt()}
    handle = model.get_submodule(f"model.layers.0.{part}").register_forward_pre_hook(fail)
    with torch.no_grad():
        with pytest.raises(MemoryError):
            model(**ids, **names.cache_keyword(model, cache))
        handle.remove()
        again = model(**ids, **names.cache_keyword(model, cache)).logits
        assert torch.equal(again, model(**ids).logits)


@pytest.mark.parametrize("name", ["falcon-h1", "jamba"])
def test_a_prompt_with_gradients_is_read_again(name):
    model = families.family(name)
    with kvalloc.apply(model, budget="30%") as applied:
        logits = model(input_ids=prompt(2), use_cache=True).logits
    assert logits.requires_grad
    assert applied.last_cache.share <= 0.3


@pytest.mark.parametrize(
    "name", ["internvl", "gemma4 with images", "qwen2.5-vl", "qwen3-vl", "glm4v"]
)
def test_a_second_read_repeats_images_where_they_would_stand(name):
    """Embeddings, positions on each axis, and what first layers add: as of the prompt twice."""
    model, read, by_token = families.family(name), [], ("input_ids", "mm_token_type_ids")
    once = families.with_image(name, prompt())
    twice = {key: torch.cat([one, one], dim=int(key in by_token)) for key, one in once.items()}
    handle = model.get_decoder().register_forward_hook(lambda *call: read.append(call[-1][0]))
    with torch.no_grad(), kvalloc.apply(model, budget="30%"):
        model(**twice, use_cache=False)
        model.generate(**once, max_new_tokens=1)
    handle.remove()
    torch.testing.assert_close(read[2], read[0][:, TOKENS:], atol=1e-4, rtol=0)
