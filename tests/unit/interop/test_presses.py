"""Presses and budgets in both directions, by stand-ins with kvpress's interface, on random models.

tests/integration/test_kvpress.py has the same with kvpress itself.
"""

import sys
from contextlib import contextmanager
from dataclasses import replace
from importlib.machinery import ModuleSpec
from types import ModuleType

import numpy as np
import pytest
import torch
from factories import make_budget_profile
from runtime_oracle import Oracle
from scorer_oracle import halves, make_states
from tiny_models import VOCABULARY, equal_budgets, tiny_model
from transformers import DynamicCache

from kvalloc.accounting.costs import stored_bytes
from kvalloc.cli.main import main
from kvalloc.errors import (
    InputError,
    MissingDependencyError,
    ModelMismatchError,
    UnsupportedModelError,
    UnsupportedRequestError,
)
from kvalloc.evaluate.methods import CacheMethod, full_cache
from kvalloc.formats.budget_profile import Policy
from kvalloc.interop.kvpress import KvpressMethod, make_press, read_peer_name, read_peers
from kvalloc.interop.kvpress_budgets import PressScorer, budget_press
from kvalloc.models.loading import shape_of
from kvalloc.models.names import cache_among
from kvalloc.models.rope import Rotation, rotate
from kvalloc.runtime.quantization import quantised_keys, quantised_values

N_LAYERS, N_HEADS, HEAD_DIM, N_PROMPT = 3, 2, 8, 30
ANSWER = (5, 9, 17, 33)
RECENT = Policy(scorer="streaming", scorer_parameters={"window": 3}, sinks=2, window=3)


class BasePress:
    """As kvpress': a hook after each layer's attention, which changes what its cache stores."""

    def __init__(self, compression_ratio=0.0):
        self.compression_ratio = compression_ratio

    def post_init_from_model(self, model):
        """Nothing to prepare."""

    def forward_hook(self, module, args, kwargs, output):
        layer, hidden = cache_among(kwargs).layers[module.layer_idx], kwargs["hidden_states"]
        assert hidden.shape[1] == layer.keys.shape[2]
        stored = (layer.keys, layer.values)
        layer.keys, layer.values = self.compress(module, hidden, *stored, None, kwargs)
        return output

    @contextmanager
    def __call__(self, model):
        self.post_init_from_model(model)
        layers = [layer.self_attn for layer in model.model.layers]
        hooks = [one.register_forward_hook(self.forward_hook, with_kwargs=True) for one in layers]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()


class ScorerPress(BasePress):
    """Base of presses that score entries."""


def n_kept(press, keys):
    return int(keys.shape[2] * (1 - press.compression_ratio))


class RecentPress(BasePress):
    """Evicts all but the last entries; in layer 0 one more than elsewhere."""

    def compress(self, module, hidden, keys, values, *_):
        kept = n_kept(self, keys) + (module.layer_idx == 0)
        return keys[:, :, -kept:].contiguous(), values[:, :, -kept:].contiguous()


class HidingPress(BasePress):
    """Hides the first entries of head 0 and frees nothing, as head-wise presses do."""

    def compress(self, module, hidden, keys, values, *_):
        places = torch.arange(N_HEADS * (keys.shape[2] - n_kept(self, keys)))
        nought = torch.zeros_like(places)
        module.masked_key_indices = (nought, nought, places)
        return keys, values


class WrappedPress(RecentPress):
    def __init__(self, press):
        self.press = press
        super().__init__()


class RereadPress(BasePress):
    """Reads the prompt itself and decides afterwards, as KVzip does."""

    @contextmanager
    def __call__(self, model):
        yield
        self.score_val = torch.arange(N_PROMPT).float()
        self.compress_post(model)

    def compress_post(self, model):
        hidden = self.score_val.topk(round(N_PROMPT * self.compression_ratio), largest=False)
        for layer in model.model.layers:
            nought = torch.zeros_like(hidden.indices)
            layer.self_attn.masked_key_indices = (nought, nought + 1, hidden.indices)


class UnwillingPress(BasePress):
    def compress(self, module, hidden, keys, values, *_):
        raise AssertionError("Query length 30 should be greater than the window size 64")


class RatiolessPress:
    """Takes no share."""


class NormPress(ScorerPress):
    def score(self, module, hidden, keys, values, attentions, kwargs):
        return -keys.norm(dim=-1)


