"""The surrogate: normal equations against direct least squares, a fit of a tiny model, its file."""

import operator
from functools import reduce

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from prompt_runs import states_seen
from scorer_oracle import halves, make_states
from surrogates import fit_surrogate
from tiny_models import WordTokenizer, equal_budgets, tiny_model, words

import kvalloc
from kvalloc.errors import InputError, ModelMismatchError, ProfileFileError, UnsupportedRequestError
from kvalloc.extensions.making import make_cache
from kvalloc.measure.sampling import choose_samples
from kvalloc.measure.scorer_fitting import NormalEquations
from kvalloc.scorers import get_scorer
from kvalloc.scorers.surrogate import entry_features

CONTEXT = 60


def fit(model=None, **options):
    values = {"context": CONTEXT, "samples": 4, "model_id": "tests/tiny", **options}
    return fit_surrogate(model or tiny_model(), WordTokenizer(), [words(400)], **values)


@pytest.fixture(scope="module")
def fitted():
    return fit()


@pytest.fixture
def file(fitted, tmp_path):
    path = tmp_path / "surrogate.safetensors"
    fitted.save(path)
    return path


@settings(deadline=None)
@given(
    seed=st.integers(0, 10**6),
    sizes=st.lists(st.integers(1, 12), min_size=1, max_size=6),
    n_features=st.integers(1, 5),
    ridge=st.sampled_from([1e-3, 0.1, 1.0]),
    constant=st.booleans(),
)
def test_sums_are_a_direct_least_squares(seed, sizes, n_features, ridge, constant):
    rng = np.random.default_rng(seed)
    x, y = rng.normal(3, 2, (sum(sizes), n_features)), rng.normal(-5, 1, sum(sizes))
    if constant:
        x[:, 0] = 7.5
    ends = np.cumsum(sizes)[:-1]
    sums = [
        NormalEquations.of(*one) for one in zip(np.split(x, ends), np.split(y, ends), strict=True)
    ]
    total = reduce(operator.add, sums)
    weights = total.fit(ridge)
    scale = np.where(np.ptp(x, axis=0) > 0, x.std(axis=0), np.inf)
    stacked = np.vstack(
        [(x - x.mean(axis=0)) / scale, np.sqrt(ridge * len(y)) * np.eye(n_features)]
    )
    aimed = np.concatenate([y - y.mean(), np.zeros(n_features)])
    direct = np.linalg.lstsq(stacked, aimed, rcond=None)[0] / scale
    np.testing.assert_allclose(weights[:-1], direct, atol=1e-7)
    predicted = x @ weights[:-1] + weights[-1]
    np.testing.assert_allclose(predicted, y.mean() + (x - x.mean(axis=0)) @ direct, atol=1e-6)
    if np.ptp(y) > 0:
        explained = 1 - ((y - predicted) ** 2).sum() / ((y - y.mean()) ** 2).sum()
        assert total.r_squared(weights) == pytest.approx(explained, abs=1e-6)
    else:
        assert total.r_squared(weights) == 0


def test_the_fit_is_that_of_all_tokens_of_all_samples(fitted):
    """Against the model's own eager attention over a prompt written twice, and lstsq."""
    model, tokenizer, heads = tiny_model(attention="eager"), WordTokenizer(), 2
    chosen = choose_samples(
        [words(400)], tokenizer, context_tokens=CONTEXT, least_tokens=8, samples=4
    )
    x, y = [[] for _ in range(3)], [[] for _ in range(3)]
    for sample in chosen.samples:
        ids = torch.from_numpy(np.concatenate([sample.token_ids, sample.token_ids]))[None]
        seen = states_seen(model, ids)
        with torch.no_grad():
            attentions = model(ids, output_attentions=True).attentions
        for layer, weights in enumerate(attentions):
            # over the first copy and the second one so far, as no piece comes before
            best = (
                weights[0, :, CONTEXT:, :CONTEXT].amax(dim=1).view(heads, -1, CONTEXT).amax(dim=1)
            )
            x[layer].append(entry_features(seen[layer])[0, :, 4:CONTEXT].double().numpy())
            y[layer].append(best[:, 4:].clamp(min=1e-6).log().double().numpy())
    for layer in range(3):
        rows, targets = np.concatenate(x[layer], axis=1), np.concatenate(y[layer], axis=1)
        expected = NormalEquations.of(rows, targets).fit(fitted.ridge)
        np.testing.assert_allclose(fitted.weights[layer], expected, rtol=1e-3, atol=1e-3)
    assert fitted.r_squared.shape == (3,)
    assert (fitted.r_squared < 1).all()


