"""Files made to do harm, by seed: what may be done to a sound file, and what may come of it.

An execution takes a sound file of one kind, changes it, and gives it to what reads such files. It
is refused in one line by an error of kvalloc, or it is read, and then used; anything else is a
crash: another error, a process that ends, too much memory or time, a file that is opened outside
the folder, a program or a connection that is begun. Digests have no key, so most changed files are
signed again: what would stop at the digest shall be looked at by all that comes after it.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import sys
import sysconfig
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

os.environ["HF_HUB_OFFLINE"] = "1"  # before a client of the hub is imported

import kvalloc
from kvalloc.errors import KVAllocError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.evaluation import Evaluation
from kvalloc.formats.merging import merge
from kvalloc.formats.record import ArrayRecord, FileRecord, digest_of, digest_over, kind_of
from kvalloc.formats.saved_cache import SavedCacheHeader, StoredTensor, tensor_digest
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.surrogate import FittedSurrogate, SurrogatePart

MOST_SECONDS, MOST_WAITING = 20.0, 900.0
"""Of one execution: processor time, and by the clock; the machine may have other work."""

MOST_BYTES = 2**30
"""What an execution may take beyond what the process has."""

NUMBERS: tuple[Any, ...] = (
    *(-(2**63), -(2**31), -2, -1, 0, 1, 2, 3, 7, 8, 16, 2**15, 2**31 - 1, 2**31, 2**53, 2**62),
    *(2**63, 2**64, 10**30, 10**400, 0.0, -0.0, 0.5, 1e-320, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
STRINGS = (
    *(
        "",
        " ",
        "x",
        "demo",
        "full",
        "sliding",
        "layer",
        "head",
        "xkv",
        "score",
        "cache",
        "x" * 5000,
    ),
    *(
        "../../../etc/passwd",
        "/etc/passwd",
        "a/../../b",
        "nul\0byte",
        "~root",
        "C:\\x",
        "-o",
        "..",
        ".",
    ),
    *(
        "hf://owner/repo/../../x",
        "http://127.0.0.1:9/x",
        "file:///etc/passwd",
        "%s%n",
        "{0}",
        "{x.y}",
    ),
    *("\ud800", "\udfff\ud800", "\u202e", "\x1b[2J", "\r\n", "</script><script>alert(1)</script>"),
    *(
        "__import__('os').system('touch PWNED')",
        "cos\nsystem\n(S'touch PWNED'\ntR.",
        "!!python/none",
    ),
    *("streaming:window=-1", "surrogate:file=/etc/passwd", "NaN", "1e999", "9" * 5000),
)
BYTES = (
    b"",
    b"\0",
    b"\xff" * 8,
    b"{",
    b"[" * 3000,
    b"GGUF",
    b"PK\x03\x04",
    b"\x80\x04.",
    b"\xef\xbb\xbf",
)
TYPES = ("F64", "F32", "F16", "BF16", "I64", "I32", "U8", "BOOL", "F8_E4M3", "X")


class Crash(Exception):
    """What an execution must never come to."""


class _TooLong(BaseException):
    """An execution has taken `MOST_SECONDS`."""


Reader = Callable[[Path], object]


@dataclass(frozen=True, kw_only=True)
class Kind:
    """One kind of file.

    Attributes
    ----------
    files : tuple of Path
        Sound ones.
    read : callable
        Reads a file, and uses what it holds.
    change : tuple of callable
        ``change(content, rng)``: changed bytes.
    weight : float
        How often it is taken.
    """

    files: tuple[Path, ...]
    read: Reader
    change: tuple[Callable[[bytes, random.Random], bytes], ...]
    weight: float = 1.0


@dataclass
class Outcomes:
    """What came of so many executions."""

    by_kind: Counter[tuple[str, str]] = field(default_factory=Counter)
    crashes: list[str] = field(default_factory=list)

    def add(self, other: Outcomes) -> None:
        """Both together."""
        self.by_kind += other.by_kind
        self.crashes += other.crashes


# Changes of bytes and of JSON


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flipped, cut, doubled, overwritten."""
    raw = bytearray(content)
    for _ in range(rng.choice((1, 1, 2, 8))):
        place = (
            rng.randrange(len(raw) + 1)
            if rng.random() < 0.5
            else rng.randrange(min(len(raw), 300) + 1)
        )
        act = rng.randrange(6)
        if act == 0 and place < len(raw):
            raw[place] ^= 1 << rng.randrange(8)
        elif act == 1:
            del raw[place:]
        elif act == 2:
            end = min(len(raw), place + rng.choice((1, 8, 64, 1000)))
            raw[place:place] = raw[place:end]
        elif act == 3:
            del raw[place : place + rng.choice((1, 7, 8, 100))]
        elif act == 4:
            raw[place:place] = rng.choice(BYTES)
        else:
            number = rng.choice((0, 1, 2**20, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1, len(raw)))
            raw[place : place + 8] = struct.pack("<Q", number)
    return bytes(raw)


