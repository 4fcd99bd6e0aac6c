"""Needle questions and their outcomes, made up for the tests of the demo."""

from __future__ import annotations

from kvalloc.evaluate.scoring import Outcome
from kvalloc.prompts.needle import NeedleCase

CASE = NeedleCase(
    input_ids=tuple(range(1500)), key="anchor", number="1234567", depth=0.42, source="polk_1845"
)


def make_outcome(answer: str = "1234567.", kl: float | None = 0.5) -> Outcome:
    return Outcome(
        answers=(answer,),
        kls=((kl,),),
        top1_agreement=None if kl is None else 0.75,
        nll=None,
        score=None,
        found=float(CASE.turns[0].is_found(answer)),
        retained_bytes=20_582_400,
        full_bytes=69_120_000,
        kept_bytes=20_582_400,
        bytes_at_16_bits=10_291_200,
        full_bytes_at_16_bits=34_560_000,
        prefill_seconds=3.2,
        decoded_tokens=1,
        decode_seconds=0.8,
    )