class LastPress(ScorerPress):
    """Logits of the last query, from the hidden states and the table of angles."""

    def score(self, module, hidden, keys, values, attentions, kwargs):
        heads = module.config.num_attention_heads
        plain = module.q_proj(hidden).view(*hidden.shape[:2], heads, module.head_dim)[:, -1]
        cos, sin = (table[:, -1, None] for table in kwargs["position_embeddings"])
        half = module.head_dim // 2
        turned = plain * cos + torch.cat([-plain[..., half:], plain[..., :half]], dim=-1) * sin
        repeated = keys.repeat_interleave(module.num_key_value_groups, dim=1)
        logits = torch.einsum("bhd,bhnd->bhn", turned, repeated)
        shown = module.rotary_emb(keys, torch.arange(keys.shape[2])[None])
        torch.testing.assert_close(shown, kwargs["position_embeddings"])
        return logits.view(len(keys), keys.shape[1], -1, keys.shape[2]).mean(dim=2)


class NeedyPress(ScorerPress):
    def score(self, module, hidden, keys, values, attentions, kwargs):
        return module.k_proj(hidden)


PRESSES = (
    *(BasePress, ScorerPress, RecentPress, HidingPress, WrappedPress, RereadPress, UnwillingPress),
    *(RatiolessPress, NormPress, LastPress, NeedyPress),
)


@pytest.fixture(autouse=True)
def kvpress(monkeypatch):
    """Let ``import kvpress`` find these presses."""
    module = ModuleType("kvpress")
    module.__spec__ = ModuleSpec("kvpress", None)
    module.__dict__.update({press.__name__: press for press in PRESSES})
    monkeypatch.setitem(sys.modules, "kvpress", module)


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def prompt_ids(seed=3):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(2, VOCABULARY, (N_PROMPT,), generator=generator).tolist())


def method(text):
    return KvpressMethod(name=read_peer_name(text))


def check_answer(reduced, expected):
    """Compare the predictions at all tokens of an answer, at once and one by one."""
    at_once = reduced.fork().feed(ANSWER, last=len(ANSWER))
    one_by_one = torch.cat([reduced.feed([token], last=1) for token in ANSWER])
    torch.testing.assert_close(at_once, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one_by_one, expected, rtol=1e-4, atol=1e-4)


def hides(press, kept):
    hidden = torch.zeros(N_LAYERS, N_HEADS, N_PROMPT, dtype=torch.bool)
    if press == "Recent":
        hidden[:, :, : N_PROMPT - kept] = True
        hidden[0, :, N_PROMPT - kept - 1] = False
    elif press == "Hiding":
        hidden[:, 0, : 2 * (N_PROMPT - kept)] = True
    else:
        hidden[:, 1, : N_PROMPT - kept] = True
    return hidden


@pytest.mark.parametrize(("press", "share", "kept"), [
    ("Recent", "40", 12), ("Hiding", "60", 18), ("Reread", "50", 15),
])  # fmt: skip
def test_what_a_press_leaves_is_what_is_attended_to(model, press, share, kept):
    hidden = hides(press, kept)
    # of what is hidden, the last entry stands in, which is not
    kept_entries = torch.where(hidden, N_PROMPT - 1, torch.arange(N_PROMPT))[:, None]
    oracle = Oracle(model, torch.tensor([prompt_ids()]), dict(enumerate(kept_entries)))
    expected = oracle.logits(torch.tensor([ANSWER]))[0]
    reduced = method(f"kvpress:{press}@{share}%").compress(model, prompt_ids())
    check_answer(reduced, expected)
    entry_bytes = 2 * HEAD_DIM * 4
    assert reduced.kept_bytes == int((~hidden).sum()) * entry_bytes
    stored = hidden.numel() if press != "Recent" else int((~hidden).sum())
    assert reduced.stored_bytes == stored * entry_bytes