def changed_value(value: Any, rng: random.Random, depth: int = 0) -> Any:
    """A plain value with something else in one place of it."""
    if isinstance(value, dict | list) and value and rng.random() < 0.9:
        keys: Any = list(value) if isinstance(value, dict) else range(len(value))
        key, changed = rng.choice(keys), value.copy()
        act = rng.random()
        if act < 0.08:
            del changed[key]
        elif act < 0.13 and isinstance(value, dict):
            changed[rng.choice((*STRINGS, *keys))] = changed[key]
        elif act < 0.16 and isinstance(value, list):
            changed[:] = changed * rng.choice((0, 2, 3))
        else:
            changed[key] = changed_value(value[key], rng, depth + 1)
        return changed
    act = rng.random()
    if isinstance(value, int | float) and not isinstance(value, bool) and act < 0.6:
        return rng.choice((*NUMBERS, value + 1, value - 1, -value, value * 2, str(value)))
    if act < 0.7:
        return rng.choice(NUMBERS)
    if act < 0.9:
        return rng.choice(STRINGS)
    if act < 0.93:
        nested: Any = 0
        for _ in range(rng.choice((5, 100, 900))):
            nested = [nested] if rng.random() < 0.5 else {"a": nested}
        return nested
    return rng.choice((None, True, False, [], {}, [[]], {"": None}, [value] * 50))


def as_json(value: Any, rng: random.Random) -> bytes:
    """JSON of a value, now and then with a key twice, or deeper than any reader goes."""
    text = json.dumps(value)
    if rng.random() < 0.03 and isinstance(value, dict) and value:
        key = rng.choice(sorted(map(str, value)))
        twice = {key: rng.choice((*NUMBERS[:10], *STRINGS[:4]))}
        text = f"{text[:-1]}, {json.dumps(twice)[1:]}"
    if rng.random() < 0.02:
        text = text.replace("0", "[" * rng.choice((200, 100_000)), 1)
    return text.encode()


def _several(value: Any, rng: random.Random) -> Any:
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        value = changed_value(value, rng)
    return value


def _signed(content: Any, sign: Callable[[dict[str, Any]], str], rng: random.Random) -> Any:
    if isinstance(content, dict) and rng.random() < 0.95:
        content = {key: one for key, one in content.items() if key != "digest"}
        with suppress(ValueError, TypeError):  # what no digest is of
            content["digest"] = sign(content)
    return content


def changed_record(content: bytes, rng: random.Random) -> bytes:
    """A JSON file of ours with other values, signed again."""
    return as_json(_signed(_several(json.loads(content), rng), digest_of, rng), rng)


def changed_request(content: bytes, rng: random.Random) -> bytes:
    """A budget profile that says otherwise what was asked for."""
    from kvalloc.allocation.request import TARGETS, RequestOptions

    stated = json.loads(content)
    asked = stated["requested"]
    for _ in range(rng.choice((1, 1, 2, 3))):
        name = rng.choice((*RequestOptions.__annotations__, "target", "value", "bytes"))
        asked[name] = changed_value(asked.get(name), rng)
    if rng.random() < 0.3:
        asked["target"] = rng.choice([kind.kind for kind in TARGETS])
    return as_json(_signed(stated, digest_of, rng), rng)


def changed_json(content: bytes, rng: random.Random) -> bytes:
    """Any JSON with other values."""
    return as_json(_several(json.loads(content), rng), rng)


def changed_lines(content: bytes, rng: random.Random) -> bytes:
    """JSON lines with other values in one."""
    lines = content.splitlines()
    place = rng.randrange(len(lines))
    lines[place] = changed_json(lines[place], rng)
    return rng.choice((b"\n", b"\n", b"\r\n", b"\n\n")).join(lines)


# Safetensors


