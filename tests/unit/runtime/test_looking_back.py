"""Policies that look back over more queries than the window, in chunks with evictions between."""

from __future__ import annotations

from typing import Any

import pytest
import runtime_oracle as tiny
import torch
from prompt_runs import states_seen

from kvalloc.models.attention import AttentionStates
from kvalloc.runtime import make_cache
from kvalloc.runtime.policies import base, changed_policy

CONTEXT = 60
PARAMETERS = {"mpcache": {"rows_share": 0.5}, "nacl": {"proxy_share": 0.5}}


def attention_in_loops(
    states: AttentionStates, queries: torch.Tensor, places: list[int], columns: torch.Tensor
) -> torch.Tensor:
    """Sum over rows of the softmax over the stored keys at or before each, (batch, heads, n)."""
    batch, heads, n, _ = states.keys.shape
    group = queries.shape[1] // heads
    out = torch.zeros(batch, heads, n)
    for row in range(batch):
        for head in range(heads):
            for asked in range(head * group, (head + 1) * group):
                for place in places:
                    logits = states.keys[row, head] @ queries[row, asked, place] * states.scaling
                    seen = columns[row, head] <= place
                    weights = logits.masked_fill(~seen, float("-inf")).softmax(-1)
                    out[row, head] += weights / group
    return out


@pytest.mark.parametrize(
    ("policy", "level"), [("mpcache", "layer"), ("nacl", "layer"), ("nacl", "head")]
)
def test_each_query_sees_what_is_left_before_it(
    model: Any, monkeypatch: pytest.MonkeyPatch, policy: str, level: str
) -> None:
    profile = tiny.make_profile(model, CONTEXT, 0.3)
    if level == "head":
        profile = tiny.by_head(profile, spread=4)
    changed = changed_policy(profile.policy, policy, PARAMETERS[policy])
    cache = make_cache(model, profile, prompt_tokens=CONTEXT, policy=changed)
    ids = tiny.prompt(CONTEXT)
    seen: list[tuple[AttentionStates, torch.Tensor]] = []
    summed = base.weighted_rows

    def spy(states: AttentionStates, weights: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = summed(states, weights)
        if states.layer == 0:
            seen.append((states, found))
        return found

    monkeypatch.setattr(base, "weighted_rows", spy)
    queries = states_seen(model, ids)[0].queries  # which no eviction changes
    group = tiny.N_QUERY_HEADS // tiny.N_KV_HEADS
    end = checked = 0
    for part in ids.split(10, dim=1):
        before = cache.kept_indices(0) if end else torch.empty(1, tiny.N_KV_HEADS, 0)
        end += part.shape[1]
        seen.clear()
        with torch.no_grad():
            model(part, past_key_values=cache)
        for states, found in seen:
            heads = range(states.first_head, states.first_head + states.keys.shape[1])
            own = [before[0, head][before[0, head] >= 0].tolist() for head in heads]
            columns = [[*kept, *range(end - part.shape[1], end)] for kept in own]
            asked = queries[:, heads[0] * group : (heads[-1] + 1) * group]
            n_rows = states.queries.shape[2]
            if not states.gaps:
                continue
            checked += 1
            expected = attention_in_loops(
                states, asked, list(range(end - n_rows, end)), torch.tensor([columns])
            )
            assert (found - expected).abs().max() < 1e-5
    assert checked >= 2
