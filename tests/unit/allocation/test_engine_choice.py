"""The formats that an engine is told are the best ones that it can be told, by trying all."""

from itertools import product

import numpy as np
import pytest
from factories import make_format_losses, make_shape

from kvalloc.accounting.engine_formats import ENGINES, bytes_of
from kvalloc.allocation import engine_choice
from kvalloc.allocation.engine_choice import choose
from kvalloc.errors import InfeasibleError, InputError, KVAllocError
from kvalloc.formats.engine_choice import EngineChoice
from kvalloc.shape import LayerShape

N_LAYERS, TOKENS = 3, 64
MEASURED = {
    "llama.cpp": ("q8_0", "q5_1", "q4_0"),
    "ik_llama.cpp": ("q8_0", "q4_1", "q4_0"),
    "mlx-lm": ("mlx_8_64", "mlx_4_32", "mlx_3_64"),
    "vllm": ("fp8",),
    "modelopt": ("fp8", "nvfp4"),
    "kvtuner": ("kvt_8", "kvt_4", "kvt_2"),
}


def tellable(engine, pairs):
    """Return all that an engine can be told of three layers: pairs by layer."""
    layers = list(product(pairs, repeat=N_LAYERS))
    match engine.grain:
        case "model":
            return [(pair,) * N_LAYERS for pair in pairs]
        case "skip":
            return [one for one in layers if len({*one} - {("f16", "f16")}) <= 1]
        case "ends":  # of three layers first, middle and last are all; types that go together

            def together(one):
                return {(key, value) for key, _ in one for _, value in one} <= {*pairs}

            return [one for one in layers if together(one)]
    return layers


@pytest.mark.parametrize("name", MEASURED)
def test_no_setting_of_an_engine_is_better(name):
    engine, shape = ENGINES[name], make_shape(n_layers=N_LAYERS, head_dim=64)
    losses = make_format_losses(shape, MEASURED[name])
    names = [*losses.formats, "f16"]
    pairs = [pair for pair in engine.pairs if {*pair} <= {*names}]
    settings = tellable(engine, pairs)
    index = [[[names.index(one) for one in pair] for pair in setting] for setting in settings]
    choices = np.where(np.array(index) == len(names) - 1, -1, index)
    sums = losses.sums(choices)
    costs = np.array([bytes_of(shape, setting, TOKENS) for setting in settings])
    mean = losses.predict_sums(sums).mean
    if engine.grain == "model":  # of whole caches that were measured, what they lose
        sums = mean = losses.predict(choices).mean
    for bits in (4.6, 6.5, 8.7, 12):
        fits = costs <= bits / 16 * bytes_of(shape, [("f16", "f16")] * N_LAYERS, TOKENS)
        if not fits.any():
            with pytest.raises(InfeasibleError):
                choose(losses, name, context=TOKENS, bits=bits)
            continue
        chosen = choose(losses, name, context=TOKENS, bits=bits)
        assert chosen.pairs in settings
        assert chosen.summed_loss == pytest.approx(sums[fits].min(), rel=1e-9, abs=1e-15)
        assert chosen.bound == pytest.approx(chosen.summed_loss, rel=1e-9, abs=1e-12)
        assert chosen.cache_bytes == bytes_of(shape, chosen.pairs, TOKENS)
        assert chosen.mean == pytest.approx(mean[fits].min())
    for loss in (mean.max(), np.median(mean), mean.min()):
        chosen = choose(losses, name, context=TOKENS, target_loss=loss * (1 + 1e-9) + 1e-15)
        assert chosen.mean <= loss * (1 + 1e-6) + 1e-14
        fewest = costs[mean <= loss * (1 + 1e-9) + 1e-15].min()
        assert chosen.cache_bytes == chosen.bound == fewest


def test_a_frontier_has_what_is_next_and_never_loses_more_for_more_bytes():
    for name in MEASURED:
        losses = make_format_losses(make_shape(n_layers=6, head_dim=64), MEASURED[name])
        chosen = choose(losses, name, context=TOKENS, batch=2, bits=10)
        rows = chosen.frontier
        assert len(rows) <= engine_choice.ROWS
        assert chosen.pairs in [row.pairs for row in rows]
        sizes, means = ([getattr(row, key) for row in rows] for key in ("cache_bytes", "mean"))
        assert sizes == sorted({*sizes})
        assert means == sorted(means, reverse=True)


