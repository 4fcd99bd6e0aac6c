"""A budget alone: rounded entries within a share of the bytes, evicted as the memory asks."""

import logging
from dataclasses import replace

import families
import numpy as np
import pytest
import torch
from cli_tools import run as run_command
from prompt_runs import generate
from tiny_models import WordTokenizer

import kvalloc
from kvalloc import units
from kvalloc.accounting.costs import POSITION_BYTES, head_bytes, plain_bytes
from kvalloc.errors import InputError
from kvalloc.extensions.saved import load_cache
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.formats.fitted import FittedModel
from kvalloc.models.loading import shape_of
from kvalloc.online import fitting
from kvalloc.online.decision import PromptSize
from kvalloc.online.default import DETAIL, Default
from kvalloc.online.methods import Immediate, SecondRead, Solved, method_for
from kvalloc.online.solved import LOOSE, grid_length, solve_share
from kvalloc.runtime.options import CacheOptions

TOKENS = 150


@pytest.fixture
def model(tiny):
    return tiny.tiny_model(head_dim=16)


def run(model, ids, new=18, **options):
    """The cache of a call with a budget."""
    with kvalloc.apply(model, **options) as applied:
        generate(model, ids, max_new_tokens=new, min_new_tokens=new)
    return applied.last_cache


def share_of(cache, rows=1):
    """What is stored of all tokens, counted here from the tensors, of a cache at 16 bits."""
    shape = cache.profile.shape
    layers = [cache.layers[index] for index in shape.full_layers]
    stored = sum(one.nbytes for layer in layers for one in layer.stored_tensors())
    entries = rows * len(layers) * shape.n_kv_heads * cache.get_seq_length()
    assert stored / (entries * 2 * 16 * 2) == pytest.approx(cache.share, abs=1e-9)
    return cache.share


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "bits", "way"),
    [
        ({"budget": "20%"}, 85, "reconstruction"),
        ({"budget": 0.3}, 85, "reconstruction"),
        ({"budget": "50%"}, 8, "reconstruction"),
        ({"budget": "14%"}, 5, "reconstruction"),
        ({"budget": "28%", "memory": "60KiB"}, 85, "lookahead"),
        ({"budget": "30%", "decode_every": 8}, 85, "reconstruction"),
        ({"budget": "34%"}, 85, "reconstruction"),
    ],
)
def test_no_more_than_the_share_is_stored_and_little_less(tiny, model, dtype, options, bits, way):
    model, share = model.to(dtype), Default.parse(options["budget"]).share
    if "memory" in options and dtype is torch.bfloat16:
        options = {**options, "memory": options["memory"].replace("60KiB", "45KiB")}
    cache = run(model, tiny.prompt(TOKENS), **options)
    assert np.unique(cache.profile.bits).tolist() == [bits]
    assert cache.profile.by_prompt
    assert cache.profile.policy.scorer == way
    found = share_of(cache)
    assert found <= share
    assert found > share - 0.04
    assert len(np.unique(cache.kept_tokens)) > 1  # handed out by the prompt
    prompt = run(model, tiny.prompt(TOKENS), new=1, **options)
    in_layers = np.unique(prompt.kept_tokens.sum(axis=1))  # by each layer where memory is short
    assert (len(in_layers) == 1) == ("memory" in options)