def split_tensors(content: bytes) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a safetensors file."""
    size = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + size]), content[8 + size :]


def joined_tensors(header: Any, data: bytes, rng: random.Random) -> bytes:
    """A safetensors file, now and then with a wrong length of its header."""
    text = as_json(header, rng)
    size = (
        len(text)
        if rng.random() < 0.97
        else rng.choice((0, len(text) + 1, 2**27, 2**40, 2**64 - 1))
    )
    return size.to_bytes(8, "little") + text + data


def changed_header(content: bytes, rng: random.Random) -> bytes:
    """Another shape, type or place of a tensor."""
    header, data = split_tensors(content)
    return joined_tensors(_several(header, rng), data, rng)


def arrays_of(header: dict[str, Any], data: bytes) -> dict[str, StoredTensor]:
    """The tensors of a sound file."""
    names = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
    names |= {"I64": "int64", "I32": "int32", "U8": "uint8"}
    return {
        name: StoredTensor(
            dtype=names[one["dtype"]],
            shape=tuple(one["shape"]),
            data=np.frombuffer(data[slice(*one["data_offsets"])], np.uint8),
        )
        for name, one in header.items()
        if name != "__metadata__"
    }


def changer_of_tensors(
    metadata: str, sign: Callable[[dict[str, Any], dict[str, StoredTensor]], dict[str, Any]]
) -> Callable[[bytes, random.Random], bytes]:
    """Changes what a file's own header says, or numbers of a tensor, or leaves one out.

    Parameters
    ----------
    metadata : str
        Where the file's own header is.
    sign : callable
        Gives the header with its digest.
    """

    def change(content: bytes, rng: random.Random) -> bytes:
        header, data = split_tensors(content)
        raw, names = bytearray(data), [name for name in header if name != "__metadata__"]
        stated = json.loads(header["__metadata__"][metadata])
        for _ in range(rng.choice((1, 1, 2))):
            act, name = rng.random(), rng.choice(names)
            start, end = header[name]["data_offsets"]
            if act < 0.45:
                stated = changed_value(stated, rng)
            elif act < 0.8 and end > start:
                size = 8 if header[name]["dtype"] in ("F64", "I64") else 1
                place = start + size * rng.randrange(max(1, (end - start) // size))
                number = rng.choice((*NUMBERS[:16], rng.randrange(300)))
                packed = struct.pack("<q", number)
                if header[name]["dtype"] == "F64" and rng.random() < 0.8:
                    packed = struct.pack(
                        "<d", rng.choice((np.nan, np.inf, -np.inf, 1e308, -1.0, 2.0, 0.0))
                    )
                raw[place : place + size] = packed[:size]
            elif act < 0.9:
                header[rng.choice((name + "x", "..", "../x", "kind"))] = header.pop(name)
                names = [one for one in header if one != "__metadata__"]
            elif header[name]["shape"]:
                shape = (
                    [*header[name]["shape"], 1]
                    if rng.random() < 0.5
                    else header[name]["shape"][::-1]
                )
                header[name] = {**header[name], "shape": shape}
        try:
            if isinstance(stated, dict) and rng.random() < 0.95:
                stated = sign(stated, arrays_of(header, bytes(raw)))
        except (ValueError, TypeError, KeyError, AttributeError):
            pass  # no digest is of that
        header["__metadata__"] = {**header["__metadata__"], metadata: json.dumps(stated)}
        return joined_tensors(header, bytes(raw), rng)

    return change


def sign_record(header: dict[str, Any], tensors: dict[str, StoredTensor]) -> dict[str, Any]:
    """The digest of a score profile or surrogate, whose arrays come in the order of its fields."""
    content = {name: one for name, one in header.items() if name != "digest"}
    kinds = (ScoreProfile, FittedSurrogate, SurrogatePart)
    fields = dict.fromkeys(name for kind in kinds for name in kind.model_fields)
    found = {name: tensors[name].numbers() for name in fields if name in tensors}
    return {**content, "digest": digest_over(json.dumps(content, sort_keys=True), found)}


def sign_cache(header: dict[str, Any], tensors: dict[str, StoredTensor]) -> dict[str, Any]:
    """Both digests of a saved cache, and that of the profile in it."""
    content = {name: one for name, one in header.items() if name != "digest"}
    content["tensor_digest"] = tensor_digest(tensors)
    profile = content.get("profile")
    if isinstance(profile, dict):
        profile = {name: one for name, one in profile.items() if name != "digest"}
        content["profile"] = {**profile, "digest": digest_of(profile)}
    return {**content, "digest": digest_of(content)}


# What is done with a file


def _use(record: FileRecord, path: Path) -> None:
    """Whatever may be done with a sound record: nothing of it raises."""
    assert repr(record)
    assert record.digest
    again = path.with_name("again")
    record.save(again)  # type: ignore[attr-defined]
    assert type(record).load(again) == record  # type: ignore[attr-defined]
    again.unlink()


def read_budgets(path: Path) -> object:
    """A budget profile, and what it keeps of prompts of any length."""
    profile = BudgetProfile.load(path)
    _use(profile, path)
    for tokens in (1, profile.context_tokens, 2 * profile.context_tokens + 1):
        if tokens < 2**31:
            with _refusable():
                profile.budgets_for(tokens)
                profile.retained_bytes_at(tokens)
    return profile


def read_scores(path: Path) -> object:
    """A score profile, and what is decided from it."""
    scores = ScoreProfile.load(path)
    _use(scores, path)
    from kvalloc.allocation.decision import solve

    with _refusable():
        solve(scores, budget="50%", solver="greedy")
    return scores


def merger(other: Path, merge: Callable[..., object], kind: type[ArrayRecord]) -> Reader:
    """What puts a part of a measurement and another one together."""

    def read(path: Path) -> object:
        output = path.with_name("merged")
        try:
            merge([path, other], output)
            return kind.load(output)
        finally:
            output.unlink(missing_ok=True)

    return read


def read_surrogate(path: Path) -> object:
    """A surrogate, and the scorer that it makes."""
    found = FittedSurrogate.load(path)
    _use(found, path)
    return found


def read_evaluation(path: Path) -> object:
    """An evaluation."""
    found = Evaluation.load(path)
    _use(found, path)
    return found


def read_cache(path: Path) -> object:
    """A saved cache as far as it is read without a model."""
    return SavedCacheHeader.read(path)


COMMANDS: dict[str, tuple[str, ...]] = {
    "budget profile": (
        *("verify {} {scores}", "verify {} {scores}", "diff {} {budgets}", "diff {budgets} {}"),
        *("report {} {scores} -o {out}.html", "plot {} -o {out}.svg", "inspect {} --json"),
        *("export {} --to csv -o {out}", "export {}", "export {} --to vllm -o {out}"),
        "compare {} --budget 50%",
    ),
    "score profile": (
        *("verify {budgets} {}", "solve {} --budget 50% -o {out}", "report {} -o {out}.html"),
        *("solve {} --target-retention 0.9 --json", "compare {} --budget 50%", "frontier {}"),
        *("plot {} -o {out}.svg", "export {} --to csv -o {out}", "merge {} {scores} -o {out}"),
    ),
    "evaluation": ("report {} -o {out}.html", "plot {} -o {out}.svg", "inspect {} --json"),
    "surrogate": ("merge {} -o {out}", "solve {} --budget 50% -o {out}"),
}
"""What commands do with a file that says it is of a kind, beside ``inspect``."""


def read_any(path: Path) -> object:
    """A file by what it says it is, as a command reads it."""
    from cli_tools import run

    kind, out = kind_of(path), path.with_name("out")
    choices = ("inspect {}", *COMMANDS.get(kind, ("verify {} {scores}",)))
    chosen = random.Random(path.read_bytes()).choice(choices)
    try:
        ran = run(*chosen.format(path, out=out, **PARTNERS).split())
    finally:
        for file in (out, *(out.with_suffix(one) for one in (".html", ".svg"))):
            file.unlink(missing_ok=True)
    assert ran.code in (0, 2) or (ran.code == 1 and chosen.startswith(("verify", "diff"))), ran
    if ran.code == 2:
        assert ran.err.count("\n") == 1, ran.err
        assert "Traceback" not in ran.err
        raise KVAllocError(ran.err)
    assert "\x1b" not in ran.out + ran.err
    return ran


PARTNERS: dict[str, Path] = {}
"""Sound files that commands read beside the changed one."""


def read_lines(path: Path) -> object:
    """Prompts, for profiling and for an evaluation, or as running text."""
    from kvalloc.prompts.tasks.longbench import read_records
    from kvalloc.prompts.texts import read_prompts, read_texts

    found: list[object] = []
    refused: list[KVAllocError] = []
    readers: tuple[Reader, ...] = (read_prompts, read_records, lambda one: read_texts([one]))
    for read in readers:
        try:
            found.append(read(path))
        except KVAllocError as error:
            refused.append(error)
    if refused and not found:
        raise refused[0]
    return found


def read_weights(path: Path) -> object:
    """What layers weigh."""
    from kvalloc.allocation import request

    return request.read_weights(path)


def read_partial(path: Path) -> object:
    """The folder of a killed job whose manifest or piece is the file."""
    from kvalloc.measure.checkpoint import Checkpoint, checkpoint_folder

    output = path.with_name("of.safetensors")
    folder = checkpoint_folder(output)
    folder.mkdir(exist_ok=True)
    content = path.read_bytes()
    manifest, piece = (PARTIAL[0], content) if content[8:9] == b"{" else (content, PARTIAL[1])
    (folder / "manifest.json").write_bytes(manifest)
    (folder / "piece.safetensors").write_bytes(piece)
    try:
        with Checkpoint(output, JOB, resume=True) as kept:
            assert (folder / "piece.safetensors").exists()
            found = kept.load("piece", {"losses": (3,)})
            assert found is None or np.array_equal(found[0]["losses"], LOSSES)
        return found
    finally:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


JOB = {"scorer": "xkv", "context_tokens": 40, "versions": {"torch": "2"}}
LOSSES = np.array([0.5, 0.25, 0.0])
PARTIAL: list[bytes] = []
"""A sound manifest and a sound piece."""


def importer(name: str, like: BudgetProfile) -> Reader:
    """What reads budgets of another engine's file."""
    from kvalloc.interop.exporting import TARGETS

    target = TARGETS[name]

    def read(path: Path) -> object:
        if target.suffix:
            return target.read(path, like)
        folder = path.with_name("folder")  # DuoAttention's has two files
        folder.mkdir(exist_ok=True)
        own = b"{" not in path.read_bytes()[:20]
        (folder / "full_attention_heads.tsv").write_bytes(
            path.read_bytes() if own else b"1\t1\n" * 3
        )
        (folder / "config.json").write_bytes(
            b'{"sink_size": 2, "recent_size": 3}' if own else path.read_bytes()
        )
        return target.read(folder, like)

    return read


