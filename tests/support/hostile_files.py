"""Hostile files: one place of a sound file changed, in its bytes, its JSON or its tensors.

Digests have no key, so a changed file is signed again: what would stop at the digest has to be
refused by what comes after it. Hypothesis chooses the changes and makes a failing one small.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvalloc.errors import KVAllocError, ProfileFileError, one_line
from kvalloc.formats.fitted import FittedSurrogate
from kvalloc.formats.record import digest_of, digest_over
from kvalloc.formats.saved_cache import StoredTensor, tensor_digest
from kvalloc.formats.score_profile import ScoreProfile

MAX_SECONDS = 20.0
"""Processor time of one file: far above what the slowest takes."""

MAX_BYTES = 2**30
"""Memory that reading a file may take beyond that of the process."""

OF_EACH_TYPE: tuple[Any, ...] = (
    *(None, True, -1, 0.5, 10**30, float("inf"), float("nan"), "x", [], {}, [[]], {"": None}),
)
NUMBERS = (-(2**63), -(2**31), -2, 0, 1, 63, 127, 2**15, 2**31, 2**53, 50_000_000, 2**64, 10**400)
STRINGS = (
    *("", "demo", "full", "layer", "xkv", "x" * 5000, "9" * 5000, "nul\0byte", "~root", "-o", "."),
    *("../../../etc/passwd", "/etc/passwd", "file:///etc/passwd", "hf://owner/repo/../../x"),
    *("http://127.0.0.1:9/x", "%s%n", "{x.y}", "\ud800", "\u202e", "\x1b[2J", "\r\n", "<script>x"),
    *("__import__('os').system('touch PWNED')", "surrogate:file=/etc/passwd", "NaN", "1e999"),
)
BYTES = (
    *(b"", b"\0", b"\xff" * 8, b"{", b"[" * 200_000, b"9" * 5000, b"  \n", b"[1, 2]", b"7"),
    *(bytes(range(256)), b"GGUF", b"PK\x03\x04", b"\x80\x04.", b"\xef\xbb\xbf", b"\x93NUMPY"),
    *(number.to_bytes(8, "little") for number in (1, 2**20, 2**31, 2**40, 2**63, 2**64 - 1)),
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


# JSON and bytes


def nested(levels: int, *, in_lists: bool) -> Any:
    value: Any = 0
    for _ in range(levels):
        value = [value] if in_lists else {"a": value}
    return value


odd_values = st.sampled_from((*NUMBERS, -0.0, 1e308, *STRINGS, *OF_EACH_TYPE)) | st.builds(
    nested, st.sampled_from((5, 500)), in_lists=st.booleans()
)


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


@st.composite
def changed_value(draw: Any, value: Any) -> Any:
    """Return a JSON value with one place changed."""
    every = list(places(value))
    if not every:
        return draw(odd_values)
    path = draw(st.sampled_from(every))
    old = value
    for key in path:
        old = old[key]
    near: tuple[Any, ...] = (...,)
    if isinstance(old, int | float):
        near = (..., old + 1, old - 1, -old, old * 2, str(old))
    elif isinstance(old, list):
        near = (..., old[:-1], old * 2, old * 5000)
    elif isinstance(old, dict):
        near = (..., {**old, draw(st.sampled_from(STRINGS)): "x"})
    return with_value(value, path, draw(odd_values | st.sampled_from(near)))


@st.composite
def changed_bytes(draw: Any, content: bytes) -> bytes:
    """Return content with some bytes of its start or its end, or anywhere, replaced by others."""
    place = draw(st.sampled_from((0, 8, len(content))) | st.integers(0, len(content)))
    new = draw(st.sampled_from(BYTES) | st.binary(max_size=8))
    n_replaced = draw(st.sampled_from((0, 1, 8, len(new), 100, len(content))))
    return content[:place] + new + content[place + n_replaced :]


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

    def table(self) -> dict[str, Any]:
        """Return the header of the file, with the place of each array."""
        header = {self.entry: json.dumps(self.stated)} if self.entry else {}
        table: dict[str, Any] = {"__metadata__": {**header, **self.others}}
        end = 0
        for name, (dtype, raw) in self.arrays.items():
            end, begin = end + raw.size, end
            table[name] = {"dtype": dtype, "shape": raw.shape[:-1], "data_offsets": [begin, end]}
        return table

    def pack(self, table: Any = None) -> bytes:
        """Return the file, with another header if there is one."""
        text = json.dumps(self.table() if table is None else table).encode()
        data = b"".join(raw.tobytes() for _, raw in self.arrays.values())
        return len(text).to_bytes(8, "little") + text + data

    def numbers(self, name: str) -> Any:
        """Return the numbers of an array; to write to."""
        dtype, raw = self.arrays[name]
        kind = "int16" if dtype == "BF16" else NAMES[dtype]
        return raw.view(kind)[..., 0]

    def change(self, draw: Any) -> bool:
        """Change one array in type, shape, numbers or name, or leave it out.

        Returns whether it has other floating-point numbers now.
        """
        name = draw(st.sampled_from(sorted(self.arrays)))
        dtype, raw = self.arrays[name]
        acts = ("number", "number", "one", "all", "drop", "name", "type")
        act = draw(st.sampled_from(acts))
        if act == "drop":
            del self.arrays[name]
        elif act == "name":
            self.arrays[draw(st.sampled_from((name + "x", "..", *self.arrays)))] = dtype, raw
        elif act == "type":
            alike = [kind for kind in BITS if BITS[kind] == BITS[dtype]]
            self.arrays[name] = draw(st.sampled_from(alike)), raw
        elif act == "number" and raw.size:
            numbers = self.numbers(name).reshape(-1)
            place = draw(st.integers(0, len(numbers) - 1))
            if numbers.dtype.kind == "f":
                numbers[place] = draw(st.floats(width=8 * numbers.itemsize))
                return True
            limits, old = np.iinfo(numbers.dtype), int(numbers[place])
            near = (*NUMBERS, *(old + step for step in (-64, -1, 1, 64)))
            numbers[place] = min(max(draw(st.sampled_from(near)), limits.min), limits.max)
            return dtype == "BF16"
        else:  # cut or padded, alone or with all that belong to it
            axis = draw(st.integers(0, raw.ndim - 1))
            ahead, size = name.rpartition(".")[0], raw.shape[axis]
            wanted = draw(st.sampled_from((0, 1, max(size - 1, 0), size + 1, size // 2, 2 * size)))
            for other in [name] if act == "one" else list(self.arrays):
                dtype, raw = self.arrays[other]
                if other.rpartition(".")[0] == ahead and axis < raw.ndim - 1:
                    padding = [(0, 0)] * raw.ndim
                    padding[axis] = (0, max(wanted - raw.shape[axis], 0))
                    sized = np.pad(raw, padding).take(range(wanted), axis)
                    self.arrays[other] = dtype, np.ascontiguousarray(sized)
        return False

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


def stated_by(content: bytes) -> Any:
    """Return the values in a file of JSON or a record's file, arrays of numbers left out."""
    return json.loads(content) if content[:1] == b"{" else Tensors.parse(content).stated


