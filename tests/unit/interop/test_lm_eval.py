"""The model of lm-evaluation-harness, on a random model, without the harness.

Its two names that are used stand in: a base class without behaviour and a decorator that registers.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest
import tokenizers
import torch
from tiny_models import equal_budgets, tiny_model
from transformers import DynamicCache, PreTrainedTokenizerFast

from kvalloc.errors import InputError, MissingDependencyError
from kvalloc.evaluate.methods import CacheMethod
from kvalloc.models.names import generation_argument
from kvalloc.online.application import apply


def make_tokenizer():
    """One token a word, with or without the blank in front of it, as in real vocabularies."""
    names = ["w0", "[end]", *(f"w{k}" for k in range(2, 49)), *(f" w{k}" for k in range(49))]
    words = {name: number for number, name in enumerate([*names, "\n", " ", "[unk]"])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[unk]"))
    pieces = tokenizers.Regex(r" ?w\d+|\n| ")
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Split(pieces, "isolated")
    tokenizer.decoder = tokenizers.decoders.Fuse()
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="[unk]", eos_token="[end]", pad_token="[end]"
    )
    fast.name_or_path = "tiny/words"
    return fast


TOKENIZER = make_tokenizer()


class Plain:
    """What the harness documents of its own model ``hf``."""

    def __init__(self, model):
        self.model = model

    def loglikelihood(self, requests):
        results = []
        for context, continuation in (request.args for request in requests):
            bare = context.rstrip()
            prompt = TOKENIZER(bare)["input_ids"] or [TOKENIZER.eos_token_id]
            whole = (
                prompt
                + TOKENIZER(bare + context[len(bare) :] + continuation)["input_ids"][
                    len(prompt) if bare else 0 :
                ]
            )
            with torch.no_grad():
                likely = self.model(torch.tensor([whole[:-1]])).logits[0].log_softmax(-1)
            answer = torch.tensor(whole[len(prompt) :])
            likely = likely[len(prompt) - 1 :]
            total = float(likely.gather(-1, answer[:, None]).sum())
            results.append((total, bool((likely.argmax(-1) == answer).all())))
        return results

    def generate_until(self, requests):
        texts = []
        for context, options in (request.args for request in requests):
            ids = torch.tensor([TOKENIZER(context)["input_ids"]])
            written = self.model.generate(
                ids,
                max_new_tokens=options["max_gen_toks"],
                do_sample=False,
                pad_token_id=1,
                eos_token_id=1,
            )
            text = TOKENIZER.decode(written[0, ids.shape[1] :], skip_special_tokens=True)
            for stop in options["until"]:
                text = text.split(stop)[0]
            texts.append(text)
        return texts


@pytest.fixture
def module(monkeypatch):
    """``kvalloc.interop.lm_eval``, on what stands in for the harness."""
    for name, content in (
        ("lm_eval", {}),
        ("lm_eval.models", {}),
        ("lm_eval.api", {}),
        ("lm_eval.api.model", {"LM": type("LM", (), {})}),
        ("lm_eval.api.registry", {"register_model": lambda name: lambda cls: cls}),
    ):
        stand_in = ModuleType(name)
        stand_in.__dict__.update(content)
        monkeypatch.setitem(sys.modules, name, stand_in)
    sys.modules.pop("kvalloc.interop.lm_eval", None)
    yield importlib.import_module("kvalloc.interop.lm_eval")
    sys.modules.pop("kvalloc.interop.lm_eval", None)


@pytest.fixture
def make(module, monkeypatch):
    model = tiny_model()
    loaded = SimpleNamespace(model=model, tokenizer=TOKENIZER, model_id="tiny")
    monkeypatch.setattr("kvalloc.models.loading.load_model", lambda *_, **__: loaded)

    def made(**options):
        return module.KVAllocLM("tiny", **options)

    made.model = model
    return made


def text(*ids):
    return TOKENIZER.decode(ids)


PROMPT = (5, 67, 90, 73, 60, 58)


def asking(*arguments):
    """What the harness hands over, as far as it is read."""
    return SimpleNamespace(args=arguments)


@pytest.mark.parametrize("kept", [None, 200, "100%"])
def test_ten_items_score_as_with_the_harness_own_model(make, tmp_path, kept):
    """At 100%: answers with the blanks in front of them, stop texts, and likelihoods."""
    make.model.generation_config.repetition_penalty = 1.2
    hf, options = Plain(make.model), {}
    if kept == "100%":
        options["budget"] = kept
    elif kept:
        equal_budgets(make.model, kept, context_tokens=kept).save(tmp_path / "p.json")
        options["profile"] = str(tmp_path / "p.json")
    contexts = [
        text(*(3 + (7 * item + 5 * k) % 90 for k in range(6 + 3 * item))) for item in range(10)
    ]
    contexts[3] += " "
    first = hf.generate_until([asking(one, {"until": [], "max_gen_toks": 8}) for one in contexts])
    assert any(answer.startswith(" ") for answer in first)
    stops = [[], ["\n"], [first[2][4:8], "zzz"], [" "], ["w"]]
    stops += [[answer[-2:]] for answer in first[5:]]
    how = {"max_gen_toks": 8, "do_sample": False, "temperature": 0.7}
    asked = [asking(one, {"until": stop, **how}) for one, stop in zip(contexts, stops, strict=True)]
    asked[1].args[1].update(max_gen_toks=4)
    scored = [asking(*pair) for pair in zip(contexts, first, strict=True) if pair[1]]
    scored += [asking(f"{one} ", "w7 w9") for one in contexts[:3]] + [asking("", " w4 w5")]
    for after_tokens in (0, 1, 4):
        ours = make(after_tokens=after_tokens, **options)
        assert ours.generate_until(asked) == hf.generate_until(asked)
        pairs = zip(ours.loglikelihood(scored), hf.loglikelihood(scored), strict=True)
        for (nats, is_greedy), (expected, expected_is) in pairs:
            assert (nats, is_greedy) == (pytest.approx(expected, abs=1e-4), expected_is)


def test_the_last_tokens_come_after_the_compression(make, module, monkeypatch):
    seen = []

    class Spy(CacheMethod):
        def compress(self, model, prompt_ids):
            seen.append(tuple(prompt_ids))
            return super().compress(model, prompt_ids)

    spy = Spy(make_cache=lambda: DynamicCache(config=make.model.config))
    monkeypatch.setattr(module, "full_cache", lambda model: spy)
    request = asking(text(*PROMPT), text(83))
    for after_tokens in (0, 2, 9):
        make(after_tokens=after_tokens).loglikelihood([request])
    make(max_length=4).loglikelihood([request])
    make().loglikelihood([asking("", text(33))])
    assert seen == [PROMPT, PROMPT[:-2], PROMPT[:1], PROMPT[2:-1], (1,)]


def test_a_budget_reduces_as_apply_does(make):
    """With all of the prompt before the eviction, or with its last tokens after it."""
    ids = [3 + 7 * k % 90 for k in range(160)]
    request = asking(text(*ids), {"max_gen_toks": 8})
    options = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 1, "eos_token_id": 1}
    answers = []
    for after_tokens in (0, 5):
        ours = make(budget="20%", after_tokens=after_tokens)
        whole, cache = torch.tensor([ids]), {}
        with apply(make.model, budget="20%") as applied, torch.no_grad():
            if after_tokens:
                make.model(whole[:, :-after_tokens])
                cache = {generation_argument(): applied.last_cache}
            written = make.model.generate(whole, **options, **cache)
        assert applied.last_cache.retained_bytes < 0.3 * applied.last_cache.full_bytes
        answers += [TOKENIZER.decode(written[0, len(ids) :])]
        assert ours.generate_until([request]) == answers[-1:]
    assert answers != make().generate_until([request]) * 2
    scored = [asking(text(*ids), answers[1])]
    assert make(budget="20%", after_tokens=5).loglikelihood(scored)[0][1]
    assert not make(after_tokens=5).loglikelihood(scored)[0][1]
    with pytest.raises(InputError, match="budget"):
        make(profile="p.json", budget="20%")


def test_what_cannot_be_done_is_refused(make):
    for function, request, said in (
        ("loglikelihood_rolling", ("w5",), "use 'kvalloc eval --tasks kl'"),
        ("generate_until", ("w5", {"do_sample": True}), "answers are greedy"),
        ("loglikelihood", ("w5", ""), "has no token"),
        ("loglikelihood", ("w5", " w6 w7 w8"), "no room for a prompt in 2"),
    ):
        with pytest.raises(InputError, match=said):
            getattr(make(max_length=2), function)([asking(*request)])
    with pytest.raises(InputError, match="after_tokens is -1"):
        make(after_tokens=-1)


def test_the_harness_keeps_its_own_models(tmp_path, monkeypatch):
    """It registers them when `lm_eval.models` is imported, and later only if there are none."""
    for name, content in (
        ("__init__", ""),
        ("api/__init__", ""),
        ("api/model", "class LM: pass"),
        (
            "api/registry",
            "models = []\ndef register_model(n): models.append(n); return lambda c: c",
        ),
        ("models", "from lm_eval.api.registry import models; models.append('hf')"),
    ):
        file = tmp_path / "lm_eval" / f"{name}.py"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(content, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    for name in ("", ".api", ".api.model", ".api.registry", ".models"):
        monkeypatch.setitem(sys.modules, f"lm_eval{name}", None)
        del sys.modules[f"lm_eval{name}"]
    monkeypatch.delitem(sys.modules, "kvalloc.interop.lm_eval", raising=False)
    importlib.import_module("kvalloc.interop.lm_eval")
    del sys.modules["kvalloc.interop.lm_eval"]
    assert importlib.import_module("lm_eval.api.registry").models == ["hf", "kvalloc"]


def test_without_the_harness_the_way_to_get_it_is_told(monkeypatch):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "kvalloc.interop.lm_eval", raising=False)
    with pytest.raises(MissingDependencyError, match="pip install 'kvalloc\\[lm-eval\\]'"):
        importlib.import_module("kvalloc.interop.lm_eval")