def read_model(path: Path) -> object:
    """A model's folder whose config, tokenizer or index is the file."""
    import shutil

    from kvalloc.models.loading import load_model, shape_of

    folder = path.with_name("model")
    folder.mkdir()
    for name, content in MODEL.items():
        (folder / name).write_bytes(content)
    try:
        content = path.read_bytes()
        (folder / content.split(b"\n", 1)[0].decode()).write_bytes(content.split(b"\n", 1)[1])
        return shape_of(load_model(folder).model)
    finally:
        shutil.rmtree(folder)


MODEL: dict[str, bytes] = {}
"""The files of a sound model's folder."""


def changed_model_file(content: bytes, rng: random.Random) -> bytes:
    """The first line is the file's name and stays."""
    name, _, rest = content.partition(b"\n")
    change = changed_json if name.endswith(b".json") and rng.random() < 0.8 else changed_bytes
    return name + b"\n" + change(rest, rng)


def read_gguf(path: Path) -> object:
    """A GGUF file, unpacked."""
    import shutil

    from kvalloc.models.loading import load_model, shape_of

    os.environ["KVALLOC_CACHE"] = str(path.with_name("cache"))
    file = path.with_suffix(".gguf")
    path.rename(file)
    try:
        return shape_of(load_model(file).model)
    finally:
        file.unlink()
        shutil.rmtree(path.with_name("cache"), ignore_errors=True)