def test_it_says_which_way_what_it_takes_and_what_it_costs(tiny, model, caplog):
    with caplog.at_level(logging.INFO, logger="kvalloc.online.default"):
        twice = run(model, tiny.prompt(TOKENS), budget="20%")
        early = run(model, tiny.prompt(TOKENS), budget="20%", memory="60KiB")
        full = run(model, tiny.prompt(TOKENS), budget=1)
    said = caplog.messages
    details = [one.profile.detail for one in (twice, early, full)]
    assert details == [
        f"57% evicted, at 5 to 8 bits; 14.75 KiB (19.7%); nothing measured: {action}"
        for action in ("reads the prompt twice", "evicts while the prompt is read")
    ] + ["nothing evicted, nothing rounded; 150 KiB; nothing measured"]
    assert all(len(detail) <= DETAIL for detail in details)
    assert "; reads the prompt twice and holds the full cache meanwhile; about" in said[0]
    assert "; evicts while the prompt is read; about" in said[1]
    for one, cost in zip(said, (SecondRead.cost, Immediate.cost, 1.0), strict=True):
        assert f" KiB while it is read, and {cost} times a plain prefill" in one
    assert "; evicts nothing; about 150 KiB while it is read" in said[2]


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("budget", ["20%", None, "3%", "100%"])
@pytest.mark.parametrize("fitted", [False, True])
def test_a_line_of_detail_has_at_most_100_characters(
    tiny, model, fitted_file, rows, budget, fitted
):
    memory = None if budget else rows * 70 * 2**10
    options = CacheOptions(fitted=str(fitted_file) if fitted else None, memory=memory)
    default = Default.parse(budget, options)
    for lengths in ((TOKENS,) * rows, (14, TOKENS)[-rows:], (3,) * rows):
        size = PromptSize(tokens=max(lengths), lengths=lengths)
        detail = default.cache(model, size).profile.detail
        assert 20 < len(detail) <= DETAIL
        assert "evicted, " in detail


def test_the_profile_is_a_file_and_the_cache_another(tiny, model, tmp_path):
    cache = run(model, tiny.prompt(TOKENS), budget="20%")
    cache.profile.save(tmp_path / "p.json")
    loaded = BudgetProfile.load(tmp_path / "p.json")
    assert loaded == cache.profile
    told = run_command("inspect", tmp_path / "p.json").out
    assert "as many entries in every head as take 20.0% of a cache at 16 bits" in told
    assert "as many entries as take 20.0% of the bytes of a cache at 16 bits" in told
    assert "by hand, head level" in told
    kvalloc.save_cache(cache, tmp_path / "c.kv")
    again = load_cache(tmp_path / "c.kv", model)
    assert again.retained_bytes == cache.retained_bytes
    for tokens in (60, 151, 400):
        granted = 0.2 * loaded.budgets.size * tokens * 4 * 16
        assert loaded.retained_bytes_at(tokens) <= granted
    with pytest.raises(InputError, match="share_of_16_bits is given beside other budgets"):
        loaded.replace(budgets=loaded.budgets - 1)


@pytest.mark.parametrize("tokens", [1, 2, 5, 12, 20])
@pytest.mark.parametrize(
    "options",
    [{}, {"decode_every": 64}, {"memory": "1MiB"}, {"scorer": "snapkv"}],
)
def test_a_prompt_too_short_for_its_share_is_kept_whole(tiny, model, tokens, options):
    for share, dtype in (("20%", torch.float32), ("2%", torch.bfloat16)):
        cache = run(model.to(dtype), tiny.prompt(tokens), new=1, budget=share, **options)
        assert (cache.kept_tokens == tokens).all()
        assert "too short" in cache.profile.detail
        # Rounded where that saves bytes; where the model is in float32, positions are stored.
        positions = POSITION_BYTES * tokens * cache.profile.budgets.size
        stored = cache.retained_bytes - positions * (dtype == torch.float32)
        assert stored <= cache.full_bytes
        bits = (
            Default.parse(share).setting(cache.profile.shape).bits
        )  # of two tokens 8 save nothing
        saves = head_bytes(tokens, bits, cache.profile.shape) < tokens * 2 * 16 * 2
        rounded = not options.get("scorer") and saves
        assert (stored < cache.full_bytes) == rounded
        stored = kvalloc.make_cache(model, cache.profile)  # the same as a stored profile
        generate(model, tiny.prompt(tokens), max_new_tokens=1, past_key_values=stored)
        assert stored.retained_bytes == cache.retained_bytes


@pytest.mark.parametrize("options", [{}, {"memory": "150KiB"}])
@pytest.mark.parametrize("kind", ["llama", "gemma3"])
def test_a_row_of_padding_alone_is_answered_as_the_plain_model_does(tiny, kind, options):
    model, ids = tiny.tiny_model(kind, head_dim=16), tiny.prompt(TOKENS, 2)
    mask = torch.ones_like(ids)
    mask[0] = 0
    plain = generate(model, ids, attention_mask=mask, max_new_tokens=20)
    with kvalloc.apply(model, budget="20%", **options) as applied:
        reduced = generate(model, ids, attention_mask=mask, max_new_tokens=20)
    assert torch.equal(reduced[0], plain[0])
    assert applied.last_cache.kept_tokens_by_row[0].max() == 19
    assert applied.last_cache.kept_tokens_by_row[1].max() > 19


