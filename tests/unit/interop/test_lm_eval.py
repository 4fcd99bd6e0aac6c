"""The model of lm-evaluation-harness, on a random model: with the harness where it is installed.

Where it is not, its two names that are used stand in: a base class without behaviour and a
decorator that registers.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace

import pytest
import torch
from tiny_models import tiny_model
from transformers import DynamicCache

from kvalloc.errors import InputError, MissingDependencyError
from kvalloc.evaluate.methods import CacheMethod

INSTALLED = importlib.util.find_spec("lm_eval") is not None


@dataclass
class Instance:
    """What the harness hands over, as far as it is read."""

    args: tuple


class Tokenizer:
    """One token a word, ``w7`` being 7; blanks belong to the word after them."""

    name_or_path = "tiny/words"
    eos_token_id = 1

    def __call__(self, text, add_special_tokens=True, verbose=True):
        return {"input_ids": [int(word[1:]) for word in text.split()]}

    def decode(self, ids, skip_special_tokens=False):
        return " ".join(f"w{token}" for token in ids if not (skip_special_tokens and token == 1))


@pytest.fixture
def module(monkeypatch):
    """``kvalloc.interop.lm_eval``, on the harness or on what stands in for it."""
    if INSTALLED:  # it registers once for all tests
        yield importlib.import_module("kvalloc.interop.lm_eval")
        return
    registered = {}

    def register_model(name):
        return lambda cls: registered.setdefault(name, cls)

    for name, content in (
        ("lm_eval", {}),
        ("lm_eval.api", {}),
        ("lm_eval.api.model", {"LM": type("LM", (), {})}),
        ("lm_eval.api.registry", {"register_model": register_model}),
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
    model.generation_config.eos_token_id = None
    loaded = SimpleNamespace(model=model, tokenizer=Tokenizer(), model_id="tiny")
    monkeypatch.setattr("kvalloc.models.loading.load_model", lambda *_, **__: loaded)

    def made(**options):
        return module.KVAllocLM("tiny", **options)

    made.model = model
    return made


def text(*ids):
    return " ".join(f"w{token}" for token in ids)


PROMPT, ANSWER = (5, 17, 40, 23, 60, 8), (33, 12, 71)


@pytest.mark.parametrize("after_tokens", [0, 1, 4])
def test_the_full_cache_gives_the_plain_models_likelihood(make, after_tokens):
    with torch.no_grad():
        whole = make.model(torch.tensor([PROMPT + ANSWER])).logits[0].double().log_softmax(-1)
    expected = sum(float(whole[5 + place, token]) for place, token in enumerate(ANSWER))
    greedy = int(whole[5].argmax())
    [(result, is_greedy), (_, first_is)] = make(after_tokens=after_tokens).loglikelihood(
        [
            Instance((text(*PROMPT), f" {text(*ANSWER)}")),
            Instance((text(*PROMPT), f" {text(greedy)}")),
        ]
    )
    assert result == pytest.approx(expected, rel=1e-5)
    assert is_greedy is (list(ANSWER) == whole[5:8].argmax(-1).tolist())
    assert first_is is True


def test_answers_are_greedy_and_end_at_the_stop_text(make):
    ids = list(PROMPT)
    for _ in range(5):
        with torch.no_grad():
            ids.append(int(make.model(torch.tensor([ids])).logits[0, -1].argmax()))
    said = text(*ids[len(PROMPT) :])
    lm = make()
    asked = (text(*PROMPT), {"until": ["zzz"], "max_gen_toks": 5})
    stopped = (text(*PROMPT), {"until": [f"w{ids[-1]}"], "max_gen_toks": 5})
    assert lm.generate_until([Instance(asked)]) == [said]
    assert lm.generate_until([Instance(stopped)]) == [said.split(f"w{ids[-1]}")[0]]


def test_the_last_tokens_come_after_the_compression(make, module, monkeypatch):
    seen = []

    class Spy(CacheMethod):
        def compress(self, model, prompt_ids):
            seen.append(tuple(prompt_ids))
            return super().compress(model, prompt_ids)

    spy = Spy(make_cache=lambda: DynamicCache(config=make.model.config))
    monkeypatch.setattr(module, "full_cache", lambda model: spy)
    request = Instance((text(*PROMPT), f" {text(33)}"))
    for after_tokens in (0, 2, 9):
        make(after_tokens=after_tokens).loglikelihood([request])
    make(max_length=4).loglikelihood([request])
    make().loglikelihood([Instance(("", text(33)))])
    assert seen == [PROMPT, PROMPT[:-2], PROMPT[:1], PROMPT[3:-1], (1,)]


def test_what_cannot_be_done_is_refused(make):
    def asked(lm, function, *arguments):
        return lambda: getattr(lm, function)([Instance(arguments)])

    for refuse, said in (
        (asked(make(), "loglikelihood_rolling", "w5"), "use 'kvalloc eval --tasks kl'"),
        (asked(make(), "generate_until", "w5", {"do_sample": True}), "answers are greedy"),
        (asked(make(), "loglikelihood", "w5", ""), "has no token"),
        (asked(make(max_length=2), "loglikelihood", "w5", " w6 w7"), "no room for a prompt in 2"),
        (lambda: make(after_tokens=-1), "after_tokens is -1"),
    ):
        with pytest.raises(InputError, match=said):
            refuse()


def test_without_the_harness_the_way_to_get_it_is_told(monkeypatch):
    for name in ("lm_eval", "lm_eval.api", "lm_eval.api.model", "lm_eval.api.registry"):
        monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, "kvalloc.interop.lm_eval", raising=False)
    with pytest.raises(MissingDependencyError, match="pip install 'kvalloc\\[lm-eval\\]'"):
        importlib.import_module("kvalloc.interop.lm_eval")