def read_name(path: Path) -> object:
    """The file holds a name: of a file, of a shipped profile, or of one on the hub."""
    from kvalloc.formats.reading import load_file
    from kvalloc.formats.shipped_profiles import load_profile, load_scores, load_surrogate

    name = path.read_bytes().decode("utf-8", "surrogatepass")
    os.chdir(path.parent)
    GUARD.named = f"{os.path.abspath(name.partition(chr(0))[0])}/"  # what a user names may be read
    refused = None
    for read in (load_profile, load_scores, load_surrogate, load_file):
        try:
            return read(name)
        except KVAllocError as error:
            refused = error
    assert refused is not None
    raise refused


def changed_name(content: bytes, rng: random.Random) -> bytes:
    """Another name."""
    if rng.random() < 0.5:
        name = rng.choice(STRINGS) + rng.choice(("", content.decode(), "/p.json", ".json"))
        return name.encode("utf-8", "surrogatepass")
    changed = changed_bytes(content, rng)
    return changed.decode("utf-8", "replace").encode()


@contextmanager
def _refusable() -> Iterator[None]:
    """What may be refused for a file that is sound."""
    with suppress(KVAllocError):
        yield


# Sound files of every kind


def make_kinds(folder: Path, *, models: bool) -> dict[str, Kind]:
    """Write sound files, and say what is done with each kind.

    Parameters
    ----------
    folder : Path
    models : bool
        Whether models are read, too, which takes a hundred times as long.
    """
    from factories import (
        make_bits,
        make_budget_profile,
        make_evaluation,
        make_losses,
        make_row,
        make_scores,
        make_shape,
        make_shared_scores,
    )

    from kvalloc.allocation.decision import solve
    from kvalloc.interop.exporting import TARGETS, ExportTarget
    from kvalloc.measure.checkpoint import Checkpoint, checkpoint_folder

    def saved(name: str, *records: Any) -> tuple[Path, ...]:
        paths = tuple(folder / f"{name}-{place}" for place in range(len(records)))
        for path, record in zip(paths, records, strict=True):
            if isinstance(record, bytes):
                path.write_bytes(record)
            else:
                record.save(path)
        return paths

    scores = make_scores(context_tokens=24, sinks=2, window=3)
    parts = [
        scores.replace(
            **{
                name: getattr(scores, name)[[place]]
                for name in ("curves", "masses", "sample_tokens")
            },
            shards=np.eye(2, dtype=np.int64)[place],
            sample_places=np.array([place]),
        )
        for place in range(2)
    ]
    other = saved("other", parts[1])[0]
    GUARD.shared = (f"{other.resolve()}/",)  # outside of the folder that is guarded
    budgets = solve(scores, budget="50%", solver="greedy")
    surrogate = FittedSurrogate(
        shape=make_shape(),
        target="reconstruction",
        target_parameters={"chunk": 64},
        context_tokens=60,
        samples=2,
        sinks=2,
        ridge=1e-3,
        weights=np.random.default_rng(0).normal(size=(3, 2, 9)),
        r_squared=np.full(3, 0.5),
        rank_correlation=np.full(3, 0.7),
        text_digest="0" * 64,
        text_description="made up",
        versions={"numpy": "test"},
        created="2024-01-01",
    )
    arrays = (changer_of_tensors("kvalloc", sign_record), changed_header, changed_bytes)
    record = (changed_record, changed_record, changed_bytes)
    lines = (
        b'{"prompt": "a b c", "answer": "d", "task": "t"}\n{"text": "e f"}\n',
        b'{"context": "a b", "input": "c?", "answers": ["d"], "all_classes": ["x"]}',
        b'{"messages": [{"role": "user", "content": "hi"}], "question_after": "?", "answer": "x"}',
    )
    with Checkpoint(folder / "of.safetensors", JOB, resume=False) as kept:
        kept.save("piece", {"losses": LOSSES}, {"stages": [1, 2]})
    partial = checkpoint_folder(folder / "of.safetensors")
    PARTIAL[:] = [(partial / name).read_bytes() for name in ("manifest.json", "piece.safetensors")]
    kinds = {
        "score profile": Kind(
            files=saved("scores", scores, make_losses(), make_bits(), make_shared_scores()),
            read=read_scores,
            change=arrays,
        ),
        "part of a measurement": Kind(
            files=saved("part", parts[0]), read=merger(other, merge, ScoreProfile), change=arrays
        ),
        "budget profile": Kind(
            files=saved("budgets", budgets, make_budget_profile([[10, 17]])),
            read=read_budgets,
            change=record,
        ),
        "surrogate": Kind(files=saved("surrogate", surrogate), read=read_surrogate, change=arrays),
        "evaluation": Kind(
            files=saved("evaluation", make_evaluation(make_row("full"), make_row())),
            read=read_evaluation,
            change=record,
        ),
        "prompts": Kind(
            files=saved("lines", *lines), read=read_lines, change=(changed_lines, changed_bytes)
        ),
        "weights": Kind(
            files=saved("weights", b"[1, 0.5, 2]", b"[[1, 2], [3, 4]]"),
            read=read_weights,
            change=(changed_json, changed_bytes),
        ),
        "partial": Kind(
            files=saved("partial", *PARTIAL),
            read=read_partial,
            change=(_changed_partial, changed_bytes),
        ),
        "name": Kind(
            files=saved(
                "name", b"smollm2-135m-instruct-bits-20", b"hf://owner/repo/p.json", b"p.json"
            ),
            read=read_name,
            change=(changed_name,),
            weight=0.3,
        ),
    }
    for name, target in TARGETS.items():
        if type(target).read is ExportTarget.read:
            continue  # such files say too little to be read back
        out = folder / f"export-{name}"
        target.write(budgets, out)
        files = tuple(sorted(out.iterdir())) if out.is_dir() else (out,)
        read = importer(name, budgets)
        change = (changed_json, changed_bytes) if name == "openvino" else (changed_bytes,)
        kinds[f"export to {name}"] = Kind(files=files, read=read, change=change, weight=0.2)
    every = (*("score profile", "budget profile", "surrogate", "evaluation"),)
    files = tuple(path for kind in every for path in kinds[kind].files)
    PARTNERS.update(
        scores=kinds["score profile"].files[0], budgets=kinds["budget profile"].files[0]
    )
    GUARD.shared += tuple(f"{path.resolve()}/" for path in PARTNERS.values())
    asked = (
        {"budget": "50%", "cap": "0-1=1KiB", "max_tokens": 20, "min_tokens": 6},
        {"target_retention": 0.9, "level": "head", "equal_heads": True},
        {"memory": "1500", "weights": [1, 2, 3], "workloads": "mean", "max_distinct": 2},
        {"budget_tokens": 12, "workloads": "cvar", "tail": 0.5},
    )
    decided = [solve(scores, **one) for one in asked]  # type: ignore[arg-type]
    decided += [solve(make_losses(), target_loss=0.5), solve(make_bits(), budget="30%", bits="8,4")]
    kinds["what was asked for"] = Kind(
        files=saved("asked", *decided), read=read_any, change=(changed_request,), weight=0.2
    )
    kinds["any, by a command"] = Kind(
        files=files, read=read_any, change=(_changed_any,), weight=0.1
    )
    if models:
        kinds |= _model_kinds(folder, saved)
    return kinds


