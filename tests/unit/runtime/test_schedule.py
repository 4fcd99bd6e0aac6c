"""When entries go, for the ways of the default and for stored profiles; no model runs."""

import itertools

import pytest
from factories import make_budget_profile, make_shape

from kvalloc.online.ways import Early, Setting, Twice, Whole
from kvalloc.runtime.options import CacheOptions
from kvalloc.runtime.policies import policy_of
from kvalloc.runtime.schedule import schedule_of

TOKENS = 400
SHAPE = make_shape(n_layers=4)
SETTING = Setting(shape=SHAPE, share=0.2)
READ, HELD = False, True


def profile_of(way):
    return way(setting=SETTING).profile(TOKENS)


def stored(**changes):
    """A profile that is decided before: no way of the default's, and no head competes."""
    profile = make_budget_profile([[8, 8]] * 4)
    matching = profile.policy.replace(name="attention_matching")
    return profile.replace(policy=matching, **changes)


@pytest.mark.parametrize(
    ("profile", "by_layer", "in_one", "in_chunks"),
    [
        (profile_of(Early), True, READ, READ),
        (profile_of(Early), False, HELD, HELD),
        (profile_of(Twice), True, HELD, HELD),
        (make_budget_profile([[8, 9]] * 4), False, READ, READ),
        (stored(), False, READ, HELD),
    ],
)
def test_a_prompt_goes_by_layer_or_whole(profile, by_layer, in_one, in_chunks):
    options = CacheOptions(by_layer=by_layer, decode_every=7)
    for chunks, expected in ((False, in_one), (True, in_chunks)):
        found = schedule_of(profile, policy_of(profile.policy), options, in_chunks=chunks)
        assert (found.holds, found.every.tokens) == (expected, 7)


def test_nothing_competes_later_where_all_of_a_prompt_stays():
    profile = Whole(setting=Setting(shape=SHAPE, share=1.0), width=16).profile(TOKENS)
    found = schedule_of(profile, policy_of(profile.policy), CacheOptions(), in_chunks=False)
    assert found.every is None


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1088, 1156, 1228]),
        ({"decode_every": 100}, [1124, 1224]),
        ({"decode_every": 100, "memory": 2800}, [1094, 1164, 1234]),
    ],
)
def test_what_follows_competes_every_so_many_tokens(options, expected):
    """By default 64, or a sixteenth; where memory is short, a quarter of it."""
    profile = profile_of(Early)
    policy = policy_of(profile.policy)
    found = schedule_of(profile, policy, CacheOptions(**options), in_chunks=False)
    columns = found.every.columns(1024, 1250, token_bytes=10)
    assert list(itertools.islice(columns, 9)) == expected