def test_the_scorer_is_a_direct_computation(fitted, file):
    """Numbers one by one, with half of the rotation undone at each position."""
    frequencies = [1.0, 0.1, 0.01, 0.001]
    states = make_states(batch=2, head_dim=8, rotation=halves(*frequencies), n_tokens=12)
    found = get_scorer("surrogate", file=str(file), window=3, votes=0).score(states, sinks=2)
    for row, head, token in np.ndindex(2, 2, 12):
        key, value = (
            one[row, head, token].double().numpy() for one in (states.keys, states.values)
        )
        pairs = (key[:4] + 1j * key[4:]) * np.exp(-1j * token * np.array(frequencies))
        features = [
            *pairs.real, *pairs.imag, *value, *np.abs(pairs),
            np.log(np.linalg.norm(key)), np.log(np.linalg.norm(value)), 1.0,
        ]  # fmt: skip
        expected = np.exp(np.dot(features, fitted.weights[0, head])) if 2 <= token < 9 else 0.0
        assert found[row, head, token] == pytest.approx(expected, rel=1e-3)


def test_what_cannot_be_fitted_is_refused():
    broken = tiny_model()
    broken.model.layers[1].self_attn.k_proj.register_forward_hook(
        lambda module, args, out: out / (out.shape[1] == 1)  # the model has been looked at
    )
    for options, said in (
        (
            {"context": 300, "samples": 1},
            "prompts of 300 tokens are read twice.*choose context=256 or less",
        ),
        ({"samples": 1}, "at least 2 samples"),
        ({"model": broken}, "tests/tiny in layer 1, sample 0 are not finite numbers"),
    ):
        with pytest.raises(InputError, match=said):
            fit(**options)


def test_only_full_layers_are_fitted():
    found = fit(tiny_model("gemma3"))
    assert found.weights.shape[:2] == (1, 2)
    assert found.shape.full_layers == (1,)


def test_missing_and_other_files_are_refused(tmp_path):
    with pytest.raises(InputError, match="file is '', expected what 'kvalloc fit' wrote"):
        get_scorer("surrogate")
    with pytest.raises(InputError, match="there is no fitted file .*none: no such file"):
        get_scorer("surrogate", file=str(tmp_path / "none"))
    (tmp_path / "text").write_text("no such thing")
    with pytest.raises(ProfileFileError, match="expected a fitted file or a surrogate"):
        get_scorer("surrogate", file=str(tmp_path / "text"))


def test_another_model_is_refused_before_it_runs(fitted, file):
    model = tiny_model()
    profile = equal_budgets(model, 20)
    options = {"policy": f"surrogate:file={file}"}
    assert make_cache(model, profile, **options) is not None
    twin, deeper = tiny_model(seed=1), tiny_model(num_hidden_layers=4)
    said = f"surrogate {file} is for the weights of tests/tiny.*'kvalloc fit'"
    with pytest.raises(ModelMismatchError, match=said):
        make_cache(twin, equal_budgets(twin, 20), **options)
    assert make_cache(twin, equal_budgets(twin, 20), allow_other_model=True, **options) is not None
    with pytest.raises(ModelMismatchError, match="n_layers 3, but the model is .* n_layers 4"):
        make_cache(deeper, equal_budgets(deeper, 20), allow_other_model=True, **options)
    with pytest.raises(ModelMismatchError, match="is for the weights of tests/tiny"):
        kvalloc.profile(
            twin, WordTokenizer(), [words(300)], context=CONTEXT, samples=2,
            scorer=f"surrogate:file={file}",
        )  # fmt: skip
    states = make_states(head_dim=4, rotation=halves(1.0, 0.1))
    with pytest.raises(UnsupportedRequestError, match="was not fitted to layer 0 of this model"):
        get_scorer("surrogate", file=str(file)).score(states, sinks=0)


def test_a_profile_can_be_measured_with_it(file):
    scores = kvalloc.profile(
        tiny_model(), WordTokenizer(), [words(300)], context=CONTEXT, samples=2,
        scorer=f"surrogate:file={file}:window=5",
    )  # fmt: skip
    assert scores.scorer_parameters.items() >= {"file": str(file), "window": 5}.items()
    assert (scores.masses > 0).all()