@pytest.mark.parametrize("bits", [8, 5, 4])
@pytest.mark.parametrize(("press", "share", "kept"), [("Recent", "40", 12), ("Hiding", "60", 18)])
def test_what_a_press_keeps_can_be_rounded_as_we_store_it(model, press, share, kept, bits):
    """Each head's kept entries alone, in their order; what is hidden changes no scale."""
    hidden = hides(press, kept)
    plain = method(f"kvpress:{press}@{share}%").compress(model, prompt_ids())
    reduced = method(f"kvpress:{press}@{share}%@{bits}bits").compress(model, prompt_ids())
    for place, (mine, whole) in enumerate(
        zip(reduced.cache.layers, plain.cache.layers, strict=True)
    ):
        first = N_PROMPT - whole.keys.shape[2]
        for head in range(N_HEADS):
            shown = ~hidden[place, head, first:]
            for ours, full, rounded in (
                (mine.keys, whole.keys, quantised_keys),
                (mine.values, whole.values, quantised_values),
            ):
                expected = rounded(full[:, head : head + 1, shown], bits)
                assert torch.equal(ours[:, head : head + 1, shown], expected)
                assert not torch.equal(expected, full[:, head : head + 1, shown])
    counts, shape = (~hidden).sum(dim=2).numpy(), shape_of(model)
    assert reduced.kept_bytes == reduced.bytes_at_16_bits == stored_bytes(counts, bits, shape).sum()
    assert plain.bytes_at_16_bits * 2 == plain.kept_bytes


def test_masks_stay_with_their_prompt(model):
    first = method("kvpress:Hiding@60%").compress(model, prompt_ids())
    alone = first.fork().feed(ANSWER, last=1)
    full = CacheMethod(make_cache=lambda: DynamicCache(config=model.config))
    before = full.compress(model, prompt_ids(7)).feed(ANSWER, last=1)
    method("kvpress:Hiding@80%").compress(model, prompt_ids(7)).feed(ANSWER, last=1)
    assert torch.equal(first.feed(ANSWER, last=1), alone)
    assert torch.equal(full.compress(model, prompt_ids(7)).feed(ANSWER, last=1), before)
    masks = [getattr(layer.self_attn, "masked_key_indices", None) for layer in model.model.layers]
    assert masks == [None] * N_LAYERS


def test_names_are_read_and_written_alike():
    for text in ("kvpress:SnapKV", "kvpress:AdaKV(SnapKV)", "kvpress:TOVA@12.5%@4bits"):
        assert str(read_peer_name(text)) == text
    name = read_peer_name(" kvpress:AdaKV(SnapKV)@20% ")
    assert (name.press, name.inner, name.share) == ("AdaKV", "SnapKV", 0.2)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("SnapKV", "write kvpress:NAME"),
        ("kvpress:SnapKV(", "write kvpress:NAME"),
        ("kvpress:Recent@0%", "more than 0"),
        ("kvpress:Recent@120%", "at most 100"),
        ("kvpress:Nothing@20%", "has no NothingPress"),
        ("kvpress:Recent(Hiding)@20%", "cannot be made"),
        ("kvpress:Ratioless@20%", "takes no share"),
        ("kvpress:Recent", "needs a share"),
        (
            "kvpress:Recent@20%@6bits",
            "nothing is rounded to 6 bits; choose from: 16, 8, 5, 4, 3, 2",
        ),
        (
            "kvpress:Recent@20%@532bits",
            "nothing is rounded to 532 bits; choose from: 16, 8, 5, 4, 3, 2",
        ),
    ],
)
def test_what_is_no_peer_is_refused(text, said):
    with pytest.raises(InputError, match=said):
        method(text)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_nothing_is_lost_at_all_entries_and_positions_go_on(family):
    """A sliding layer stores no more than its window, however many tokens follow."""
    model = tiny_model(family)
    expected = full_cache(model).compress(model, prompt_ids()).feed(ANSWER, last=len(ANSWER))
    reduced = method("kvpress:Reread@100%").compress(model, prompt_ids())
    check_answer(reduced, expected)


def test_a_press_that_refuses_a_prompt_and_two_roundings_are_one_line(model):
    with pytest.raises(InputError, match="Unwilling@20%.*30 tokens.*window size"):
        method("kvpress:Unwilling@20%").compress(model, prompt_ids())
    name = read_peer_name("kvpress:Recent@20%@4bits")
    with pytest.raises(InputError, match="Recent@20%@4bits: bits are for a plain cache"):
        KvpressMethod(name=name, make_cache=DynamicCache)


def test_peers_keep_what_the_profiles_keep(model):
    profiles = [equal_budgets(model, kept) for kept in (8, 8, 20)]
    names = read_peers(["kvpress:Recent", "kvpress:Wrapped(Recent)@5%"], profiles)
    assert [str(name) for name in names] == [
        "kvpress:Recent@50%", "kvpress:Recent@20%", "kvpress:Wrapped(Recent)@5%"
    ]  # fmt: skip
    with pytest.raises(InputError, match="give a profile"):
        read_peers(["kvpress:Recent"], [])


