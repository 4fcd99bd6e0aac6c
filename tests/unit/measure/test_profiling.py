"""From a model and text to a score profile."""

from functools import partial

import numpy as np
import pytest
import scorer_oracle
import torch
from factories import curves_of
from prompt_runs import states_seen
from tiny_models import WordTokenizer, tiny_model, tiny_profile, words

import kvalloc
from kvalloc.errors import InputError
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure import Prompt
from kvalloc.measure.job import LossPlan

TOKENIZER = WordTokenizer()


measure = partial(tiny_profile, samples=3)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_agrees_with_the_whole_attention_matrix(kind, attention):
    model = tiny_model(kind, attention=attention)
    found = measure(model, samples=2, sinks=3, window=5, pool=3)
    ids = TOKENIZER(words(300))["input_ids"]
    pieces = [torch.tensor([ids[start : start + 60]]) for start in range(0, 300, 60)]
    matched = 0
    for piece in pieces:
        seen = states_seen(model, piece).values()
        scores = [scorer_oracle.window_scores(one, window=5, sinks=3, pool=3) for one in seen]
        scores = np.concatenate(scores)[..., 3:55]
        for sample in range(2):
            if np.allclose(found.masses[sample], scores.sum(axis=-1), atol=1e-5):
                np.testing.assert_allclose(found.curves[sample], curves_of(scores), atol=1e-5)
                matched += 1
    assert matched == 2


def test_the_profile_says_how_it_was_made():
    found = measure(scorer="snapkv", window=9, group_reduce="max")
    assert found.shape.model_id == "tests/tiny"
    assert found.curves.shape == (3, 3, 2, 60 - 4 - 9 + 1)
    assert (found.sinks, found.window, found.context_tokens) == (4, 9, 60)
    assert found.scorer == "snapkv"
    assert found.scorer_parameters["group_reduce"] == "max"
    assert found.is_exact
    assert found.interpolation_error == 0
    assert found.text_description == "3 of 5 pieces of 60 tokens"
    assert found.versions["kvalloc"] == kvalloc.__version__
    assert {"torch", "transformers", "numpy"} < set(found.versions)
    assert found.created


def test_sliding_layers_get_no_curve_of_their_own():
    found = measure(tiny_model("gemma3"))
    assert found.shape.layer_types == ("sliding", "full", "sliding")
    assert np.all(found.curves[:, [0, 2]] == 1)
    assert np.all(found.masses[:, [0, 2]] == 0)
    assert np.all(found.masses[:, 1] > 0)
    assert np.all(found.curves[:, 1, :, 0] == 0)


def test_prompts_of_their_own_length():
    prompts = [Prompt(text=words(length, seed=length)) for length in (60, 30, 90, 13)]
    found = measure(texts=prompts, samples=4)
    assert found.sample_tokens.tolist() == [60, 30, 60, 13]
    assert found.evictable_tokens == 48
    # the third sample kept 1 evictable entry: its curve is the straight line
    np.testing.assert_allclose(found.curves[3, 0, 0], np.arange(49) / 48, atol=1e-12)
    alone = measure(texts=prompts[1:2], samples=1, context=30)
    np.testing.assert_allclose(
        np.interp(np.arange(19) / 18, np.arange(49) / 48, found.curves[1, 2, 1]),
        alone.curves[0, 2, 1],
        atol=0.02,
    )


def test_a_long_context_is_stored_on_a_grid():
    model = tiny_model(max_position_embeddings=8192, num_hidden_layers=1)
    found = measure(model, texts=[words(5000)], samples=1, context=5000)
    assert found.ranks.size <= 4097
    assert 0 < found.interpolation_error < 1e-3
    assert not found.is_exact


def broken_model():
    model = tiny_model()
    with torch.no_grad():
        model.model.layers[1].self_attn.k_proj.weight[0, 0] = float("nan")
    return model


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"texts": [Prompt(text="a b", name="p.jsonl", line=2)], "samples": 1}, "p.jsonl, line 2"),
        ({"model": broken_model()}, "tests/tiny in layer 1, sample 0 are not finite"),
    ],
)
def test_a_sample_that_cannot_be_measured_is_named(options, said):
    with pytest.raises(InputError, match=said):
        measure(**options)


class Killed(BaseException):
    pass


def stop_after(layers):
    def progress(done, total):
        if done == layers:
            raise Killed

    return progress


LOSSES = {"shares": (0.0, 0.2, 0.6), "continuation_tokens": 5}


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"loss": LossPlan(**LOSSES)},
        {"loss": LossPlan(method="fast", level="head", **LOSSES), "bits": (8, 4)},
        {"loss": LossPlan(level="head", **LOSSES)},
    ],
)
def test_a_stopped_job_goes_on_and_gives_the_same_bits(tmp_path, options):
    model, output, calls = tiny_model(), tmp_path / "s.safetensors", []
    whole = measure(model, samples=5, progress=lambda *counts: calls.append(counts), **options)
    assert calls[-1][0] == calls[-1][1]
    before_last = calls[-2][0]
    with pytest.raises(Killed):
        measure(model, samples=5, output=output, progress=stop_after(before_last), **options)
    folder = tmp_path / "s.safetensors.partial"
    assert len(list(folder.glob("sample_*"))) >= 4
    model.register_forward_hook(lambda *_: calls.append("forward"))
    calls.clear()
    again = measure(model, samples=5, output=output, resume=True, **options)
    n_resumed = len(calls)
    measure(model, samples=5, **options)
    assert not calls or n_resumed < len(calls) - n_resumed  # what was finished did not run again
    for name in ScoreProfile.model_fields:
        mine, theirs = getattr(again, name), getattr(whole, name)
        if isinstance(mine, np.ndarray):
            assert mine.tobytes() == theirs.tobytes(), name
    assert again.text_digest == whole.text_digest
    assert list(tmp_path.iterdir()) == [output]
    assert ScoreProfile.load(output).digest == again.digest


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"window": 9}, "scorer_parameters"),
        ({"context": 50}, "context_tokens"),
        ({"seed": 1}, "text_digest"),
        ({"model": tiny_model(seed=1)}, "weights"),
        ({"loss": "fast", "bits": (8,)}, "bits"),
        ({"loss": "fast"}, "losses"),
    ],
)
def test_another_job_is_not_resumed(tmp_path, changes, said):
    output = tmp_path / "x"
    with pytest.raises(Killed):
        measure(output=output, progress=stop_after(4))
    with pytest.raises(InputError, match=f"begun with {said}"):
        measure(**{"output": output, "resume": True, **changes})
