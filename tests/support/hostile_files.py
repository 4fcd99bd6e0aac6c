"""Hostile files by generic mutation: one place of a sound file changed, in JSON or safetensors.

`mutants` gives changed files of a sample by number: first every field of its JSON dropped and
replaced by a value of each other type, then changes by chance. A case is made again by its sample
and number. Digests have no key, so a changed file is signed again: what would stop at the digest
has to be refused by what comes after it.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import struct
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from kvalloc.errors import KVAllocError, ProfileFileError, one_line
from kvalloc.formats.record import digest_of, digest_over
from kvalloc.formats.saved_cache import StoredTensor, tensor_digest
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.formats.surrogate import FittedSurrogate

MAX_SECONDS = 20.0
"""Processor time of one file: far above what the slowest takes."""

MAX_BYTES = 2**30
"""Memory that reading a file may take beyond that of the process."""

OF_EACH_TYPE: tuple[Any, ...] = (
    *(None, True, -1, 0.5, 10**30, float("inf"), float("nan"), "x", [], {}, [[]], {"": None}),
)
NUMBERS: tuple[Any, ...] = (
    *(-(2**63), -(2**31), -2, 0, 1, 2, 3, 63, 127, 129, 2**15, 2**31 - 1, 2**31, 2**53, 2**62),
    *(50_000_000, 2**63, 2**64, 10**30, 10**400, -0.0, 1e-320, 1e308, -1e308),
    *(float("nan"), float("inf"), float("-inf")),
)
STRINGS = (
    *("", " ", "demo", "full", "sliding", "layer", "head", "xkv", "score", "x" * 5000, "9" * 5000),
    *("../../../etc/passwd", "/etc/passwd", "a/../../b", "nul\0byte", "~root", "C:\\x", "-o", "."),
    *("hf://owner/repo/../../x", "http://127.0.0.1:9/x", "file:///etc/passwd", "%s%n", "{x.y}"),
    *("\ud800", "\udfff\ud800", "\u202e", "\x1b[2J", "\x1b]0;t\x07", "\r\n", "<script>x</script>"),
    *("__import__('os').system('touch PWNED')", "cos\nsystem\n(S'touch PWNED'\ntR."),
    *("streaming:window=-1", "surrogate:file=/etc/passwd", "NaN", "1e999"),
)
BYTES = (
    *(b"", b"\0", b"\xff" * 8, b"{", b"[" * 200_000, b"9" * 5000, b"  \n", b"[1, 2]", b"7"),
    *(bytes(range(256)), b"GGUF", b"PK\x03\x04", b"\x80\x04.", b"\xef\xbb\xbf", b"\x93NUMPY"),
)
BITS = {"F64": 64, "F32": 32, "F16": 16, "BF16": 16, "I64": 64, "I32": 32, "U8": 8, "F8_E4M3": 8}
NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
NAMES |= {"I64": "int64", "I32": "int32", "U8": "uint8", "F8_E4M3": "float8"}

FIELDS = tuple(
    dict.fromkeys(name for kind in (ScoreProfile, FittedSurrogate) for name in kind.model_fields)
)
"""Arrays of records in the order of their digests."""

Read = Callable[[Path], object]
Kind = tuple[Sequence[bytes], Read]
"""Sound files, and what reads such a file and uses it."""


# JSON


def places(value: Any) -> Iterator[tuple[Any, ...]]:
    """Return the path of every value inside a JSON value, down to 20 levels."""
    below: list[tuple[tuple[Any, ...], Any]] = [((), value)]
    while below:
        path, inner = below.pop(0)
        if path:
            yield path
        if isinstance(inner, dict | list) and len(path) < 20:
            items = inner.items() if isinstance(inner, dict) else enumerate(inner)
            below += [((*path, key), one) for key, one in items]


def with_value(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a copy with another value at a path; with none where it is ``...``."""
    changed, (key, *rest) = value.copy(), path
    if rest:
        changed[key] = with_value(value[key], tuple(rest), new)
    elif new is ...:
        del changed[key]
    else:
        changed[key] = new
    return changed


def each_field(value: Any) -> list[tuple[tuple[Any, ...], Any]]:
    """Return the path of every field with each value that is not of its type."""
    fields = [path for path in places(value) if not any(isinstance(k, int) and k for k in path)]
    return [(path, new) for path in fields for new in (..., *OF_EACH_TYPE)]


