"""StreamingLLM: recency."""

import pytest
import torch
from scorer_oracle import make_states

from kvalloc.errors import InputError
from kvalloc.scorers.streaming import Streaming


def test_the_score_is_the_position():
    scores = Streaming(window=3).score(make_states(n_tokens=10), sinks=2)
    expected = [0, 0, 0.3, 0.4, 0.5, 0.6, 0.7, 0, 0, 0]
    assert scores.shape == (1, 2, 10)
    assert scores.dtype == torch.float32
    assert scores[0, 1].tolist() == pytest.approx(expected)


def test_padding_is_no_token():
    mask = torch.ones(10, 10).tril().bool().view(1, 1, 10, 10).repeat(2, 1, 1, 1)
    mask[1, :, :, :4] = False
    scores = Streaming(window=3).score(make_states(batch=2, n_tokens=10, mask=mask), sinks=2)
    assert scores[1, 0].tolist() == pytest.approx([0] * 6 + [0.7, 0, 0, 0])


def test_shorter_than_the_window():
    assert not Streaming(window=8).score(make_states(n_tokens=5), sinks=2).any()


def test_window_out_of_range():
    with pytest.raises(InputError, match="window is 0"):
        Streaming(window=0)