def _changed_any(content: bytes, rng: random.Random) -> bytes:
    change = changed_record if content[:1] == b"{" else changer_of_tensors("kvalloc", sign_record)
    return change(content, rng)


def _changed_partial(content: bytes, rng: random.Random) -> bytes:
    if content[:1] == b"{":
        return changed_json(content, rng)
    header, data = split_tensors(content)
    return joined_tensors(_several(header, rng), data, rng)


def _model_kinds(folder: Path, saved: Callable[..., tuple[Path, ...]]) -> dict[str, Kind]:
    """Saved caches, model folders and GGUF files: what torch reads."""
    import torch
    from cli_tools import save_tiny_model
    from tiny_models import WordTokenizer, equal_budgets, tiny_model, words

    from kvalloc.measure.scorer_fitting import fit_scorer, merge_surrogates

    model = tiny_model()
    caches = []
    for place, bits in enumerate((None, 4)):
        profile = equal_budgets(model, 12)
        if bits:
            profile = profile.replace(level="head", bits=np.full_like(profile.budgets, bits))
        cache = kvalloc.make_cache(model, profile)
        with torch.no_grad():
            model(torch.arange(40)[None], past_key_values=cache)
        cache.save(folder / f"cache-{place}")
        caches.append(folder / f"cache-{place}")
    change = (changer_of_tensors("kvalloc_cache", sign_cache), changed_header, changed_bytes)
    sound = save_tiny_model(folder / "sound", model)
    MODEL.update({file.name: file.read_bytes() for file in sound.iterdir()})
    files = [
        f"{name}\n".encode() + content
        for name, content in sorted(MODEL.items())
        if name.endswith(".json") and name != "generation_config.json"
    ]
    index = {
        "metadata": {},
        "weight_map": {name: "model.safetensors" for name, _ in model.named_parameters()},
    }
    files.append(b"model.safetensors.index.json\n" + json.dumps(index).encode())
    fit = [
        fit_scorer(model, WordTokenizer(), [words(200)], context=30, samples=4, shard=shard)
        for shard in ("1/2", "2/2")
    ]
    own, other = saved("fit", *fit)
    GUARD.shared += (f"{other.resolve()}/",)
    return {
        "part of a surrogate": Kind(
            files=(own,),
            read=merger(other, merge_surrogates, FittedSurrogate),
            change=(changer_of_tensors("kvalloc", sign_record), changed_header, changed_bytes),
            weight=0.3,
        ),
        "saved cache": Kind(files=tuple(caches), read=read_cache, change=change),
        "model folder": Kind(
            files=saved("model", *files), read=read_model, change=(changed_model_file,), weight=0.01
        ),
        "GGUF": Kind(
            files=saved("gguf", tiny_gguf(folder)),
            read=read_gguf,
            change=(changed_bytes,),
            weight=0.01,
        ),
    }