@pytest.mark.parametrize(
    ("budget", "tokens", "options", "scorer"),
    [
        ("20%", TOKENS, {}, "reconstruction"),
        ("20%", TOKENS, {"decode_every": 8}, "reconstruction"),  # has no part in it
        ("20%", 760, {}, "reconstruction"),  # a piece of 256, and 8 that lead over, of 1,024
        ("20%", 761, {}, "lookahead"),
        ("100%", TOKENS, {}, None),
    ],
)
def test_a_way_is_chosen_by_numbers(model, budget, tokens, options, scorer):
    default = Default.parse(budget, CacheOptions(**options))
    profile = default.cache(model, PromptSize(tokens=tokens)).profile
    assert (profile.policy.scorer if profile.reduces else None) == scorer


def test_embeddings_are_read_again_as_tokens_are(tiny, model):
    ids = tiny.prompt(TOKENS)
    kept = []
    for prompt in ({"input_ids": ids}, {"inputs_embeds": model.get_input_embeddings()(ids)}):
        with torch.no_grad(), kvalloc.apply(model, budget="20%") as applied:
            model(**prompt)
        assert applied.last_cache.profile.policy.scorer == "reconstruction"
        kept.append(applied.last_cache.kept_indices(1))
    assert torch.equal(*kept)


def test_values_are_not_fitted_where_queries_cannot_be_put_elsewhere(tiny):
    cache = run(families.family("gpt2"), tiny.prompt(TOKENS), budget="30%")
    assert cache.profile.policy.scorer == "reconstruction"
    assert cache.profile.policy.name == "score"
    assert 0.26 < cache.share <= 0.3


def test_a_fitted_file_is_of_one_model_and_goes_with_a_budget(tiny, model, fitted_file):
    """Where the memory asks for eviction layer by layer, its surrogate chooses alone."""
    options = CacheOptions(fitted=str(fitted_file))
    little = Default.parse("20%", replace(options, memory=120 * 2**10))
    early = little.cache(model, PromptSize(tokens=TOKENS, chunked=True))
    assert early.profile.policy.scorer == "surrogate"
    assert early.profile.by_prompt
    for other in ({"target_retention": 0.9}, {"budget": "20%", "scorer": "snapkv"}):
        with pytest.raises(InputError, match="fitted goes with budget, memory or target_loss"):
            kvalloc.apply(model, fitted=fitted_file, **other)
    with pytest.raises(kvalloc.KVAllocError, match="is for tiny with head_dim 16"):
        Default.parse("20%", options).cache(tiny.tiny_model(head_dim=32), PromptSize(tokens=TOKENS))


def test_a_prompt_is_read_twice_if_fit_measured_that_this_loses_far_less(
    tiny, model, fitted_file, tmp_path
):
    """But once within a memory, which a second read exceeds, and beyond the model's context."""
    fitted, file = FittedModel.load(fitted_file), tmp_path / "twice.safetensors"
    (first, *others), shape = fitted.scores.errors, shape_of(model)
    for ratio, way in ((0.5, SecondRead), (0.9, Solved)):
        error = first.replace(second_read=ratio * first.loss)
        fitted.with_errors((error, *others)).save(file)
        default = Default.parse("10%", CacheOptions(fitted=str(file)))
        assert type(method_for(default.setting(shape), TOKENS)) is way
        assert type(method_for(default.setting(shape), TOKENS, limit=TOKENS)) is Solved
        assert not replace(default.setting(shape), share=0.2).reads_twice
        short = replace(default.setting(shape), share=0.02)  # a second read would keep all of it
        assert short.entries(13) == 13
        assert not isinstance(method_for(short, 13), SecondRead)
    fitted.with_errors((first.replace(second_read=0.5 * first.loss), *others)).save(file)
    cache = run(model, tiny.prompt(TOKENS), budget="10%", fitted=file)
    loss = f"{0.5 * first.loss:.2g}"
    assert cache.profile.detail.endswith(f"predicted loss {loss} nats, read twice")
    below = SecondRead(setting=replace(default.setting(shape), share=0.09), measured=True)
    assert below.predicted_loss is None  # nothing was measured there
    assert share_of(cache) <= 0.1
    cache = run(model, tiny.prompt(TOKENS), budget="10%", fitted=file, memory="1MiB")
    assert "predicted loss" in cache.profile.detail


