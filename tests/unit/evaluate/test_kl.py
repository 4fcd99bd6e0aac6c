"""KL and agreement against cases done by hand."""

from __future__ import annotations

import math

import pytest
import torch

from kvalloc.errors import InputError
from kvalloc.evaluate.kl import divergence


def test_equal_logits_are_exactly_zero_apart():
    logits = torch.randn(5, 50, generator=torch.Generator().manual_seed(1)) * 10
    same = divergence(logits, logits.clone())
    assert same.kl == 0.0
    assert same.top1_agreement == 1.0
    assert same.n_predictions == 5


def test_two_tokens_by_hand():
    # p = (1/2, 1/2) and q = (3/4, 1/4): 0.5 ln(2/3) + 0.5 ln 2 = 0.5 ln(4/3)
    # p = (1/5, 4/5) and q = (1/5, 4/5), the logits shifted: 0
    full = torch.tensor([[0.0, 0.0], [0.0, math.log(4.0)]])
    reduced = torch.tensor([[math.log(3.0), 0.0], [7.0, 7.0 + math.log(4.0)]])
    found = divergence(full, reduced)
    assert found.kl == pytest.approx(0.5 * math.log(4 / 3) / 2, rel=1e-6)
    assert found.top1_agreement == 1.0


def test_kl_is_from_full_to_reduced_and_not_the_other_way():
    full = torch.tensor([[math.log(9.0), 0.0]])
    reduced = torch.zeros(1, 2)
    forward = 0.9 * math.log(0.9 / 0.5) + 0.1 * math.log(0.1 / 0.5)
    backward = 0.5 * math.log(0.5 / 0.9) + 0.5 * math.log(0.5 / 0.1)
    assert divergence(full, reduced).kl == pytest.approx(forward, rel=1e-6)
    assert divergence(reduced, full).kl == pytest.approx(backward, rel=1e-6)


def test_agreement_counts_most_likely_tokens():
    full = torch.eye(4) * 5
    reduced = full.clone()
    reduced[2] = torch.tensor([9.0, 0.0, 0.0, 0.0])
    assert divergence(full, reduced).top1_agreement == 0.75


def test_a_token_that_is_ruled_out_adds_nothing():
    full = torch.tensor([[0.0, 0.0, -math.inf]])
    reduced = torch.tensor([[0.0, 0.0, math.log(2.0)]])
    assert divergence(full, reduced).kl == pytest.approx(math.log(2.0), rel=1e-6)


def test_half_precision_is_computed_in_float32():
    logits = torch.randn(3, 2000, generator=torch.Generator().manual_seed(2)).bfloat16()
    other = (logits.float() + 0.01).bfloat16()
    precise = divergence(logits.float(), other.float())
    assert divergence(logits, other).kl == precise.kl


@pytest.mark.parametrize(
    ("full", "reduced"),
    [(torch.zeros(2, 3), torch.zeros(3, 3)), (torch.zeros(3), torch.zeros(3))],
)
def test_logits_that_do_not_fit_are_refused(full, reduced):
    with pytest.raises(InputError, match="cannot be compared"):
        divergence(full, reduced)


def test_nothing_to_compare_is_refused():
    with pytest.raises(InputError, match="no prediction"):
        divergence(torch.zeros(0, 3), torch.zeros(0, 3))