def tiny_gguf(folder: Path) -> bytes:
    """A llama of one layer in GGUF's form."""
    import gguf

    file = folder / "tiny.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    hidden, words = 32, ["<unk>", "<s>", "</s>", *map(chr, range(97, 123)), "ab", "cd", "ef"]
    writer.add_context_length(64)
    writer.add_embedding_length(hidden)
    writer.add_block_count(1)
    writer.add_feed_forward_length(hidden)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_dimension_count(8)
    writer.add_vocab_size(len(words))
    writer.add_tokenizer_model("llama")
    writer.add_token_list(words)
    writer.add_token_scores([0.0] * len(words))
    writer.add_token_types([2, 3, 3, *[1] * (len(words) - 3)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    rng = np.random.default_rng(0)
    shapes = {
        "token_embd": (len(words), hidden),
        "output_norm": (hidden,),
        "output": (len(words), hidden),
        **{f"blk.0.{name}_norm": (hidden,) for name in ("attn", "ffn")},
        **{f"blk.0.attn_{name}": (hidden, hidden) for name in ("q", "output")},
        **{f"blk.0.attn_{name}": (hidden // 2, hidden) for name in ("k", "v")},
        **{f"blk.0.ffn_{name}": (hidden, hidden) for name in ("gate", "up", "down")},
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", rng.normal(size=shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    content = file.read_bytes()
    file.unlink()
    return content


# Executions


def execute(kinds: dict[str, Kind], folder: Path, seed: int, number: int) -> tuple[str, str]:
    """One execution: its kind, and what came of it, "refused" or "read".

    Raises
    ------
    Crash
        If it is anything else.
    """
    rng = random.Random(f"{seed} {number}")
    name = rng.choices(list(kinds), [kind.weight for kind in kinds.values()])[0]
    kind = kinds[name]
    content = rng.choice(kind.files).read_bytes()
    changed = rng.choice(kind.change)(content, rng)
    path = folder / "hostile"
    path.write_bytes(changed)
    GUARD.note = GUARD.named = ""
    try:
        with _alarm():
            kind.read(path)
        outcome = "read"
    except KVAllocError as error:
        outcome = "refused"
        most = 1000 if name != "name" else 20_000  # a name is told as it was given
        if "\n" in str(error) or len(str(error)) > most:
            raise Crash(f"{name} {number}: more than a line: {str(error)[:300]}") from error
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        shown = traceback.format_exc(limit=-6)[-1500:]
        raise Crash(f"{name} {number}: {type(error).__name__}\n{shown}") from error
    finally:
        path.unlink(missing_ok=True)
    if GUARD.note:
        raise Crash(f"{name} {number}: {GUARD.note}")
    return name, outcome


@contextmanager
def _alarm() -> Iterator[None]:
    def late(*_: object) -> None:
        raise _TooLong(f"more than {MOST_SECONDS:g} s, or {MOST_WAITING:g} by the clock")

    timers = {
        signal.SIGPROF: (signal.ITIMER_PROF, MOST_SECONDS),
        signal.SIGALRM: (signal.ITIMER_REAL, MOST_WAITING),
    }
    before = {one: signal.signal(one, late) for one in timers}
    try:
        for timer, seconds in timers.values():
            signal.setitimer(timer, seconds)
        yield
    finally:
        for timer, _ in timers.values():
            signal.setitimer(timer, 0)
        for one, handler in before.items():
            signal.signal(one, handler)


class Guard:
    """Notes what an execution must not do: an audit hook, which Python never takes away."""

    FORBIDDEN = (
        *(
            "os.system",
            "os.exec",
            "os.posix_spawn",
            "os.fork",
            "subprocess.Popen",
            "pickle.find_class",
        ),
        *("socket.connect", "socket.getaddrinfo", "socket.bind", "ctypes.dlopen"),
    )
    WRITING = (
        "os.rename",
        "os.remove",
        "os.mkdir",
        "os.rmdir",
        "os.truncate",
        "os.symlink",
        "os.link",
    )

    def __init__(self) -> None:
        self.note, self.on, self.inside, self.named = "", False, "", ""
        self.readable: tuple[str, ...] = ()
        self.shared: tuple[str, ...] = ()
        self._hooked = False

    def begin(self, folder: Path) -> None:
        """Watch from now on; only files in the folder may be written."""
        paths = [
            *sysconfig.get_paths().values(),
            sys.prefix,
            sys.base_prefix,
            *filter(None, sys.path),
        ]
        self.inside = f"{folder.resolve()}/"
        shared = ("/proc/", "/sys/", "/dev/null", "/dev/urandom", "/usr/share/", "/etc/mime.types")
        shared += (os.path.expanduser("~/.cache/huggingface/"),)
        self.readable = (
            self.inside,
            *self.shared,
            *(os.path.realpath(path) for path in paths),
            *paths,
            *shared,
        )
        self.on = True
        if not self._hooked:
            sys.addaudithook(self._saw)
            self._hooked = True

    def _saw(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on or self.note:
            return
        if event in self.FORBIDDEN:
            self.note = f"{event} {arguments!r:.300}"
        elif event in self.WRITING:
            if -1 in arguments or None in arguments:  # else within a folder that is open
                for path in arguments[:2]:
                    self._check(path, writing=True)
        elif event == "open":
            path, mode, flags = arguments
            writing = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)) or any(
                one in (mode or "") for one in "wax+"
            )
            self._check(path, writing=writing)

    def _check(self, path: Any, *, writing: bool) -> None:
        if not isinstance(path, str | bytes | os.PathLike):
            return  # an open file
        text = os.path.abspath(os.fsdecode(path))
        allowed = (self.inside, "/dev/null") if writing else self.readable
        if not f"{text}/".startswith(allowed) and (writing or f"{text}/" != self.named):
            self.note = f"{'wrote' if writing else 'opened'} {text!r} outside the folder"


GUARD = Guard()


def run_many(
    kinds: dict[str, Kind],
    folder: Path,
    seed: int,
    numbers: Iterator[int],
    more: Callable[[Outcomes], bool],
) -> Outcomes:
    """Executions in this process for as long as ``more(outcomes)``, one after the other."""
    outcomes = Outcomes()
    GUARD.begin(folder)
    try:
        while more(outcomes):
            try:
                outcomes.by_kind[execute(kinds, folder, seed, next(numbers))] += 1
            except Crash as crash:
                outcomes.crashes.append(str(crash))
    finally:
        GUARD.on = False
    return outcomes


def limit_memory() -> None:
    """Let this process take no more than `MOST_BYTES` beyond what it has."""
    taken = int(Path("/proc/self/statm").read_text("ascii").split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + MOST_BYTES, resource.RLIM_INFINITY))
