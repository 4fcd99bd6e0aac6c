"""Budgets decided from the prompt itself."""

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import CONTEXT, SINKS, TARGET, WINDOW, applied, generate, run

import kvalloc
from kvalloc.accounting.costs import reading_bytes
from kvalloc.errors import InfeasibleError, UnsupportedRequestError
from kvalloc.extensions.making import make_cache
from kvalloc.measure.profiling import prompt_scores
from kvalloc.models.loading import shape_of
from kvalloc.online.decision import PromptSize
from kvalloc.online.per_prompt import PromptTarget
from kvalloc.scorers import get_scorer


def scores_of(model, ids):
    """What the mini-prefill is to measure, by the parts it is made of."""
    return prompt_scores(
        model,
        ids.numpy().astype(np.int64),
        scorer=get_scorer("xkv", **WINDOW),
        sinks=SINKS,
        shape=shape_of(model),
    )


def made(model, ids, mask=None, **asked):
    """A cache whose budgets are decided from rows of token ids."""
    mask = torch.ones_like(ids) if mask is None else mask
    rows = tuple(row[shown.bool()].numpy() for row, shown in zip(ids, mask, strict=True))
    size = PromptSize(tokens=ids.shape[1], lengths=tuple(map(len, rows)), rows=rows)
    return PromptTarget.parse(**asked, **TARGET).cache(model, size)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("level", ["layer", "head"])
def test_a_target_is_what_profile_and_solve_give_the_prompt(family, level):
    model = tiny.tiny_model(family)
    ids = tiny.prompt(CONTEXT)
    expected = kvalloc.solve(scores_of(model, ids[0]), target_retention=0.7, level=level)
    by_hand = make_cache(model, expected)
    answer = generate(model, ids, past_key_values=by_hand)
    by_hand.end_turn()
    with kvalloc.apply(model, target_retention=0.7, level=level, **TARGET) as applying:
        assert torch.equal(generate(model, ids), answer)
    cache = applying.last_cache
    assert (cache.profile.budgets == expected.budgets).all()
    assert cache.profile.retention >= 0.7 - 1e-9
    assert cache.retained_bytes == by_hand.retained_bytes
    assert cache.retained_bytes < cache.full_bytes
    assert cache.decision_seconds > 0
    assert by_hand.decision_seconds is None


PEAK = 4 * 2 * 20 * (64 + 4) + 2 * CONTEXT * 128
"""Of 20 entries a head with their positions, and one layer in full."""


@pytest.mark.parametrize(
    "target",
    [{"budget": "30%"}, {"budget": 0.3}, {"budget_tokens": 20}, {"memory": PEAK}],
)
def test_every_target_of_a_size_is_met(model, target):
    cache = applied(model, tiny.prompt(CONTEXT), **target, **TARGET)
    most = 0.3 * cache.full_bytes if "budget" in target else 4 * 2 * 20 * (64 + 4)
    assert most - 4 * 2 * (64 + 4) < cache.retained_bytes <= most


@pytest.mark.parametrize("target", [{"budget": "30%"}, {"budget_tokens": 20}])
def test_a_conversation_that_begins_with_few_tokens_comes_to_the_size_that_was_asked(model, target):
    """Of its first prompt nothing can go."""
    with kvalloc.apply(model, **target, **TARGET) as applying:
        for first in (4, 8):
            generate(model, tiny.prompt(first), max_new_tokens=1)
            cache = applying.last_cache
            assert (cache.kept_tokens == first).all()
            generate(model, tiny.prompt(CONTEXT), past_key_values=cache, max_new_tokens=1)
            assert cache.get_seq_length() == CONTEXT
            assert 16 <= cache.kept_tokens.mean() <= 20
            assert "budget" not in target or 0.27 < cache.share <= 0.3


def test_chunks_beams_and_several_answers(model):
    ids = tiny.prompt(CONTEXT, 2)
    with kvalloc.apply(model, target_retention=0.7, **TARGET) as applying:

        def kept(**options):
            generate(model, ids, **options)
            return applying.last_cache.kept_tokens_by_row

        expected = kept(max_new_tokens=1)
        assert (kept(max_new_tokens=1, prefill_chunk_size=16) == expected).all()
        beams = kept(max_new_tokens=1, prefill_chunk_size=16, num_beams=3)
        assert (beams == expected.repeat(3, axis=0)).all()
        longer = kept(num_beams=3)
        assert longer.shape[0] == 6
        assert longer.min() >= expected.min()


def test_rows_of_a_file_have_the_budgets_of_their_own_prompts(model, tmp_path):
    ids = tiny.prompt(CONTEXT, 2)
    rows = made(model, ids, target_retention=0.7)
    run(model, ids, rows)
    kvalloc.save_cache(rows, tmp_path / "rows")
    again = kvalloc.load_cache(tmp_path / "rows", model)
    for one, two in zip(rows.row_profiles, again.row_profiles, strict=True):
        assert (one.budgets == two.budgets).all()
    question = tiny.prompt(3, 2, seed=7)
    assert torch.equal(run(model, question, rows), run(model, question, again))
    again.batch_select_indices(torch.tensor([1]))
    assert (again.row_profiles[0].budgets == rows.row_profiles[1].budgets).all()
    again.reset()
    with pytest.raises(UnsupportedRequestError, match="decided from another prompt; make a new"):
        run(model, tiny.prompt(CONTEXT, seed=1), again)


def test_memory_is_for_all_rows_also_where_they_are_equal(model):
    for rows in (2, 3):
        cache = made(model, tiny.prompt(CONTEXT).repeat(rows, 1), memory="90KiB")
        run(model, tiny.prompt(CONTEXT).repeat(rows, 1), cache)
        (profile,) = {id(one): one for one in cache.row_profiles}.values()
        assert 0.97 * 90 * 1024 < profile.peak_bytes_at(CONTEXT, rows) <= 90 * 1024
    with pytest.raises(InfeasibleError, match="memory='1KiB' is below the 2,560"):
        made(model, tiny.prompt(5), memory="1KiB")


@pytest.mark.parametrize("padding", [(30, 0), (30, 10)])
def test_of_rows_of_different_length_all_columns_are_in_memory_while_they_are_read(model, padding):
    mask = torch.ones(2, CONTEXT, dtype=torch.long)
    for row, hidden in enumerate(padding):
        mask[row, :hidden] = 0
    ids = tiny.prompt(CONTEXT, 2)
    cache = made(model, ids, mask, memory="70KiB")
    run(model, ids, cache, mask)
    shape, (short, long) = shape_of(model), cache.row_profiles
    assert short.requested["bytes"] == long.requested["bytes"]
    kept = [
        one.peak_bytes_at(own) - reading_bytes(shape, own)
        for one, own in zip((short, long), mask.sum(dim=1).tolist(), strict=True)
    ]
    assert 0.9 * 70 * 1024 < sum(kept) + reading_bytes(shape, CONTEXT, 2) <= 70 * 1024
