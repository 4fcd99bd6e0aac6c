"""Losses of engine formats against whole forwards of a model whose cache rounds."""

import numpy as np
import pytest
import torch
from tiny_models import VOCABULARY, WordTokenizer, tiny_model, words
from transformers import DynamicCache

from kvalloc.accounting.engine_formats import formats_of
from kvalloc.errors import InputError, UnsupportedModelError
from kvalloc.formats.format_losses import FormatLosses
from kvalloc.measure.engine_formats import gguf_order, round_trip
from kvalloc.measure.format_profile import FormatProbe, mixtures_of, profile_formats
from kvalloc.models.attention import probe_of
from kvalloc.models.loading import shape_of
from kvalloc.models.names import cache_keyword

NAMES = ("q8_0", "q4_0", "mlx_4_32")
SIZES = {"head_dim": 32, "hidden_size": 96}


class RoundingCache(DynamicCache):
    """Stores keys and values of chosen layers as an engine would; attention reads them so."""

    def __init__(self, model, choices):
        super().__init__(config=model.config)
        self.model, self.choices = model, choices

    def update(self, keys, values, layer, *args, **kwargs):
        key, value = self.choices[layer]
        order = gguf_order(self.model, probe_of(self.model).rotations[layer], keys.shape[-1])
        if key >= 0:
            keys = round_trip(keys, NAMES[key], keys=True, order=order)
        if value >= 0:
            values = round_trip(values, NAMES[value], keys=False)
        return super().update(keys, values, layer, *args, **kwargs)


@torch.no_grad()
def log_likely(model, ids, choices):
    cache = RoundingCache(model, choices)
    logits = model(input_ids=torch.from_numpy(ids)[None], **cache_keyword(model, cache)).logits
    return logits[0].double().log_softmax(-1)


def made(kind="llama", n_tokens=30):
    layers = {"num_hidden_layers": 4} if kind in ("gemma3n", "qwen3_5") else {}
    model = tiny_model(kind, **SIZES, **layers)
    random = np.random.default_rng(0)
    ids = random.integers(2, VOCABULARY, n_tokens)
    return model, ids, FormatProbe(model, ids, NAMES, shape_of(model))


@pytest.mark.parametrize("kind", ["llama", "gemma3", "gemma3n", "qwen3_5"])
def test_losses_are_those_of_a_cache_that_rounds(kind):
    model, ids, probe = made(kind)
    n_layers = model.config.num_hidden_layers
    full = log_likely(model, ids, [(-1, -1)] * n_layers)

    def kl(choices):
        reduced = log_likely(model, ids, choices)
        return (full.exp() * (full - reduced)).sum(-1).numpy()

    for layer in range(n_layers):
        found = probe.single(layer)["kls"]
        for side, index in np.ndindex(2, len(NAMES)):
            choices = [[-1, -1] for _ in range(n_layers)]
            choices[layer][side] = index
            np.testing.assert_allclose(found[side, index], kl(choices), rtol=2e-3, atol=2e-6)
    mixtures = mixtures_of(NAMES, n_layers)[-2:]
    measured = probe.mixed(mixtures)
    for choices, kls, agrees in zip(mixtures, *measured.values(), strict=True):
        np.testing.assert_allclose(kls, kl(choices.tolist()), rtol=2e-3, atol=2e-6)
        same = log_likely(model, ids, choices.tolist()).argmax(-1) == full.argmax(-1)
        np.testing.assert_array_equal(agrees, same.double().numpy())


def test_mixtures_are_each_format_the_extremes_both_ways_and_some_at_random():
    mixtures = mixtures_of(NAMES, 4)
    assert mixtures.shape == (3 + 2 + 6, 4, 2)
    pairs = [(0, 0), (1, 1), (2, 2), (0, 1), (1, 0)]
    assert [tuple(one) for one in mixtures[:5, 0]] == pairs
    assert (mixtures[:5] == mixtures[:5, :1]).all()
    assert mixtures[:-3].min() == 0
    assert mixtures[-3:].min() == -1
    assert mixtures.max() == 2


def profiled(**options):
    model = tiny_model(**SIZES)
    texts = [words(400)]
    return profile_formats(
        model, WordTokenizer(), texts, **{"formats": NAMES, "context": 40, **options}
    )


def test_a_killed_job_goes_on_and_makes_the_same_file(tmp_path, monkeypatch):
    whole = profiled(output=tmp_path / "whole")
    assert FormatLosses.load(tmp_path / "whole") == whole
    assert whole.formats == NAMES
    assert whole.losses.shape == (3, 2, 3)
    assert whole.n_tokens == 3 * 40
    assert (whole.losses > 0).all()
    done = []

    def progress(count, total):
        done.append(total)
        if count == 6:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt, match="--resume|resume=True"):
        profiled(output=tmp_path / "part", progress=progress)
    count = 0

    def single(self, layer, original=FormatProbe.single):
        nonlocal count
        count += 1
        return original(self, layer)

    monkeypatch.setattr(FormatProbe, "single", single)
    profiled(output=tmp_path / "part", resume=True)
    assert (tmp_path / "part").read_bytes() == (tmp_path / "whole").read_bytes()
    assert count < 3 * 3
    assert {*done} == {3 * 4}
    with pytest.raises(InputError, match="nothing to resume from"):
        profiled(resume=True)


def test_a_head_size_that_a_format_cannot_hold_and_latents_are_refused_by_name():
    with pytest.raises(InputError, match=r"mlx_8_64 stores blocks of 64 .* have 32; take mlx_4_32"):
        profiled(formats=["mlx-lm"])
    with pytest.raises(InputError, match="no engine or format 'llama'"):
        profiled(formats=["llama"])
    assert formats_of(["vllm"]) == ("fp8", "fp8_e5m2")
    model = tiny_model("deepseek_v3")
    with pytest.raises(UnsupportedModelError, match="stores latents instead of K and V"):
        profile_formats(model, WordTokenizer(), [words(400)], formats=["vllm"], context=40)