def changed_value(value: Any, rng: random.Random) -> Any:
    """Return a JSON value with one place changed."""
    every = list(places(value))
    if not every:
        return rng.choice((*NUMBERS, *STRINGS, *OF_EACH_TYPE))
    path = rng.choice(every)
    old, nested = value, 0
    for key in path:
        old = old[key]
    for _ in range(rng.choice((5, 500))):
        nested = rng.choice(([nested], {"a": nested}))
    new = rng.choice((rng.choice(NUMBERS), rng.choice(STRINGS), rng.choice(OF_EACH_TYPE), nested))
    if isinstance(old, int | float):
        new = rng.choice((new, rng.choice(NUMBERS), old + 1, old - 1, -old, old * 2, str(old)))
    elif isinstance(old, list):
        new = rng.choice((new, old[:-1], old * 2, old * 5000))
    elif isinstance(old, dict):
        new = rng.choice((new, {**old, rng.choice((*STRINGS, *old)): rng.choice(STRINGS)}))
    return with_value(value, path, rng.choice((new, new, new, ...)))


def as_json(value: Any, rng: random.Random) -> bytes:
    """Return JSON, now and then with a key twice, or deeper than any reader goes."""
    text = json.dumps(value)
    if rng.random() < 0.03 and isinstance(value, dict) and value:
        text = f"{text[:-1]}, {json.dumps({rng.choice(sorted(value)): rng.choice(STRINGS)})[1:]}"
    return text.replace("0", "[" * 100_000, rng.random() < 0.02).encode()


def changed_json(content: bytes, rng: random.Random) -> bytes:
    """Return JSON, or JSON lines, with one place changed; a record's digest is made again."""
    try:
        value = json.loads(content)
    except ValueError:
        lines = content.splitlines()
        number = rng.randrange(len(lines))
        lines[number] = changed_json(lines[number], rng)
        return rng.choice((b"\n", b"\r\n", b"\n\n")).join(lines)
    changed = changed_value(value, rng)
    return as_json(signed(changed) if b'"digest"' in content else changed, rng)


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """Return content flipped, cut, doubled, appended to or overwritten in one place."""
    size = rng.choice((len(content), min(len(content), 300)))
    place, length = rng.randrange(size + 1), rng.choice((1, 8, 100, 1000))
    before, some, after = content[:place], content[place : place + length], content[place:]
    number = rng.choice((0, 1, 2**20, 2**27, 2**31, 2**40, 2**63, 2**64 - 1, len(content)))
    flipped = bytes([after[0] ^ 1 << rng.randrange(8)]) if after else b""
    return rng.choice(
        (
            *(before, before + flipped + after[1:], before + some + after, before + after[length:]),
            *(rng.choice(BYTES), before + rng.choice(BYTES) + after, content + rng.choice(BYTES)),
            before + struct.pack("<Q", number) + after[8:],
            struct.pack("<Q", number) + content[8:],
        )
    )


# Safetensors


