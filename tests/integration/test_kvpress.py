"""The real kvpress, where it is installed: in the environment that `make peers` makes."""

import json
import shutil
from functools import partial
from types import SimpleNamespace

import pytest

pytest.importorskip("kvpress", reason="kvpress has an environment of its own: make peers")

import numpy as np
import torch
from factories import make_budget_profile
from quality.quantized import BACKENDS, COMPILER, quantized_cache
from tiny_models import VOCABULARY, tiny_model
from transformers import DynamicCache, QuantizedCache

from kvalloc.cli.main import main
from kvalloc.evaluate.methods import CacheMethod
from kvalloc.formats.budget_profile import Policy
from kvalloc.interop.exporting import export
from kvalloc.interop.kvpress import KvpressMethod, make_press, read_peer_name
from kvalloc.interop.kvpress_budgets import PressScorer, budget_press
from kvalloc.models.loading import shape_of

EVICTING = (
    "SnapKV", "PyramidKV", "StreamingLLM", "TOVA", "ExpectedAttention", "KeyDiff",
    "CriticalKV(SnapKV)",
)  # fmt: skip
HIDING = ("AdaKV(SnapKV)", "CriticalAdaKV(SnapKV)", "AdaKV(ExpectedAttention)")
N_PROMPT, ANSWER = 192, (7, 11, 90, 3)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture(scope="module")
def prompt():
    return tuple(torch.randint(2, VOCABULARY, (N_PROMPT,)).tolist())


@pytest.mark.parametrize("name", [*EVICTING, *HIDING])
@pytest.mark.parametrize("share", [50, 20])
def test_what_we_run_is_what_kvpress_runs(model, prompt, name, share):
    """Its own way: the press around the prefill, then one token at a time with positions."""
    method = KvpressMethod(name=read_peer_name(f"kvpress:{name}@{share}%"))
    reduced = method.compress(model, prompt)
    expected = as_kvpress_runs_it(model, prompt, method, DynamicCache())
    ours = reduced.feed(ANSWER, last=len(ANSWER))
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    assert reduced.kept_bytes / (3 * 2 * N_PROMPT * 64) == pytest.approx(share / 100, abs=0.01)
    assert (reduced.stored_bytes > reduced.kept_bytes) == (name in HIDING)


def as_kvpress_runs_it(model, prompt, method, cache):
    """Predictions after the answer's tokens, one by one."""
    press = make_press(method.name)
    press.compression_ratio = 1 - (round(method.name.share * N_PROMPT) + 0.01) / N_PROMPT
    rows = []
    with torch.inference_mode():
        with press(model):
            model.model(input_ids=torch.tensor([prompt]), past_key_values=cache)
        for place, token in enumerate(ANSWER):
            output = model(
                input_ids=torch.tensor([[token]]),
                past_key_values=cache,
                position_ids=torch.tensor([[N_PROMPT + place]]),
            )
            rows.append(output.logits[0])
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return torch.cat(rows)


@pytest.mark.parametrize("bits", [4, 2])
@pytest.mark.parametrize("backend", [
    pytest.param("quanto", marks=pytest.mark.skipif(not shutil.which(COMPILER), reason=COMPILER)),
    "HQQ",
])  # fmt: skip
@pytest.mark.parametrize("name", [None, "SnapKV", "AdaKV(SnapKV)"])
def test_quantised_caches_alone_and_with_presses(model, prompt, name, backend, bits):
    """What a press keeps of transformers' own cache, its bytes read from its tensors."""
    share, axis = 1.0 if name is None else 0.5, BACKENDS[backend][1]
    own = QuantizedCache(backend.lower(), model.config, bits, axis, axis)
    make = partial(quantized_cache, model, backend, bits)
    if name is None:
        method = CacheMethod(make_cache=make)
        with torch.inference_mode():
            model.model(input_ids=torch.tensor([prompt]), past_key_values=own)
            expected = model(input_ids=torch.tensor([ANSWER]), past_key_values=own).logits[0]
    else:
        method = KvpressMethod(name=read_peer_name(f"kvpress:{name}@50%"), make_cache=make)
        expected = as_kvpress_runs_it(model, prompt, method, own)
    reduced = method.compress(model, prompt)
    ours = reduced.fork().feed(ANSWER, last=len(ANSWER))
    torch.testing.assert_close(ours, expected, rtol=1e-3, atol=1e-3)
    one_by_one = torch.cat([reduced.feed([token], last=1) for token in ANSWER])
    torch.testing.assert_close(one_by_one, ours, rtol=1e-4, atol=1e-4)
    numbers = 3 * 2 * 2 * N_PROMPT * 8
    per_number = bits / 8 + 2 * 2 / 64  # and two numbers of 16 bits a group of 64
    assert reduced.bytes_at_16_bits / numbers == pytest.approx(share * per_number, rel=0.01)
    stored = 1.0 if name in HIDING else share
    assert reduced.stored_bytes / numbers == pytest.approx(stored * (per_number + 2 * 2 / 64))
    assert reduced.kept_bytes / reduced.stored_bytes == pytest.approx(share / stored, rel=0.01)


