"""Saved caches that were made to do harm: digests have no key, so each is signed anew here.

Every case is either refused in one line that names the file, by `kvalloc inspect` as by loading, or
it answers: with the kernel as without it, whose operations check where they read. Under
AddressSanitizer (`make test-sanitized`) a kernel that reads elsewhere ends the process.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from cli_tools import run as run_command
from kernel_choice import WITH, WITHOUT, kernel_choice
from prompt_runs import AT_ONCE
from safetensors import safe_open
from safetensors.torch import save_file

import kvalloc
from kvalloc.errors import KVAllocError, ProfileFileError
from kvalloc.formats.record import digest_of
from kvalloc.formats.saved_cache import SavedCacheHeader, tensor_digest
from kvalloc.runtime.saving import stored

CONTEXT = 300
NUMBERS = (-(2**62), -(2**31), -1, 0, 1, 2, 3, 63, 64, 127, 128, 129, 50_000_000, 2**31, 2**62)
OTHERS = (None, "", "x", "whole", "ragged", "packed", [], {}, True, 0.5, 1e308, 10**400)
TYPES = ("float64", "float32", "float16", "bfloat16", "int64", "int32", "uint8")


@dataclass
class File:
    """A saved cache in parts."""

    header: dict[str, Any]
    tensors: dict[str, torch.Tensor]
    noise: bool = False  # numbers so large that each way rounds them in its own

    @classmethod
    def read(cls, path: Path) -> File:
        with safe_open(path, framework="pt") as file:
            header = json.loads(file.metadata()[SavedCacheHeader.METADATA])
            names = list(file.keys())
            return cls(header, {name: file.get_tensor(name).clone() for name in names})

    def write(self, path: Path) -> None:
        """With digests that are right."""
        tensors = {name: tensor.contiguous() for name, tensor in self.tensors.items()}
        header = {**self.header}
        if "tensor_digest" in header:
            header["tensor_digest"] = tensor_digest({n: stored(t) for n, t in tensors.items()})
        header.pop("digest", None)
        header["digest"] = digest_of(header)
        save_file(tensors, path, metadata={SavedCacheHeader.METADATA: json.dumps(header)})


@pytest.fixture(scope="module")
def saved(
    tiny: ModuleType, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Any, Path]]:
    """Models, and caches of every kind that they have filled."""
    found = {}
    folder = tmp_path_factory.mktemp("saved")
    for name, family, dtype, batch, options in (
        ("ragged", "llama", torch.float32, 1, {}),
        ("biased", "llama", torch.bfloat16, 1, AT_ONCE),
        ("even", "llama", torch.float32, 2, {}),
        ("whole", "llama", torch.float16, 1, {}),
        ("packed", "llama", torch.float32, 2, {}),
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
        cache = kvalloc.make_cache(model, profile, **options)
        mask = torch.ones(batch, CONTEXT, dtype=torch.long)
        mask[-1, :90] = name != "padded"
        with torch.no_grad():
            model(tiny.prompt(CONTEXT, batch), attention_mask=mask, past_key_values=cache)
            model(tiny.prompt(140 if name == "packed" else 3, batch), past_key_values=cache)
        cache.save(folder / name)
        found[name] = model, folder / name
    return found


def refusal(act: Callable[[], object]) -> KVAllocError | None:
    """The one line that refuses an act; None where it went through."""
    try:
        act()
    except KVAllocError as error:
        return error
    return None


def answers(tiny: ModuleType, model: Any, path: Path) -> list[torch.Tensor] | None:
    """Logits after the cache of a file, with the kernel and without; None where it is refused."""
    caches: list[Any] = []
    logits: list[torch.Tensor] = []

    def attend() -> None:
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


def same(found: list[torch.Tensor]) -> bool:
    """Whether both ways answer alike; not-a-number, which a file may hold, in the same places."""
    pairs = zip(found[:2], found[2:], strict=True)
    return all(torch.allclose(a, b, rtol=0.1, atol=0.1, equal_nan=True) for a, b in pairs)


Change = Callable[[Any], Any]
KEYS, VALUES = "0.bits_16.kept_keys", "0.bits_16.kept_values"
LENGTHS, POSITIONS = "0.bits_16.lengths", "0.bits_16.kept_positions"
KEYS_4, VALUES_4, SCALES_4 = "0.bits_4.kept_keys", "0.bits_4.kept_values", "0.bits_4.key_scales"
FOLLOWING = [f"{layer}.{name}" for layer in range(4) for name in ("keys", "values")]


def to(place: Any, value: int) -> Change:
    """Set one number of a tensor, or several."""

    def change(tensor: torch.Tensor) -> torch.Tensor:
        tensor[place] = value
        return tensor

    return change


def many_rows(own: Any) -> Any:
    return 2**40 if isinstance(own, int) else torch.empty(2**40, own.shape[1], 0, own.shape[3])


HARM: list[tuple[str, list[str], Change, str]] = [
    ("ragged", [LENGTHS], lambda own: own + torch.tensor([[1, 0]]), f"{KEYS} is float32 of"),
    ("ragged", [LENGTHS], to(..., 50_000_000), "is from 50000000 to 50000000, expected from 0 to"),
    ("ragged", [LENGTHS], lambda own: own[:, :1], "is int64 of 1 x 1, expected int64 of 1 x 2"),
    ("ragged", [KEYS, VALUES], lambda own: own[:0], "is float32 of 0 x 16"),
    ("ragged", [KEYS, VALUES], lambda own: own[:1], "is float32 of 1 x 16"),
    ("ragged", [LENGTHS], lambda own: own + torch.tensor([[-1, 1]]), POSITIONS),
    ("ragged", [POSITIONS], to(-1, 2**31 - 1), "is others, expected columns that rise"),
    ("ragged", ["0.keys", KEYS], lambda own: own[..., :-1], "is float32 of 1 x 2 x 3 x 15"),
    ("ragged", ["0.other"], lambda own: torch.zeros(1), "is there, expected no such tensor"),
    ("biased", ["0.bits_16.kept_bias"], lambda own: own[:1], "is float32 of 1"),
    ("even", [POSITIONS], to(1, 0), POSITIONS),
    ("even", ["0.values"], lambda own: own[:1], "is float32 of 1 x 2"),
    ("whole", ["batch", *FOLLOWING], many_rows, "is 1099511627776, expected an entry for each row"),
    ("whole", FOLLOWING[:2], lambda own: own[:, :, 1:], "is of 302 tokens, expected all 303"),
    ("whole", ["seen_tokens"], lambda own: own + 1, "0.keys is of 303 tokens, expected all 304"),
    ("packed", [SCALES_4], lambda own: None, "is missing"),
    ("packed", [SCALES_4], lambda own: own[:1], "is float16 of 1 x 2 x 16"),
    ("packed", [VALUES_4], lambda own: own[:, :-1], "is uint8 of"),
    ("packed", [KEYS_4], torch.Tensor.float, "is float32 of"),
    ("padded", ["visible"], lambda own: own[:, :-1], "is uint8 of 2 x 302, expected uint8 of 2 x"),
    ("padded", ["visible"], to((0, 0), 0), f"{POSITIONS} is those of padding"),
    ("sliding", FOLLOWING[:2], lambda own: own[:, :, 1:], "is of 14 tokens, expected all 15"),
]
"""A saved cache, what is changed of it, and what is said: of the first of these names, or all."""


@pytest.mark.parametrize(("kind", "names", "change", "said"), HARM)
def test_what_would_be_read_beyond_its_end_is_refused(
    tiny: ModuleType,
    saved: dict[str, tuple[Any, Path]],
    tmp_path: Path,
    kind: str,
    names: list[str],
    change: Change,
    said: str,
) -> None:
    """What would end the process, or answer with foreign memory."""
    model, path = saved[kind]
    file = File.read(path)
    for name in names:
        part = file.header if name in file.header else file.tensors
        part[name] = change(part.get(name))
        if part[name] is None:
            del part[name]
    file.write(tmp_path / "c.kv")
    said = f"{names[0]} {said}" if said.startswith("is ") else said
    with pytest.raises(ProfileFileError) as caught:
        kvalloc.load_cache(tmp_path / "c.kv", model)
    assert said in str(caught.value)
    assert "read the prompt again and save the cache again" in str(caught.value)
    ran = run_command("inspect", tmp_path / "c.kv")
    assert (ran.code, ran.out) == (2, "")
    assert said in ran.err
    assert ran.err.count("\n") == 1


def test_a_model_whose_window_changed_since_is_refused(
    saved: dict[str, tuple[Any, Path]], tiny: ModuleType
) -> None:
    _, path = saved["sliding"]
    other = tiny.tiny_model("gemma3", sliding_window=24)
    with pytest.raises(KVAllocError, match="sliding_window 16.*sliding_window 24"):
        kvalloc.load_cache(path, other)


# Made by chance


def _number(rng: random.Random, like: int) -> int:
    near = like + rng.choice((-64, -2, -1, 1, 2, 64))
    return rng.choice((*NUMBERS, near, near, near))


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where plain values are in a header."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value)
    for key, below in pairs:
        yield (*path, key)
        if isinstance(below, dict | list) and below:
            yield from _places(below, (*path, key))


def _change_header(file: File, rng: random.Random) -> None:
    top = rng.choice(sorted(file.header))
    places = [p for p in _places(file.header) if p[0] == top]
    *above, last = rng.choice(places)
    within: Any = file.header
    for key in above:
        within = within[key]
    old = within[last]
    numeric = isinstance(old, int) and not isinstance(old, bool)
    if rng.random() < 0.1:
        del within[last]
    elif numeric and rng.random() < 0.7:
        within[last] = _number(rng, old)
    else:
        within[last] = rng.choice((*NUMBERS, *OTHERS))
    profile = file.header.get("profile")
    if isinstance(profile, dict) and rng.random() < 0.9:  # else its own digest gives it away
        profile.pop("digest", None)
        profile["digest"] = digest_of(profile)


def _cut(tensor: torch.Tensor, rng: random.Random) -> torch.Tensor:
    if not tensor.ndim:
        return tensor
    axis = rng.randrange(tensor.ndim)
    size = tensor.shape[axis]
    wanted = rng.choice((0, 1, size - 1, size + 1, size + 7, size // 2, 2 * size))
    if wanted <= size:
        return tensor.narrow(axis, 0, max(wanted, 0))
    more = tensor.new_zeros([*tensor.shape[:axis], wanted - size, *tensor.shape[axis + 1 :]])
    return torch.cat([tensor, more], dim=axis)


def _change_tensor(file: File, rng: random.Random) -> None:
    name = rng.choice(sorted(file.tensors))
    tensor, other = file.tensors[name], rng.choice(sorted(file.tensors))
    act = rng.randrange(9)
    if act == 0:
        del file.tensors[name]
    elif act == 1:
        file.tensors[name], file.tensors[other] = file.tensors[other], tensor
    elif act == 2:
        file.tensors[rng.choice((other, name + "x", "0.bits_16.kept_bias", "visible"))] = (
            tensor.clone()
        )
    elif act == 3:
        file.tensors[name] = tensor.to(getattr(torch, rng.choice(TYPES)))
    elif act == 4:
        shape = list(tensor.shape)
        rng.shuffle(shape)
        file.tensors[name] = tensor.reshape(shape)
    elif act == 5 and tensor.numel():
        raw = tensor.contiguous().view(-1).view(torch.uint8)
        for _ in range(rng.choice((1, 8, raw.numel()))):
            raw[rng.randrange(raw.numel())] = rng.randrange(256)
        file.tensors[name] = raw.view(tensor.dtype).view(tensor.shape)
        file.noise = True
    elif act == 6 and tensor.numel() and not tensor.is_floating_point():
        flat, info = tensor.view(-1), torch.iinfo(tensor.dtype)
        place = rng.randrange(flat.numel())
        number = _number(rng, int(flat[place]))
        flat[place] = min(max(number, info.min), info.max)
    elif act == 7:
        group = name.rsplit(".", 1)[0]
        for own in [one for one in file.tensors if one.rsplit(".", 1)[0] == group]:
            file.tensors[own] = file.tensors[own][:-1] if file.tensors[own].ndim else tensor
    else:
        file.tensors[name] = _cut(tensor, rng)


@pytest.mark.fuzz
def test_files_made_by_chance_are_refused_or_answer(
    tiny: ModuleType,
    saved: dict[str, tuple[Any, Path]],
    tmp_path: Path,
    request: pytest.FixtureRequest,
) -> None:
    count, refused, answered = request.config.getoption("--hostile-files"), 0, 0
    for case in range(count):
        rng = random.Random(case)
        model, path = saved[rng.choice(sorted(saved))]
        file, changed = File.read(path), tmp_path / "c.kv"
        for _ in range(rng.choice((1, 1, 1, 2, 3))):
            try:
                rng.choice((_change_header, _change_tensor, _change_tensor))(file, rng)
            except (KeyError, IndexError, ValueError, TypeError):
                break  # an earlier change has left nothing to change in this way
        try:
            file.write(changed)
        except ValueError:  # no file can hold it
            continue
        if rng.random() < 0.1:
            raw = bytearray(changed.read_bytes())
            place = rng.randrange(min(len(raw), 2000) if rng.random() < 0.7 else len(raw))
            raw[place] = rng.randrange(256)
            changed.write_bytes(raw[: None if rng.random() < 0.5 else rng.randrange(len(raw))])
        found = answers(tiny, model, changed)
        refused += found is None
        answered += found is not None
        assert found is None or file.noise or same(found), f"case {case}"
    if count >= 1000:
        print(f"{count} files made by chance: {refused} refused, {answered} answered")
    assert refused > count / 2
    assert answered > count / 100


def test_infinity_in_a_note_does_no_harm(
    saved: dict[str, tuple[Any, Path]], tmp_path: Path
) -> None:
    file = File.read(saved["ragged"][1])
    for noted in (10**400, -1, math.pi, "x"):
        file.header["notes"] = {"read_seconds": noted, "document": "a\x1b[31m"}
        file.write(tmp_path / "c.kv")
        ran = run_command("inspect", tmp_path / "c.kv")
        assert ran.code == 0
        assert ("reading took" in ran.out) == (noted is math.pi)
        assert "\x1b" not in ran.out