def with_stated(content: bytes, stated: Any, *, sign: bool = True) -> bytes:
    """Return a file with other values, signed again or under its old digest."""
    if content[:1] == b"{":
        return json.dumps(signed(stated) if sign else stated).encode()
    file = Tensors.parse(content)
    file.stated = stated
    return (file.signed() if sign else file).pack()


@st.composite
def mutants(draw: Any, samples: Sequence[bytes]) -> bytes:
    """Return a sound file of any format with one place changed."""
    content, act = draw(st.sampled_from(samples)), draw(st.integers(0, 7))
    tensors = content[8:9] == b"{"
    if act < 2 or not (tensors or content[:1] == b"{"):
        return draw(changed_bytes(content))
    if tensors and act < 5:
        file = Tensors.parse(content)
        if act == 2:
            return file.pack(draw(changed_value(file.table())))
        file.change(draw)
        return file.signed().pack()
    lines = content.splitlines() if b"}\n{" in content and not tensors else [content]
    number = draw(st.integers(0, len(lines) - 1))
    stated = draw(changed_value(stated_by(lines[number])))
    lines[number] = with_stated(lines[number], stated, sign=b'digest"' in content)
    return b"\n".join(lines)


# Reading


def by_chance(count: int) -> settings:
    """Return the settings of a test of so many examples, the same ones each time."""
    checks = [*HealthCheck]
    return settings(
        max_examples=count, derandomize=True, database=None, suppress_health_check=checks
    )


def outcomes(name: str, kind: Kind, path: Path, count: int) -> Counter[str]:
    """Read so many mutants of a kind of file; return and print how many were refused and read.

    Raises
    ------
    AssertionError
        If a mutant is neither refused in one line nor read, or reading it does more than that.
    """
    result: Counter[str] = Counter()

    @by_chance(count)
    @given(mutants(kind[0]))
    def read(content: bytes) -> None:
        path.write_bytes(content)
        error = refusal(kind[1], path)
        assert SEEN == []
        assert error is None or one_clear_line(error, path) is None
        result["refused" if error else "read"] += 1

    read()
    row = {"what": name, "figure": f"{result['refused']:,}", "read": f"{result['read']:,}"}
    print(f"\n{json.dumps(row)}")
    return result


def refusal(read: Read, path: Path) -> KVAllocError | None:
    """Return the error that refuses a file; None where it is read."""
    with watching(path.parent), bounded():
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


FORBIDDEN = {"os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen"}
FORBIDDEN |= {"pickle.find_class", "socket.connect", "socket.getaddrinfo", "ctypes.dlopen"}
CHANGING = {"os.rename", "os.remove", "os.mkdir", "os.rmdir", "os.symlink", "os.link"}

WATCHED: list[str] = []
"""The folder of the file that is being read; only there may files be written."""

SEEN: list[str] = []
"""What reading a file must not do: programs and connections that were begun, files written outside
of the folder, and decoys that were opened because a file names them."""


@contextmanager
def watching(folder: Path) -> Iterator[None]:
    """Note in `SEEN` what must not happen meanwhile."""
    SEEN.clear()
    WATCHED.append(f"{folder.resolve()}/")
    try:
        yield
    finally:
        WATCHED.clear()


def note(event: str, arguments: tuple[Any, ...]) -> None:
    """Hear of an event: an audit hook, which Python never takes away."""
    if not WATCHED:
        return
    if event in FORBIDDEN:
        SEEN.append(f"{event} {arguments!r:.300}")
    elif event in CHANGING and -1 in arguments:  # else within a folder that is open
        note_opened(arguments[0], writing=True)
    elif event == "open":
        path, mode, flags = arguments
        writing = bool((flags or 0) & (os.O_WRONLY | os.O_RDWR | os.O_CREAT))
        note_opened(path, writing=writing or bool(set(mode or "") & set("wax+")))


def note_opened(path: Any, *, writing: bool) -> None:
    """Note a file that may not be opened."""
    if isinstance(path, str | bytes | os.PathLike):
        text = os.path.abspath(os.fsdecode(path))
        outside = not f"{text}/".startswith((WATCHED[0], "/dev/null/"))
        decoy = text.endswith("/etc/passwd")
        if outside and (decoy or (writing and "__pycache__" not in text)):
            SEEN.append(f"{'wrote' if writing else 'opened'} {text}")


sys.addaudithook(note)
