"""Percentiles of the KL over tokens against their definition, counted token by token."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from kvalloc.prompts.intervals import tails


@given(
    st.integers(0, 4_000),
    st.lists(st.floats(0, 20) | st.none(), min_size=1, max_size=30),
    st.randoms(use_true_random=False),
)
def test_a_percentile_is_the_least_value_that_enough_tokens_do_not_exceed(n, drawn, random):
    kls = random.choices(drawn, k=n)
    found, known = tails(kls), [kl for kl in kls if kl is not None]
    assert found.pop("n_tokens") == len(known)
    for name, share, few in (("p99", Fraction(99, 100), 300), ("p999", Fraction(999, 1000), 3_000)):
        value = found.pop(name)
        enough = [
            kl for kl in {*known} if sum(other <= kl for other in known) >= share * len(known)
        ]
        assert value == (min(enough) if len(known) >= few else None)
        assert value is None or sum(kl > value for kl in known) <= (1 - share) * len(known)
    assert not found
