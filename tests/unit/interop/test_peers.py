"""Presses of another package, by stand-ins with kvpress's interface, on random models."""

import sys
from contextlib import contextmanager

import pytest
import torch
from press_stand_ins import N_PROMPT, BasePress, install, prompt_ids
from runtime_oracle import Oracle
from tiny_models import equal_budgets, tiny_model
from transformers import DynamicCache

from kvalloc.accounting.costs import stored_bytes
from kvalloc.cli.main import main
from kvalloc.errors import InputError, MissingDependencyError
from kvalloc.evaluate.methods import CacheMethod, full_cache
from kvalloc.interop.kvpress import KvpressMethod, make_press, read_peer_name, read_peers
from kvalloc.models.loading import shape_of
from kvalloc.runtime.quantization import quantised_keys, quantised_values

N_LAYERS, N_HEADS, HEAD_DIM = 3, 2, 8
ANSWER = (5, 9, 17, 33)


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


@pytest.fixture(autouse=True)
def kvpress(monkeypatch):
    install(monkeypatch, RecentPress, HidingPress, WrappedPress, RereadPress, UnwillingPress,
            RatiolessPress)  # fmt: skip


@pytest.fixture(scope="module")
def model():
    return tiny_model()


def method(text):
    return KvpressMethod(name=read_peer_name(text))


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
    at_once = reduced.fork().feed(ANSWER, last=len(ANSWER))
    torch.testing.assert_close(at_once, expected, rtol=1e-4, atol=1e-4)
    one_by_one = torch.cat([reduced.feed([token], last=1) for token in ANSWER])
    torch.testing.assert_close(one_by_one, expected, rtol=1e-4, atol=1e-4)
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
        ("kvpress:Recent@20%@2bits", "nothing is rounded to 2 bits; choose from: 16, 8, 5, 4, 3"),
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
    at_once = reduced.fork().feed(ANSWER, last=len(ANSWER))
    torch.testing.assert_close(at_once, expected, rtol=1e-4, atol=1e-4)
    one_by_one = torch.cat([reduced.feed([token], last=1) for token in ANSWER])
    torch.testing.assert_close(one_by_one, expected, rtol=1e-4, atol=1e-4)


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