def test_windows_and_states_cost_what_they_store_and_stay_where_an_engine_cannot_round_them():
    full, sliding = (
        LayerShape(kind=kind, kv_heads=2, key_dim=64, value_dim=64, window=window)
        for kind, window in (("full", None), ("sliding", 32))
    )
    layers = (full, sliding, LayerShape(kind="state", state_bytes=1000))
    shape = make_shape(
        head_dim=64, layer_types=("full", "sliding", "state"), sliding_window=32, layers=layers
    )
    losses = make_format_losses(shape, ("mlx_4_64", "q4_0"))
    of_layer = 2 * 2 * 64 * 4.5 / 8
    for name, window_bits in (("mlx-lm", 16), ("llama.cpp", 4.5)):
        least = 3 * round(TOKENS * of_layer + 32 * of_layer * window_bits / 4.5 + 1000)
        chosen = choose(losses, name, context=TOKENS, batch=3, memory=least)
        assert chosen.cache_bytes == least
        assert chosen.full_bytes == 3 * bytes_of(shape, [("f16", "f16")] * 3, TOKENS)
        with pytest.raises(InfeasibleError, match="its least .* give memory=") as refused:
            choose(losses, name, context=TOKENS, batch=3, memory=least - 1)
        assert refused.value.nearest == least


REFUSED = {
    "there is no engine 'llama'; the nearest is 'llama.cpp'": {"engine": "llama", "bits": 5},
    "no targets are given; give one of memory, budget, bits, target_loss": {},
    "2 targets are given": {"bits": 5, "memory": "1MiB"},
    "target_retention is not about engine formats": {"target_retention": 0.9},
    "bits=17 is not possible; give 16 or less": {"bits": 17},
    "a context of 101 tokens is beyond the 100 tokens of tests/tiny": {
        "bits": 5,
        "context": 101,
    },
    "no format of vllm was measured on tests/tiny; measure them with": {
        "engine": "vllm",
        "bits": 9,
    },
    "target_loss=1e-09 is less than kvtuner can be told: .* nats; give target_loss=": {
        "target_loss": 1e-9
    },
    "bits=1 is less than kvtuner .* is 42.19 KiB; give bits=4.5$": {"bits": 1},
    "budget='1%' is less than kvtuner .* give budget='28.13%'": {"budget": "1%"},
    "batch=0 is not possible; give batch=1 or more": {"bits": 5, "batch": 0},
    "context=0 is not possible; give context=1 or more": {"bits": 5, "context": 0},
}


@pytest.mark.parametrize("words", REFUSED)
def test_what_an_engine_cannot_do_is_refused_in_a_line(words):
    losses = make_format_losses(make_shape(head_dim=64, max_context_tokens=100), ("kvt_4",))
    with pytest.raises(KVAllocError, match=words):
        choose(losses, **{"engine": "kvtuner", **REFUSED[words]})


def test_a_choice_is_a_file(tmp_path):
    losses = make_format_losses(make_shape(head_dim=64), ("kvt_8", "kvt_4"))
    chosen, path = choose(losses, "kvtuner", bits=7), tmp_path / "c.json"
    chosen.save(path)
    assert EngineChoice.load(path) == chosen
    with pytest.raises(InputError, match=r"pairs is \[\('f16', 'f16'\)\], expected what kvtuner"):
        chosen.replace(pairs=(("f16", "f16"),) * 3)


UNTELLABLE = {
    "llama.cpp": [("q8_0", "f16")] * 3 + [("q4_0", "f16")],
    "vllm": [("fp8", "fp8")] * 3 + [("fp8_e5m2", "fp8_e5m2")],
    "ik_llama.cpp": [("q8_0", "f16"), ("q4_0", "f16")] * 2,
    "modelopt": [("fp8", "fp8")] * 3 + [("nvfp4", "fp8")],
}


@pytest.mark.parametrize("name", UNTELLABLE)
def test_a_file_of_what_an_engine_cannot_be_told_is_refused(name):
    losses = make_format_losses(make_shape(n_layers=4, head_dim=64), ("q8_0", "fp8"))
    chosen = choose(losses, name, bits=16)
    with pytest.raises(InputError, match=f"expected what {name} takes"):
        chosen.replace(pairs=tuple(UNTELLABLE[name]))
