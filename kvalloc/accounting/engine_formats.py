"""Engine formats: how other engines store K and V, and which an engine offers."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

from kvalloc.errors import InputError, no_such
from kvalloc.shape import WINDOWED, LayerShape, ModelShape

WHOLE = "f16"
"""The format of numbers that are not rounded to fewer bits."""

Grain = Literal["model", "ends", "skip", "layer"]


@dataclass(frozen=True)
class EngineFormat:
    """Storage of keys or values in an engine.

    Attributes
    ----------
    grid : str
        Rounding; see `kvalloc.measure.engine_formats`.
    side_bits : int
        Bits of a block's scale, minimum or zero point.
    block : int
        Numbers of a block; 0 for a head, or for a tensor if `side_bits` is 0.
    by_channel : bool
        Whether a block holds tokens of one channel.
    ggml : bool
        Whether keys have GGUF's channel order; a Hadamard matrix turns heads of 64 n numbers.
    """

    name: str
    grid: str
    code_bits: int
    side_bits: int = 0
    block: int = 0
    by_channel: bool = False
    ggml: bool = False

    def bits(self, dim: int) -> float:
        """Return the bits of a number of a head, scales included.

        Examples
        --------
        >>> FORMATS["q8_0"].bits(64), FORMATS["u8_token"].bits(64)
        (8.5, 9.0)
        """
        return self.code_bits + self.side_bits / (self.block or dim)

    def holds(self, dim: int) -> bool:
        """Return whether a head has whole blocks of channels."""
        return self.by_channel or not self.block or dim % self.block == 0

    def bytes(self, dim: int, n_tokens: int) -> int:
        """Return the bytes of a head's keys or values, in whole blocks of tokens."""
        if self.by_channel:
            n_tokens = -(-n_tokens // self.block) * self.block
        return round(self.bits(dim) * dim * n_tokens) // 8


_GGML = (
    *(("q8_0", "amax", 8, 16), ("q5_1", "minmax", 5, 32), ("q5_0", "signed", 5, 16)),
    *(("q4_1", "minmax", 4, 32), ("q4_0", "signed", 4, 16), ("iq4_nl", "iq4_nl", 4, 16)),
)
_ROWS: tuple[tuple[Any, ...], ...] = (
    (WHOLE, "whole", 16),
    *((*row, 32, False, True) for row in _GGML),
    *(
        (f"mlx_{b}_{n}", "affine", b, 32, n)
        for b, n in ((8, 64), (6, 64), (4, 32), (4, 64), (3, 64))
    ),
    *((f"u{bits}_channel", "minmax", bits, 64, 32, True) for bits in (8, 4)),
    *((f"u{bits}_token", "minmax", bits, 64) for bits in (8, 4)),
    *(("fp8", "e4m3", 8), ("fp8_e5m2", "e5m2", 8), ("nvfp4", "e2m1", 4, 8, 16)),
    *((f"kvt_{bits}", "zero", bits, 32) for bits in (8, 4, 2)),
    *((f"exl3_{bits}", "exl3", bits, 16, 32) for bits in range(8, 1, -1)),
)

FORMATS: dict[str, EngineFormat] = {row[0]: EngineFormat(*row) for row in _ROWS}
"""All formats by name, unique over engines.

``q*`` and ``iq4_nl``: ggml. ``mlx_BITS_GROUP``: mlx, affine, with a scale and a bias at 16 bits.
``u*_channel``, ``u*_token``: OpenVINO on a CPU, with a scale and a zero point in float32, of blocks
of 32 tokens of a channel or of a token. ``fp8``, ``fp8_e5m2``: with the scale 1, the first e4m3.
``nvfp4``: e2m1 in blocks of 16 with a scale in e4m3. ``kvt_BITS``: KVTuner's, by token, with a
whole zero point.
``exl3_BITS``: exllamav3, groups of 32 that are turned by a Hadamard matrix.
"""


@dataclass(frozen=True)
class Engine:
    """An engine and its formats.

    Attributes
    ----------
    grain : str
        *model*: one pair of formats. *ends*: one for the first and last N layers, one for the
        middle. *skip*: one, but some layers at 16 bits. *layer*: one for each layer.
    pairs : tuple of (str, str)
        Formats of keys and values, highest bits first.
    rounds_windows : bool
        Whether layers with a window can be rounded.
    """

    name: str
    grain: Grain
    pairs: tuple[tuple[str, str], ...]
    rounds_windows: bool = True


def _alike(*names: str) -> tuple[tuple[str, str], ...]:
    return tuple((name, name) for name in (WHOLE, *names))


def _formats(*beginnings: str) -> tuple[str, ...]:
    return tuple(name for name in FORMATS if name.startswith(beginnings))


def _any(names: Sequence[str]) -> tuple[tuple[str, str], ...]:
    return tuple(product(names, names))


_GGML_PAIRS = _any((WHOLE, *_formats("q", "iq")))
_BY_TOKEN = (WHOLE, "u8_token", "u4_token")

ENGINES: dict[str, Engine] = {
    one.name: one
    for one in (
        Engine("llama.cpp", "model", _GGML_PAIRS),
        # its CPU aborts with any q5_*, unless it was built with all pairs, and with that pair
        Engine(
            "ik_llama.cpp",
            "ends",
            tuple(p for p in _any((WHOLE, *_formats("q8", "q4", "iq"))) if p != (WHOLE, "q4_1")),
        ),
        Engine("mlx-lm", "layer", _alike(*_formats("mlx_")), rounds_windows=False),
        # with keys by channel its compiled models crash outside of pipelines
        Engine("openvino", "model", tuple(product(_BY_TOKEN, _BY_TOKEN))),
        Engine("vllm", "skip", _alike("fp8", "fp8_e5m2")),
        Engine("modelopt", "layer", (*_alike("fp8"), ("fp8", "nvfp4"), ("nvfp4", "nvfp4"))),
        # its codes have at most 8 bits
        Engine("kvtuner", "layer", _any(_formats("kvt_"))),
        # keys and values are both rounded, or neither
        Engine("exllamav3", "model", (*_alike(), *_any(_formats("exl3_")))),
    )
}
"""All engines by name."""


def formats_of(names: Iterable[str]) -> tuple[str, ...]:
    """Return the formats of engines, and formats by name, once each, without ``f16``.

    Raises
    ------
    InputError
    """
    chosen: set[str] = set()
    for name in names:
        if name in ENGINES:
            chosen.update(*ENGINES[name].pairs)
        elif name in FORMATS:
            chosen.add(name)
        else:
            raise InputError(no_such("engine or format", name, (*ENGINES, *FORMATS)))
    if not chosen - {WHOLE}:
        raise InputError(f"there is no format to measure; name some of {', '.join(ENGINES)}")
    return tuple(name for name in FORMATS if name in chosen and name != WHOLE)


def formats_for(shape: ModelShape) -> list[str]:
    """Return the formats that can store a model's heads."""
    dims = {dim for layer in shape.by_layer for dim in layer.sizes[1:] if layer.kv_heads}
    return [name for name, one in FORMATS.items() if all(map(one.holds, dims))]


def check_holds(names: Sequence[str], shape: ModelShape) -> None:
    """Refuse a format that cannot store a model's heads.

    Raises
    ------
    InputError
    """
    able = formats_for(shape)
    if odd := [name for name in names if name not in able]:
        sizes = " and ".join(map(str, sorted({*shape.dims})))
        alternatives = ", ".join(name for name in names if name in able) or WHOLE
        raise InputError(
            f"{odd[0]} stores blocks of {FORMATS[odd[0]].block} numbers, and heads of "
            f"{shape.model_id} have {sizes}; take {alternatives}"
        )


def bytes_of(shape: ModelShape, pairs: Sequence[tuple[str, str]], n_tokens: int) -> int:
    """Return the bytes of K, V and states of one row in an engine, up to each window.

    ``pairs`` are of each layer, (n_layers,).
    """
    return sum(
        layer.state_bytes + sum(part_bytes(layer, part, pair[part], n_tokens) for part in (0, 1))
        for layer, pair in zip(shape.by_layer, pairs, strict=True)
    )


def part_bytes(layer: LayerShape, part: int, name: str, n_tokens: int) -> int:
    """Return the bytes of a layer's keys (0) or values (1)."""
    if not layer.kv_heads:
        return 0
    if layer.kind in WINDOWED and layer.window is not None:
        n_tokens = min(n_tokens, layer.window)
    return layer.kv_heads * FORMATS[name].bytes(layer.sizes[1 + part], n_tokens)
