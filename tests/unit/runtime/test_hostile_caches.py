"""Saved caches that were made to do harm: digests have no key, so each is signed anew here.

Every case is either refused in one line that names the file, by `kvalloc inspect` as by loading, or
it answers: with the kernel as without it, whose operations check where they read. Under
AddressSanitizer (`make test-sanitized`) a kernel that reads elsewhere ends the process.
"""

import json
import math
from collections import Counter

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from attention_cases import with_widths
from cli_tools import run as run_command
from hostile_files import Tensors, by_chance, changed_bytes, changed_value
from hypothesis import given
from hypothesis import strategies as st
from kernel_choice import WITH, WITHOUT, kernel_choice
from prompt_runs import AT_ONCE

import kvalloc
from kvalloc.errors import KVAllocError, ProfileFileError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.saved_cache import SavedCacheHeader
from kvalloc.runtime.making import Way, build_rows
from kvalloc.runtime.options import CacheOptions

CONTEXT = 300
B16, B4 = "0.bits_16.", "0.bits_4."


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Models, and caches of every kind that they have filled."""
    found = {}
    folder = tmp_path_factory.mktemp("saved")
    for name, family, dtype, batch, options in (
        ("ragged", "llama", torch.float32, 1, {}),
        ("matched", "llama", torch.bfloat16, 1, AT_ONCE),
        ("even", "llama", torch.float32, 2, {}),
        ("whole", "llama", torch.float16, 1, {}),
        ("packed", "llama", torch.float32, 2, {}),
        ("mixed", "llama", torch.float32, 2, {}),
        ("padded", "llama", torch.float32, 2, {}),
        ("sliding", "gemma3", torch.float32, 1, {}),
    ):
        model = tiny.tiny_model(family, "sdpa", dtype)
        profile = tiny.make_profile(model, CONTEXT, 1.0 if name == "whole" else 0.6)
        if name not in ("even", "whole"):
            profile = tiny.by_head(profile, 70)
        if name == "packed":
            bits = np.full_like(profile.budgets, 8)
            bits[:, 1], bits[1], bits[2, 0] = 4, 3, 16
            profile = profile.replace(bits=bits)
        cache = build_rows(model, [Way(profile=profile, options=CacheOptions(**options))])
        mask = torch.ones(batch, CONTEXT, dtype=torch.long)
        mask[-1, :90] = name != "padded"
        with torch.no_grad():
            model(tiny.prompt(CONTEXT, batch), attention_mask=mask, past_key_values=cache)
            model(tiny.prompt(140 if name == "packed" else 3, batch), past_key_values=cache)
        if name == "mixed":
            cache.end_turn()
            with_widths(cache, 16, 8, 4)
        kvalloc.save_cache(cache, folder / name)
        found[name] = model, folder / name
    return found


def refusal(act):
    """The one line that refuses an act; None where it went through."""
    try:
        act()
    except KVAllocError as error:
        return error
    return None


def answers(model, path):
    """Logits after the cache of a file, with the kernel and without; None where it is refused."""
    caches = []
    logits = []

    def attend():
        for tokens in (1, 3):
            ids = tiny.prompt(tokens, caches[-1].batch, seed=5)
            logits.append(model(ids, past_key_values=caches[-1]).logits)

    unreadable = refusal(lambda: SavedCacheHeader.read(path))
    for way in (WITH, WITHOUT):
        refused = refusal(lambda: caches.append(kvalloc.load_cache(path, model)))
        assert isinstance(refused, ProfileFileError) == (unreadable is not None)
        if refused is None:
            with kernel_choice(way), torch.no_grad():
                refused = refusal(attend)  # more tokens than the model was made for
        if refused is not None:
            assert "\n" not in str(refused)
            assert unreadable is None or str(path) in str(refused)
            return None
        assert caches[-1].retained_bytes > 0
        assert caches[-1].kept_tokens.min() >= 0
    return logits


def same(found):
    """Whether both ways answer alike; not-a-number, which a file may hold, in the same places."""
    pairs = zip(found[:2], found[2:], strict=True)
    return all(torch.allclose(a, b, rtol=0.1, atol=0.1, equal_nan=True) for a, b in pairs)


# What a change of one place does not reach: numbers that fit each other


def cut(names, index):
    """Return a change that takes a part of several tensors."""

    def change(file):
        for name in names:
            dtype, raw = file.arrays[name]
            file.arrays[name] = dtype, np.ascontiguousarray(raw[index])

    return change


def numbers(name, change):
    """Return a change of the numbers of a tensor."""
    return lambda file: change(file.numbers(B16 + name))


def moved(lengths):
    lengths[0, :2] += (-1, 1)


def set_at(place, value):
    return lambda array: array.__setitem__(place, value)


def twice(positions):
    positions[1] = positions[0]


def many_rows(file):
    file.stated["batch"] = 2**40
    for name, (dtype, raw) in file.arrays.items():
        shape = (2**40, raw.shape[1], 0, *raw.shape[3:])
        file.arrays[name] = dtype, np.empty(shape, np.uint8)


def hidden_entry(file):
    file.numbers("visible")[0, int(file.numbers(B16 + "kept_positions")[0])] = 0


def more_seen(file):
    file.stated["seen_tokens"] += 1


def without(part):
    """Return a change that drops a part of a layer."""

    def change(file):
        for name in [name for name in file.arrays if name.startswith(part)]:
            del file.arrays[name]

    return change


def stating(**values):
    return lambda file: file.stated.update(values)


def longer(**changes):
    def change(file):
        own = BudgetProfile.from_record("", file.stated["profile"])
        file.stated["longer_profile"] = own.replace(**changes).record()

    return change


KEPT = (B16 + "kept_keys", B16 + "kept_values")
OLDER = ("0.keys", "0.values")


@pytest.mark.parametrize(
    ("kind", "change", "named"),
    [
        (
            "ragged",
            numbers("lengths", set_at(..., 50_000_000)),
            "0.bits_16.lengths is from 50000000 to 50000000, expected from 0 to 303",
        ),
        ("ragged", cut(KEPT, np.s_[:1]), "0.bits_16.kept_keys is float16 of 1 x 16"),
        ("ragged", numbers("lengths", moved), "0.bits_16.kept_positions"),
        (
            "ragged",
            numbers("kept_positions", set_at(-1, 2**31 - 1)),
            "0.bits_16.kept_positions is others, expected tokens that rise",
        ),
        (
            "ragged",
            cut((KEPT[0], OLDER[0]), np.s_[..., :-1, :]),
            "0.keys is float32 of 1 x 2 x 0 x 15",
        ),
        ("even", numbers("kept_positions", twice), "0.bits_16.kept_positions"),
        ("whole", many_rows, "ranked_tokens is 1, expected one for each of 1099511627776 rows"),
        ("packed", cut((B4 + "key_scales",), np.s_[:1]), "0.bits_4.key_scales is float16 of 1 x 2"),
        (
            "mixed",
            lambda file: set_at(0, 0)(file.numbers(B4 + "kept_positions")),
            "0.kept_positions is of a token at two widths, expected each at one",
        ),
        (
            "mixed",
            lambda file: set_at(np.s_[0, 0], -1)(file.numbers(B4 + "lengths")),
            "0.bits_4.lengths is from -1 to",
        ),
        ("packed", without(B4), "0.kept_positions is of no token in a head, expected some in each"),
        ("mixed", cut((B4 + "lengths",), np.s_[:, :1]), "0.bits_4.lengths is int64 of 2 x 1"),
        ("whole", cut(OLDER, np.s_[:, :, 1:]), "0.keys is of 302 tokens, expected all 303"),
        ("whole", more_seen, "0.keys is of 303 tokens, expected all 304"),
        ("padded", hidden_entry, "0.bits_16.kept_positions is others, expected tokens"),
        ("sliding", cut(OLDER, np.s_[:, :, 1:]), "0.keys is of 14 tokens, expected all 15"),
        ("ragged", stating(row_profiles=[]), "expected one for each of 1 rows"),
        ("ragged", longer(length_rule="fixed"), "longer_profile is of another kind"),
    ],
)
def test_what_would_be_read_beyond_its_end_is_refused(saved, tmp_path, kind, change, named):
    model, path = saved[kind]
    file = Tensors.parse(path.read_bytes())
    change(file)
    (tmp_path / "c.kv").write_bytes(file.signed().pack())
    with pytest.raises(ProfileFileError) as caught:
        kvalloc.load_cache(tmp_path / "c.kv", model)
    assert named in str(caught.value)
    assert "read the prompt again and save the cache again" in str(caught.value)
    ran = run_command("inspect", tmp_path / "c.kv")
    assert (ran.code, ran.out) == (2, "")
    assert named in ran.err
    assert ran.err.count("\n") == 1


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (numbers("kept_keys", lambda array: array.__iadd__(1)), "tensors"),
        (lambda file: file.stated["profile"]["budgets"].reverse(), "profile"),
        (more_seen, "digest of the content"),
    ],
)
def test_what_was_changed_and_not_signed_is_refused(saved, tmp_path, change, named):
    model, path = saved["ragged"]
    file = Tensors.parse(path.read_bytes())
    change(file)
    (tmp_path / "c.kv").write_bytes(file.pack())
    with pytest.raises(ProfileFileError, match=named):
        kvalloc.load_cache(tmp_path / "c.kv", model)


def test_a_model_whose_window_changed_since_is_refused(saved):
    _, path = saved["sliding"]
    other = tiny.tiny_model("gemma3", sliding_window=24)
    with pytest.raises(KVAllocError, match="other weights, adapters or config"):
        kvalloc.load_cache(path, other)
    with pytest.raises(KVAllocError, match="sliding_window 16.*sliding_window 24"):
        kvalloc.load_cache(path, other, allow_other_model=True)


# Made by chance


@pytest.mark.fuzz
def test_files_made_by_chance_are_refused_or_answer(saved, tmp_path, request):
    count, result = request.config.getoption("--hostile-files"), Counter()

    @by_chance(count)
    @given(st.data())
    def read(data):
        model, path = saved[data.draw(st.sampled_from(sorted(saved)))]
        file, noise = Tensors.parse(path.read_bytes()), False
        if data.draw(st.booleans()):
            file.stated = data.draw(changed_value(file.stated))
        else:
            noise = file.change(data.draw)  # so large that each way rounds them in its own
        content = file.signed().pack()
        if not data.draw(st.integers(0, 9)):
            content, noise = data.draw(changed_bytes(content)), True
        (tmp_path / "c.kv").write_bytes(content)
        logits = answers(model, tmp_path / "c.kv")
        result["refused" if logits is None else "read"] += 1
        assert logits is None or noise or same(logits)

    read()
    row = {"what": "saved cache", "figure": f"{result['refused']:,}", "read": f"{result['read']:,}"}
    print(f"\n{json.dumps(row)}")
    assert result["refused"] > count / 4
    assert result["read"] > count / 100


def test_infinity_in_a_note_does_no_harm(saved, tmp_path):
    file = Tensors.parse(saved["ragged"][1].read_bytes())
    for noted in (10**400, -1, math.pi, "x"):
        file.stated["notes"] = {"read_seconds": noted, "document": "a\x1b[31m"}
        (tmp_path / "c.kv").write_bytes(file.signed().pack())
        ran = run_command("inspect", tmp_path / "c.kv")
        assert ran.code == 0
        assert ("reading took" in ran.out) == (noted is math.pi)
        assert "\x1b" not in ran.out