@pytest.mark.parametrize("add_up", [0.0, 1e9])
def test_a_second_read_is_measured_where_single_losses_do_not_add_up(
    tiny, tmp_path, monkeypatch, add_up
):
    monkeypatch.setattr(fitting, "ADD_UP", add_up)
    texts = [" ".join(f"word{(7 * i * i) % 89}" for i in range(2000))]
    lines = list[str]()
    how = {
        "output": tmp_path / "f.safetensors",
        "samples": 4,
        "context": 64,
        "notify": lines.append,
    }
    errors = kvalloc.fit(tiny.tiny_model(head_dim=16), WordTokenizer(), texts, **how).scores.errors
    assert any("second reads of" in line for line in lines) == (add_up == 0)
    known = {one.share for one in errors if one.second_read}
    assert known == ({0.1} if add_up == 0 else set())
    assert all(one.p99 is None for one in errors)  # too few tokens


def test_any_share_is_solved_from_a_fitted_file(tiny, model, fitted_file, tmp_path):
    """A budget profile with a bound, of which every claim is verified from the two files."""
    file, profile = fitted_file, tmp_path / "p.json"
    fitted = FittedModel.load(file)
    assert [one.share for one in fitted.scores.errors] == [0.1, 0.2]
    assert file.stat().st_size < 2 * 2**20
    predicted, sources = [], set()
    for share in (0.13, 0.2, 0.5):
        cache = run(model, tiny.prompt(TOKENS), budget=share, fitted=file)
        own = cache.profile
        assert share - 0.04 < own.share_at(TOKENS) <= share
        assert share_of(cache) <= share
        proven = own.bound_source == "dual"
        assert own.gap <= LOOSE
        assert proven or (own.bound_source, own.termination) == ("dp", "optimal")
        assert f"predicted loss {own.expected_loss:.2g} nats a token" in own.detail
        own.save(profile)
        assert run_command("verify", profile, file).code == (0 if proven else 3)
        sources.add(own.bound_source)
        predicted.append(own.predicted_loss)
        stored = kvalloc.make_cache(model, own)  # the same as a stored profile
        generate(model, tiny.prompt(TOKENS), max_new_tokens=1, past_key_values=stored)
        assert stored.kept_tokens.tolist() == own.budgets_for(TOKENS).tolist()
    assert predicted == sorted(predicted, reverse=True)
    assert sources == {"dual", "dp"}
    again = run(model, tiny.prompt(TOKENS + 3), budget=0.37, fitted=file)
    assert again.profile.context_tokens == grid_length(TOKENS + 3) == grid_length(TOKENS)
    assert (
        "too short for 20.0%" in run(model, tiny.prompt(14), budget=0.2, fitted=file).profile.detail
    )


def test_a_loss_is_asked_for_and_the_least_share_predicted_to_keep_it_is_taken(
    tiny, model, fitted_file
):
    shares = []
    for loss in (0.05, 0.01, 0.001, 1e-9):
        profile = run(model, tiny.prompt(TOKENS), target_loss=loss, fitted=fitted_file).profile
        shares.append(profile.requested["value"])
        if shares[-1] < 1:
            assert 0 < profile.predicted_loss * profile.model_error <= loss
            less = solve_share(str(fitted_file), shares[-1] - 0.001, grid_length(TOKENS))
            assert less is None or less.predicted_loss * less.model_error > loss
    assert shares == sorted(shares)
    assert shares[0] < shares[2]
    assert shares[-1] == 1


def test_a_loss_of_99_percent_of_the_tokens_is_asked_for(tiny, model, fitted_file, tmp_path):
    def share(loss, file):
        profile = run(model, tiny.prompt(TOKENS), target_loss=loss, fitted=file).profile
        return profile.requested["value"]

    fitted, file = FittedModel.load(fitted_file), tmp_path / "tails.safetensors"
    errors = [one.replace(p99=10 * one.loss) for one in fitted.scores.errors]
    fitted.with_errors(tuple(errors)).save(file)
    assert share("0.1@99%", file) == share(0.01, file) > share("0.5@99%", file)
    for loss, words in (
        ("0.1@99%", "is about single tokens"),
        ("0.1@99.9%", "'0.1@99%'"),
        (" 0.1 @ 90% ", "'0.1@99%'"),
        ("little", "not a loss in nats"),
    ):
        with pytest.raises(InputError, match=words):
            share(loss, fitted_file)
    with pytest.raises(InputError, match="cannot be solved for"):
        kvalloc.solve(fitted.scores, target_loss="0.1@99%")