def test_without_kvpress_one_line_says_what_to_do(monkeypatch, capsys):
    monkeypatch.delitem(sys.modules, "kvpress")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="make peers"):
        make_press(read_peer_name("kvpress:SnapKV"))
    monkeypatch.undo()
    if "kvpress" not in sys.modules:
        assert main(["eval", "demo", "--peer", "kvpress:SnapKV@20%"]) == 2
        said = capsys.readouterr().err
        assert said.count("\n") == 1
        assert "make peers" in said


# Budgets inside kvpress, and its scores inside kvalloc


def budgets_of(model, rows, **changes):
    standing = {"shape": shape_of(model), "context_tokens": N_PROMPT, "policy": RECENT}
    return make_budget_profile(np.array(rows), **{**standing, **changes})


def read_prompt(model, press):
    cache = DynamicCache(config=model.config)
    with torch.inference_mode(), press(model):
        model.model(input_ids=torch.tensor([prompt_ids()]), past_key_values=cache)
    return cache


def test_a_press_keeps_the_best_of_each_layer_and_head(model):
    full = read_prompt(model, budget_press(budgets_of(model, [[30, 30]] * 3), NormPress()))
    cache = read_prompt(
        model, budget_press(budgets_of(model, [[9, 9], [7, 30], [30, 30]]), NormPress())
    )
    norms = [layer.keys[0].norm(dim=-1) for layer in full.layers]

    def kept(scores, n):
        best = scores[2:27].topk(n - 5, largest=False).indices + 2
        return sorted([0, 1, 27, 28, 29, *best.tolist()])

    for head in range(2):  # freed: what is left are those of the full cache, in order
        expected = full.layers[0].keys[0, head][kept(norms[0][head], 9)]
        assert torch.equal(cache.layers[0].keys[0, head], expected)
    attention = [layer.self_attn for layer in model.model.layers]
    _, heads, places = attention[1].masked_key_indices
    del attention[1].masked_key_indices
    assert set(heads.tolist()) == {0}
    hidden = {*range(30)} - {*places.tolist()}
    norms = cache.layers[1].keys[0, 0].norm(dim=-1)  # hidden, and still there
    assert sorted(hidden) == kept(norms, 7)
    assert all(getattr(one, "masked_key_indices", None) is None for one in attention)


@pytest.mark.parametrize(
    "rotation",
    [
        halves(1.0, 0.1),
        halves(0.7),
        Rotation(lambda: torch.tensor([1.0, 0.1]), slice(0, 4, 2), slice(1, 4, 2)),
    ],
)
def test_the_scorer_shows_a_press_its_queries_and_angles(rotation):
    states = make_states(rotation=rotation)
    scores = PressScorer(press="Last", window=4).score(states, sinks=2)
    logits = torch.einsum(
        "bhd,bhnd->bhn", states.queries[:, :, -1], states.keys.repeat_interleave(3, 1)
    )
    expected = logits.view(1, 2, 3, -1).mean(dim=2)
    expected -= expected.min()
    expected[..., :2] = expected[..., -4:] = 0
    torch.testing.assert_close(scores, expected, rtol=1e-4, atol=1e-4)
    plain = rotate(states.queries, -torch.arange(40), rotation)
    assert not torch.equal(plain, states.queries)
    assert PressScorer(press="Last").query_rows(1000) == 1000


def test_what_cannot_be_is_refused(model):
    fitted = budgets_of(model, [[9, 9]] * 3, policy=RECENT.replace(name="attention_matching"))
    with pytest.raises(InputError, match="plain-scores"):
        budget_press(fitted, NormPress())
    assert budget_press(fitted, NormPress(), accept=["plain-scores"])
    with pytest.raises(InputError, match="RecentPress gives no scores"):
        budget_press(fitted, RecentPress())
    with pytest.raises(InputError, match="RecentPress gives no scores"):
        PressScorer(press="Recent")
    other = make_budget_profile([[9, 9]] * 3, context_tokens=N_PROMPT, policy=RECENT)
    with pytest.raises(ModelMismatchError):
        read_prompt(model, budget_press(other, NormPress()))
    scaled = make_states(rotation=replace(halves(1.0, 0.1), scales=(torch.ones, torch.ones)))
    with pytest.raises(UnsupportedModelError, match="scales them behind the rotation"):
        PressScorer(press="Last").score(scaled, sinks=2)
    states = make_states(rotation=halves(1.0, 0.1))
    with pytest.raises(UnsupportedRequestError, match="NeedyPress cannot score a prompt of 40"):
        PressScorer(press="Needy").score(states, sinks=2)
