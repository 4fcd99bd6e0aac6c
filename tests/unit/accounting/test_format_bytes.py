"""Engine formats: bits an element, bytes of a cache, and what an engine can be told."""

import pytest

from kvalloc.accounting.engine_formats import (
    ENGINES,
    FORMATS,
    bytes_of,
    check_holds,
    formats_of,
)
from kvalloc.errors import InputError
from kvalloc.shape import LayerShape, ModelShape

BITS = {
    "f16": 16,
    **{"q8_0": 8.5, "q5_1": 6, "q5_0": 5.5, "q4_1": 5, "q4_0": 4.5, "iq4_nl": 4.5},
    **{"mlx_8_64": 8.5, "mlx_6_64": 6.5, "mlx_4_32": 5, "mlx_4_64": 4.5, "mlx_3_64": 3.5},
    **{"u8_channel": 10, "u8_token": 9, "u4_channel": 6, "u4_token": 5},
    **{"fp8": 8, "fp8_e5m2": 8, "nvfp4": 4.5, "kvt_8": 8.5, "kvt_4": 4.5, "kvt_2": 2.5},
    **{f"exl3_{bits}": bits + 0.5 for bits in range(2, 9)},
}
"""Of an element of a head of 64 numbers, scales included."""


def shape_of(dim=64, **changes):
    sizes = {"n_layers": 2, "n_query_heads": 4, "n_kv_heads": 2, "head_dim": dim, "dtype_bytes": 4}
    return ModelShape(model_id="m", layer_types=("full",) * 2, **sizes | changes)


def test_bits_of_an_element():
    assert {name: one.bits(64) for name, one in FORMATS.items()} == BITS


def test_bytes_are_those_of_the_bits_and_of_whole_blocks_of_tokens():
    shape = shape_of()
    by_name = {name: bytes_of(shape, [(name, name)] * 2, 64) for name in FORMATS}
    assert by_name == {name: bits * 64 * 64 * 2 * 2 * 2 / 8 for name, bits in BITS.items()}
    channel = [("u8_channel", "f16")] * 2
    assert bytes_of(shape, channel, 65) - bytes_of(shape, [("f16", "f16")] * 2, 65) == (
        2 * 2 * (96 * 64 * 10 - 65 * 64 * 16) // 8
    )


def test_a_window_a_state_and_a_shared_layer_cost_what_they_store():
    sizes = {"kv_heads": 1, "key_dim": 64, "value_dim": 32}
    layers = (
        LayerShape(kind="full", **sizes),
        LayerShape(kind="sliding", window=10, **sizes),
        LayerShape(kind="state", state_bytes=1000),
        LayerShape(kind="shared", reads=0),
    )
    shape = ModelShape(
        model_id="m",
        n_layers=4,
        n_query_heads=2,
        n_kv_heads=1,
        head_dim=64,
        value_dim=32,
        dtype_bytes=4,
        layers=layers,
        layer_types=tuple(one.kind for one in layers),
        sliding_window=10,
    )
    found = bytes_of(shape, [("q8_0", "q4_0")] * 4, 100)
    assert found == 110 * (64 * 8.5 + 32 * 4.5) / 8 + 1000


def test_engines_take_formats_that_exist_and_no_pair_that_aborts():
    for engine in ENGINES.values():
        assert {name for pair in engine.pairs for name in pair} <= {*FORMATS}
        assert (("f16", "f16") in engine.pairs) == (engine.name != "kvtuner")
    assert ("q8_0", "q5_1") in ENGINES["llama.cpp"].pairs
    assert not any({"q5_0", "q5_1"} & {*pair} for pair in ENGINES["ik_llama.cpp"].pairs)
    assert ("f16", "q4_1") not in ENGINES["ik_llama.cpp"].pairs
    assert all(key == value for key, value in ENGINES["mlx-lm"].pairs)
    assert ("nvfp4", "fp8") not in ENGINES["modelopt"].pairs


def test_formats_of_several_engines_come_once_and_a_wrong_name_is_refused():
    both = formats_of(["llama.cpp", "mlx-lm", "q8_0", "fp8"])
    assert both[:3] == ("q8_0", "q5_1", "q5_0")
    assert both[-1] == "fp8"
    assert len({*both}) == len(both)
    with pytest.raises(InputError, match=r"no engine or format 'lama\.cpp'.*llama\.cpp"):
        formats_of(["lama.cpp"])
    with pytest.raises(InputError, match="no format to measure"):
        formats_of(["f16"])


def test_a_head_size_that_a_format_cannot_hold_is_refused_by_name():
    check_holds(FORMATS, shape_of(64))
    message = r"mlx_8_64 stores blocks of 64 numbers, and heads of m have 96; take mlx_4_32"
    with pytest.raises(InputError, match=message):
        check_holds(formats_of(["mlx-lm"]), shape_of(96))
    with pytest.raises(InputError, match=r"q8_0 stores blocks of 32 .* have 80; take f16"):
        check_holds(formats_of(["llama.cpp"]), shape_of(80))