@pytest.mark.parametrize("share", [0.2, 0.5])
def test_a_share_is_never_exceeded_at_lengths_that_are_not_solved(share):
    """Of some lengths blocks of keys have more scales; nearly all that is granted is kept."""
    for tokens in (192, 640):
        solved = solve_share("smollm2-135m-instruct", share, tokens)
        shares = [solved.share_at(longer) for longer in range(tokens, 2 * tokens, 3)]
        assert 0.85 * share < min(shares) <= max(shares) <= share


def test_what_a_fitted_file_decides_takes_what_it_says(tiny, model, fitted_file):
    """Entries and bits of each head, within the peak that is stated, in rows and in chunks."""
    options = CacheOptions(fitted=str(fitted_file))
    default, shape = Default.parse("20%", options), shape_of(model)
    cache = run(model, tiny.prompt(TOKENS), budget="20%", fitted=fitted_file)
    assert cache.profile.requested["objective"] == "loss"  # how it was decided stays
    way = method_for(default.setting(shape), TOKENS)
    assert isinstance(way, Solved)
    peak = way.peak_bytes(PromptSize(tokens=TOKENS))
    assert peak == cache.profile.peak_bytes_at(TOKENS)
    whole = run(model, tiny.prompt(TOKENS), budget="20%", fitted=fitted_file, memory=f"{peak}B")
    assert "predicted loss" in whole.profile.detail
    chunked = default.cache(model, PromptSize(tokens=TOKENS, chunked=True))
    assert "predicted loss" in chunked.profile.detail
    full = way.peak_bytes(PromptSize(tokens=TOKENS, chunked=True))
    assert full > plain_bytes(shape, TOKENS)
    within = replace(default, options=replace(options, memory=full - 1))
    short = within.cache(model, PromptSize(tokens=TOKENS, chunked=True))
    assert len(np.unique(short.profile.bits)) == 1
    rows = run(model, tiny.prompt(TOKENS, 2), budget="20%", fitted=fitted_file)
    assert "predicted loss" in rows.profile.detail
    assert 0.16 < share_of(rows, 2) <= 0.2


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("fits", ["fitted", "not fitted"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_memory_alone_is_the_largest_budget_whose_peak_fits(
    tiny, model, fitted_file, dtype, fits, rows, chunked
):
    model, found = model.to(dtype), {}
    options = CacheOptions(fitted=str(fitted_file) if fits == "fitted" else None)
    size = PromptSize(tokens=TOKENS, lengths=(TOKENS,) * rows, chunked=chunked)
    plain = plain_bytes(shape_of(model), TOKENS, rows)
    for part in (0.35, 0.5, 0.6, 0.9, 1.4):
        within = replace(options, memory=int(part * plain))
        cache = Default.parse(options=within).cache(model, size)
        profile = cache.profile
        if not chunked:
            model(tiny.prompt(TOKENS, rows), past_key_values=cache)
            assert cache.retained_bytes <= within.memory
        share = profile.requested["value"]
        found.setdefault(profile.predicted_loss is None, []).append(share)
        assert profile.target_text == units.size(within.memory)
        alike = Default.parse(share, within).cache(model, size).profile
        assert (alike.budgets == profile.budgets).all()
        assert (alike.widths == profile.widths).all()
        # else fewer, but decided; and from 75% on all entries fit, at 8 bits
        if share < 0.65 and (dtype == torch.float32 or fits != "fitted"):
            with pytest.raises(InputError, match="needs"):
                Default.parse(min(share + 0.05, 1), within).cache(model, size)
        if share < 1 and fits == "fitted" and not chunked and part > 0.6:
            assert isinstance(profile.predicted_loss, float)
    assert all(shares == sorted(shares) for shares in found.values())
    assert share == 1
    assert not profile.reduces
