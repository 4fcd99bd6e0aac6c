"""What engines are told of a choice, and what is read back from their files."""

import json

import pytest
from factories import make_format_losses, make_shape

from kvalloc.accounting.engine_formats import ENGINES, FORMATS
from kvalloc.allocation.engine_choice import choose
from kvalloc.errors import InputError
from kvalloc.interop.engines import SYNTAX, read_pairs, write_choice

SHAPE = make_shape(n_layers=4, head_dim=64)
ALL = make_format_losses(SHAPE, tuple(FORMATS)[1:])
WHOLE = ("f16", "f16")


def told(engine, *pairs, **changes):
    """Return a choice of an engine with these pairs in four layers."""
    pairs = pairs if len(pairs) > 1 else pairs * 4
    choice = choose(ALL, engine, context=1000, bits=16)
    return choice.replace(pairs=pairs, frontier=(), **changes)


LINES = {
    ("llama.cpp", (("q8_0", "q5_1"),)): (
        "llama-server -m MODEL.gguf -c 1000 -fa on -ctk q8_0 -ctv q5_1"
    ),
    ("ik_llama.cpp", (("q4_0", "q4_0"),)): (
        "llama-server -m MODEL.gguf -c 1000 -fa on -ctk q4_0 -khad -ctv q4_0 -vhad"
    ),
    ("ik_llama.cpp", (WHOLE, ("q4_0", "f16"), ("q4_0", "f16"), ("q8_0", "f16"))): (
        "llama-server -m MODEL.gguf -c 1000 -fa on -ctk q4_0 -ctk-first f16,1 -ctk-last q8_0,1 "
        "-khad -ctv f16"
    ),
    ("ik_llama.cpp", (WHOLE, *(("f16", "q4_0"),) * 3)): (
        "llama-server -m MODEL.gguf -c 1000 -fa on -ctk f16 -ctv q4_0 -ctv-first f16,1 -vhad"
    ),
    ("vllm", (WHOLE, ("fp8", "fp8"), ("fp8", "fp8"), WHOLE)): (
        "vllm serve MODEL --max-model-len 1000 --kv-cache-dtype fp8 "
        "--kv-cache-dtype-skip-layers 0 3"
    ),
    ("vllm", (WHOLE,)): "vllm serve MODEL --max-model-len 1000 --kv-cache-dtype auto",
    ("openvino", (("u8_token", "u4_token"),)): (
        "LLMPipeline('MODEL', 'CPU', KEY_CACHE_PRECISION='u8', KEY_CACHE_GROUP_SIZE=0, "
        "KEY_CACHE_QUANT_MODE='BY_TOKEN', VALUE_CACHE_PRECISION='u4', VALUE_CACHE_GROUP_SIZE=0)"
    ),
    ("openvino", (WHOLE,)): (
        "LLMPipeline('MODEL', 'CPU', KEY_CACHE_PRECISION='f16', VALUE_CACHE_PRECISION='f16')"
    ),
    (
        "exllamav3",
        (("exl3_5", "exl3_4"),),
    ): "python examples/chat.py -m MODEL -mode MODE -cs 1024 -cq 5,4",
    ("exllamav3", (WHOLE,)): "python examples/chat.py -m MODEL -mode MODE -cs 1024",
    ("kvtuner", (("kvt_8", "kvt_4"),)): "kvt_8 + kvt_4",
    ("mlx-lm", (*(("mlx_8_64", "mlx_8_64"),) * 2, WHOLE, ("mlx_8_64", "mlx_8_64"))): (
        "mlx_8_64 in layers 0-1,3; f16 in layer 2"
    ),
}


@pytest.mark.parametrize(("engine", "pairs"), LINES)
def test_a_line_says_what_was_chosen(engine, pairs):
    assert SYNTAX[engine].line(told(engine, *pairs)) == LINES[engine, pairs]


def test_rows_of_llama_cpp_share_its_context():
    line = SYNTAX["llama.cpp"].line(told("llama.cpp", WHOLE, batch=4))
    assert line.startswith("llama-server -m MODEL.gguf -c 4000 -np 4 ")


MIXED = {
    "mlx-lm": (("mlx_8_64",) * 2, WHOLE, ("mlx_4_32",) * 2, ("mlx_3_64",) * 2),
    "kvtuner": (("kvt_8", "kvt_4"), ("kvt_2", "kvt_2"), ("kvt_4", "kvt_8"), ("kvt_8", "kvt_8")),
    "modelopt": (WHOLE, ("fp8", "fp8"), ("fp8", "nvfp4"), ("nvfp4", "nvfp4")),
}
CONTENT = {
    "mlx-lm": {
        "model": "tests/tiny",
        "layers": [
            {"bits": 8, "group_size": 64},
            None,
            {"bits": 4, "group_size": 32},
            {"bits": 3, "group_size": 64},
        ],
    },
    "modelopt": {
        "quant_algo": None,
        "kv_cache_quant_algo": "MIXED_PRECISION",
        "kv_cache_schema_version": 1,
        "kv_cache_quantized_layers": {
            "model.layers.1.self_attn": {"quant_algo": "FP8"},
            "model.layers.2.self_attn": {"quant_algo": "FP8_K_NVFP4_V"},
            "model.layers.3.self_attn": {"quant_algo": "NVFP4"},
        },
    },
}


@pytest.mark.parametrize("engine", MIXED)
def test_a_file_by_layer_is_read_back_as_it_was_written(engine, tmp_path):
    choice, path = told(engine, *MIXED[engine]), tmp_path / "file"
    write_choice(choice, path)
    assert read_pairs(engine, path, SHAPE) == MIXED[engine]
    if engine in CONTENT:
        stated = json.loads(path.read_text())
        assert stated.get("quantization", stated) == CONTENT[engine]
    with pytest.raises(InputError, match=f"says no formats of {engine} for 3 layers"):
        read_pairs(engine, path, make_shape(n_layers=3, head_dim=64))
    path.write_text("{]")
    with pytest.raises(InputError, match="says no formats of"):
        read_pairs(engine, path, SHAPE)


def test_one_algorithm_for_all_layers_is_named_and_none_is_none():
    for pair, name in ((("fp8", "nvfp4"), "FP8_K_NVFP4_V"), (WHOLE, None)):
        content = SYNTAX["modelopt"].content(told("modelopt", pair))
        assert content["quantization"]["kv_cache_quant_algo"] == name


def test_flags_have_files_that_hold_them_and_every_engine_says_how_it_is_told(tmp_path):
    assert SYNTAX.keys() == ENGINES.keys()
    write_choice(told("llama.cpp", ("q8_0", "q8_0")), tmp_path / "flags.sh")
    assert (tmp_path / "flags.sh").read_text() == (
        "llama-server -m MODEL.gguf -c 1000 -fa on -ctk q8_0 -ctv q8_0\n"
    )
    with pytest.raises(InputError, match="no engine whose files are read 'vllm'"):
        read_pairs("vllm", tmp_path / "flags.sh", SHAPE)


def test_the_lines_for_mlx_lm_are_python():
    compile(SYNTAX["mlx-lm"].use.format(model="m", file="f.json"), "mlx", "exec")