@dataclass
class Tensors:
    """A safetensors file in parts.

    Attributes
    ----------
    entry : str
        Key of the metadata that have kvalloc's header; empty where there is none.
    stated : JSON value
        That header.
    arrays : dict
        Name to type and bytes, (*shape, bytes a number).
    others : dict
        What else is in the metadata.
    """

    entry: str
    stated: Any
    arrays: dict[str, tuple[str, np.ndarray]]
    others: dict[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, content: bytes) -> Tensors:
        """Return the parts of a sound file."""
        size = int.from_bytes(content[:8], "little")
        table, data = json.loads(content[8 : 8 + size]), content[8 + size :]
        others = table.pop("__metadata__")
        entry = next((key for key, text in others.items() if text[:1] == "{"), "")
        stated = others.pop(entry, "{}")
        arrays = {}
        for name, one in table.items():
            raw = np.frombuffer(data[slice(*one["data_offsets"])], np.uint8).copy()
            shape = (*one["shape"], BITS[one["dtype"]] // 8)
            arrays[name] = one["dtype"], raw.reshape(shape)
        return cls(entry, json.loads(stated), arrays, others)

    def pack(self, change: Callable[[Any], Any] = lambda table: table) -> bytes:
        """Return the file; ``change`` is applied to the table of its tensors."""
        header = {self.entry: json.dumps(self.stated)} if self.entry else {}
        table: Any = {"__metadata__": {**header, **self.others}}
        end = 0
        for name, (dtype, raw) in self.arrays.items():
            end, begin = end + raw.size, end
            table[name] = {"dtype": dtype, "shape": raw.shape[:-1], "data_offsets": [begin, end]}
        text = json.dumps(change(table)).encode()
        data = b"".join(raw.tobytes() for _, raw in self.arrays.values())
        return len(text).to_bytes(8, "little") + text + data

    def numbers(self, name: str) -> Any:
        """Return the numbers of an array; to write to."""
        dtype, raw = self.arrays[name]
        kind = "int16" if dtype == "BF16" else NAMES[dtype]
        return raw.view(kind)[..., 0]

    def change(self, rng: random.Random) -> bool:
        """Change one array in type, shape, numbers or name, or leave it out.

        Returns whether it has any bytes now.
        """
        name = rng.choice(sorted(self.arrays))
        dtype, raw = self.arrays[name]
        flat, axis = raw.reshape(-1), rng.randrange(raw.ndim)
        act = rng.randrange(8)
        if act == 0:
            del self.arrays[name]
        elif act == 1:
            self.arrays[rng.choice((name + "x", "..", "visible", *self.arrays))] = dtype, raw
        elif act == 2:
            self.arrays[name] = rng.choice([d for d in BITS if BITS[d] == BITS[dtype]]), raw
        elif act == 3:
            turned = np.moveaxis(raw, 0, max(raw.ndim - 2, 0))
            self.arrays[name] = dtype, np.ascontiguousarray(turned)
        elif act == 4 and raw.size:  # any bytes
            for place in rng.choices(range(flat.size), k=rng.choice((1, 8, flat.size))):
                flat[place] = rng.randrange(256)
        elif act == 5 and raw.size:  # one number
            width = raw.shape[-1]
            begin = width * rng.randrange(flat.size // width)
            old = int.from_bytes(flat[begin : begin + width].tobytes(), "little", signed=True)
            near = (*NUMBERS[:16], *(old + step for step in (-64, -2, -1, 1, 2, 64)))
            number = struct.pack("<q", max(min(rng.choice(near), 2**63 - 1), -(2**63)))
            if dtype == "F64":
                number = struct.pack("<d", rng.choice((*NUMBERS[-6:], -1.0, 0.0, 2.0)))
            flat[begin : begin + width] = np.frombuffer(number, np.uint8)[:width]
        else:  # cut or padded, alone or with all that belong to it
            ahead, size = name.rpartition(".")[0], raw.shape[axis]
            wanted = rng.choice((0, 1, size - 1, size + 1, size + 7, size // 2, 2 * size))
            for other in [name] if act == 6 else list(self.arrays):
                dtype, raw = self.arrays[other]
                if other.rpartition(".")[0] == ahead and axis < raw.ndim - 1:
                    padding = [(0, 0)] * raw.ndim
                    padding[axis] = (0, max(wanted - raw.shape[axis], 0))
                    cut = np.pad(raw, padding).swapaxes(0, axis)[: max(wanted, 0)]
                    self.arrays[other] = dtype, np.ascontiguousarray(cut.swapaxes(0, axis))
        return act == 4

    def signed(self) -> Tensors:
        """Return the file with the digests that fit what is in it, where any digest can."""
        with suppress(ValueError, TypeError, KeyError, AttributeError):
            stated = {key: one for key, one in self.stated.items() if key != "digest"}
            if self.entry == "kvalloc_cache":
                stored = {
                    name: StoredTensor(dtype=NAMES[kind], shape=raw.shape[:-1], data=raw.ravel())
                    for name, (kind, raw) in self.arrays.items()
                }
                stated["tensor_digest"] = tensor_digest(stored)
                if isinstance(stated.get("profile"), dict):
                    stated["profile"] = signed(stated["profile"])
                stated = signed(stated)
            else:
                numbers = {name: self.numbers(name) for name in FIELDS if name in self.arrays}
                stated["digest"] = digest_over(json.dumps(stated, sort_keys=True), numbers)
            return replace(self, stated=stated)
        return self


def signed(stated: Any) -> Any:
    """Return a JSON record with the digest of its values, where they can have one."""
    with suppress(ValueError, TypeError, AttributeError):
        content = {key: one for key, one in stated.items() if key != "digest"}
        return {**content, "digest": digest_of(content)}
    return stated


def changed_tensors(content: bytes, rng: random.Random) -> bytes:
    """Return a safetensors file with a change in its own header, its arrays or their table."""
    file, act = Tensors.parse(content), rng.random()
    if act < 0.1:
        return file.pack(lambda table: changed_value(table, rng))
    if act < 0.5:
        file.stated = changed_value(file.stated, rng)
    else:
        file.change(rng)
    return file.signed().pack()


def mutant(content: bytes, rng: random.Random) -> bytes:
    """Return a sound file of any format with one place changed."""
    if rng.random() < 0.25:
        return changed_bytes(content, rng)
    if content[8:9] == b"{":
        return changed_tensors(content, rng)
    return (
        changed_json(content, rng) if content[:1] in (b"{", b"[") else changed_bytes(content, rng)
    )


def stated_by(content: bytes) -> Any:
    """Return the values in a record's file, arrays of numbers left out."""
    return json.loads(content) if content[:1] == b"{" else Tensors.parse(content).stated


def with_stated(content: bytes, stated: Any, *, sign: bool = True) -> bytes:
    """Return a record's file with other values, signed again or under its old digest."""
    if content[:1] == b"{":
        return json.dumps(signed(stated) if sign else stated).encode()
    file = Tensors.parse(content)
    file.stated = stated
    return (file.signed() if sign else file).pack()


# Cases


def outcomes(name: str, kind: Kind, path: Path, count: int, seed: int) -> Counter[str]:
    """Read so many mutants of a kind of file; return and print how many were refused and read.

    Raises
    ------
    AssertionError
        If a mutant is neither refused in one line nor read, or reading it does more than that.
    """
    found: Counter[str] = Counter()
    for number in range(count):
        rng, case = random.Random(f"{seed} {number}"), f"{name}, case {number} of seed {seed}"
        path.write_bytes(mutant(rng.choice(kind[0]), rng))
        try:
            error = refusal(kind[1], path)
        except BaseException as crash:
            crash.add_note(case)
            raise
        wrong = GUARD.seen or (error and one_clear_line(error, path))
        assert not wrong, f"{case}: {wrong}: {str(error)[:500]!r}"
        found["refused" if error else "read"] += 1
    print(f"\n{name}: {found['refused']:,} refused, {found['read']:,} read")
    return found


def refusal(read: Read, path: Path) -> KVAllocError | None:
    """Return the error that refuses a file; None where it is read."""
    with GUARD.watching(path.parent), bounded():
        try:
            read(path)
        except KVAllocError as error:
            return error
    return None


def one_clear_line(error: KVAllocError, path: Path) -> str | None:
    """Return what is wrong with a refusal of a file, or None."""
    text = str(error)
    if not text.isprintable() or len(text) > 1000 + len(str(path)):
        return "no short line that can be printed"
    if isinstance(error, ProfileFileError) and error.path == str(path):
        clear = text.startswith(f"{path}: {one_line(error.field, 80)} is ") and "expected" in text
        return None if clear and error.way_out in text else "not file, field and way out"
    return None


@contextmanager
def bounded() -> Iterator[None]:
    """Raise where what is inside takes more than `MAX_SECONDS` or `MAX_BYTES`."""

    def late(*_: object) -> None:
        raise TimeoutError(f"more than {MAX_SECONDS:g} s of processor time")

    soft, hard = resource.getrlimit(resource.RLIMIT_DATA)
    status = Path("/proc/self/status").read_text("ascii")
    data = int(status.partition("VmData:")[2].split()[0]) * 1024
    handler = signal.signal(signal.SIGPROF, late)
    try:
        resource.setrlimit(resource.RLIMIT_DATA, (data + MAX_BYTES, hard))
        signal.setitimer(signal.ITIMER_PROF, MAX_SECONDS)
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, handler)
        resource.setrlimit(resource.RLIMIT_DATA, (soft, hard))


class Guard:
    """Notes what reading a file must not do: an audit hook, which Python never takes away.

    Attributes
    ----------
    seen : list of str
        Programs and connections that were begun, files written outside of the folder, and decoys
        that were opened because a file names them.
    """

    FORBIDDEN = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"}
    FORBIDDEN |= {"pickle.find_class", "socket.connect", "socket.getaddrinfo", "ctypes.dlopen"}
    CHANGING = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link"}

    def __init__(self) -> None:
        self.seen: list[str] = []
        self._folder = ""
        self._hooked = False

    @contextmanager
    def watching(self, folder: Path) -> Iterator[None]:
        """Note what happens meanwhile; only files in the folder may be written."""
        if not self._hooked:
            sys.addaudithook(self._note)
            self._hooked = True
        self.seen.clear()
        self._folder = f"{folder.resolve()}/"
        try:
            yield
        finally:
            self._folder = ""

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self._folder:
            return
        if event in self.FORBIDDEN:
            self.seen.append(f"{event} {arguments!r:.300}")
        elif event in self.CHANGING and -1 in arguments:  # else within a folder that is open
            self._opened(arguments[0], writing=True)
        elif event == "open":
            path, mode, flags = arguments
            writing = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
            self._opened(path, writing=writing or bool(set(mode or "") & set("wax+")))

    def _opened(self, path: Any, *, writing: bool) -> None:
        if isinstance(path, str | bytes | os.PathLike):
            text = os.path.abspath(os.fsdecode(path))
            outside = not f"{text}/".startswith((self._folder, "/dev/null/"))
            decoy = text.endswith("/etc/passwd")
            if outside and (decoy or (writing and "__pycache__" not in text)):
                self.seen.append(f"{'wrote' if writing else 'opened'} {text}")


GUARD = Guard()