@pytest.mark.model
def test_the_command_with_a_peer(capsys):
    command = ["eval", "demo", "--peer", "kvpress:TOVA@20%", "--peer", "kvpress:KVzip@20%"]
    assert main([*command, "--tasks", "pairs", "--samples", "1", "--context", "300", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == ["full", "kvpress:TOVA@20%", "kvpress:KVzip@20%"]
    tova, kvzip = rows["kvpress:TOVA@20%"], rows["kvpress:KVzip@20%"]
    assert tova["retained_bytes"] == tova["kept_bytes"]
    assert tova["kept_bytes"] / tova["full_bytes"] == pytest.approx(0.2, abs=0.002)
    assert kvzip["kept_bytes"] / kvzip["full_bytes"] == pytest.approx(0.2, abs=0.002)
    assert kvzip["retained_bytes"] >= kvzip["full_bytes"]


def budgets_of(model, rows, **changes):
    policy = Policy(scorer="streaming", scorer_parameters={"window": 8}, sinks=4, window=8)
    budgets, shape = np.array(rows), shape_of(model)
    standing = {"shape": shape, "context_tokens": N_PROMPT, "policy": policy}
    return make_budget_profile(budgets, **{**standing, **changes})


def read_prompt(model, prompt, press):
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), press(model):
        model.model(input_ids=torch.tensor([prompt]), past_key_values=cache)
    hidden = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
    for layer in model.model.layers:
        layer.self_attn.masked_key_indices = None
    return cache, hidden


@pytest.mark.parametrize(
    "name", ["SnapKV", "Knorm", "TOVA", "ExpectedAttention", "CriticalKV(SnapKV)"]
)
def test_what_a_budget_press_keeps_is_what_the_press_keeps(model, prompt, name):
    """At one budget everywhere, beyond sinks and window, which kvpress does not know."""
    budget = 150
    own, named = make_press(read_peer_name(f"kvpress:{name}")), read_peer_name(f"kvpress:{name}")
    own.compression_ratio = 1 - (budget + 0.01) / N_PROMPT
    expected, _ = read_prompt(model, prompt, own)
    policy = Policy(scorer="snapkv", scorer_parameters={"window": 1}, sinks=0, window=1)
    profile = budgets_of(model, [[budget] * 2] * 3, policy=policy)
    result, _ = read_prompt(model, prompt, budget_press(profile, make_press(named)))
    for ours, theirs in zip(result.layers, expected.layers, strict=True):
        same = (ours.keys[0, 0][:, None] == theirs.keys[0, 0][None]).all(-1).any(1)
        assert same.float().mean() > (0.97 if name.startswith("Critical") else 0.99)


def test_lu_kv_reads_what_is_exported(model, prompt, tmp_path):
    """kvpress' own LUKVPress hides as many entries of each head as the profile evicts."""
    import kvpress

    profile = budgets_of(model, [[96, 20], [12, 192], [60, 70]])
    export(profile, "lu-kv", tmp_path / "b.npy")
    press = kvpress.LUKVPress(kvpress.KnormPress(), sink=4, window=8)
    press.compression_ratio = 1 - profile.budgets.mean() / N_PROMPT
    press._budget_curves = np.load(tmp_path / "b.npy")
    _, hidden = read_prompt(model, prompt, press)
    for layer, marked in enumerate(hidden):
        evicted = [(marked[1] == head).sum().item() for head in range(2)]
        assert evicted == (N_PROMPT - profile.budgets[layer]).tolist()


def test_duo_attention_reads_what_is_exported(model, prompt, tmp_path, monkeypatch):
    """kvpress' own DuoAttentionPress hides what streaming heads do not keep."""
    import kvpress
    from kvpress.presses import duo_attention_press

    policy = Policy(scorer="streaming", scorer_parameters={"window": 16}, sinks=4, window=16)
    profile = budgets_of(model, [[192, 20], [20, 20], [20, 192]], policy=policy)
    export(profile, "duo-attention", tmp_path / "d")

    def get(url):
        text = (tmp_path / "d" / url.rpartition("/")[2]).read_text()
        return SimpleNamespace(text=text, json=lambda: json.loads(text))

    monkeypatch.setattr(duo_attention_press.requests, "get", get)
    monkeypatch.setitem(duo_attention_press.PATTERNS_DICT, model.config.name_or_path, "tiny")
    press = kvpress.DuoAttentionPress(head_compression_ratio=4 / 6)
    _, hidden = read_prompt(model, prompt, press)
    for layer, marked in enumerate(hidden):
        evicted = [(marked[1] == head).sum().item() for head in range(2)]
        assert evicted == (N_PROMPT - profile.budgets[layer]).tolist()


@pytest.mark.parametrize("name", ["SnapKV", "TOVA", "ExpectedAttention", "KeyDiff", "Knorm"])
def test_the_scorer_gives_a_presses_scores(model, prompt, name):
    """What the press gives inside kvpress, from the layer's modules, up to a shift."""
    press, seen = make_press(read_peer_name(f"kvpress:{name}")), []
    own = press.score
    press.score = lambda *given: seen.append(own(*given)) or seen[-1]
    press.compression_ratio = 0.5
    read_prompt(model, prompt, press)
    result = []

    def look(states, compute):
        result.append(PressScorer(press=name).score(states, sinks=4))
        return compute(states.mask)

    from kvalloc.models.attention import intercept_attention

    with torch.inference_mode(), intercept_attention(model, look):
        model.model(input_ids=torch.tensor([prompt]))
    ours, theirs = result[0][..., 4:-8], seen[0][..., 4:-8]
    shift = (theirs - ours).mean()
    torch.testing.assert_close(ours + shift, theirs, rtol=1e-4, atol=1e-5)
    assert (result[0][..., :4] == 0).all()
    assert (result[0][..., -8:] == 0).all()
    assert (result[0] >= 0).all()
