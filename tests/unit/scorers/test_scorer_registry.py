"""Scorers by name."""

import subprocess
import sys

import pytest

from kvalloc.errors import InputError
from kvalloc.scorers import Scorer, get_scorer, scorer_class, scorer_names


def test_ours_are_there():
    assert {"xkv", "snapkv", "streaming"} <= set(scorer_names())


@pytest.mark.parametrize("name", ["xkv", "snapkv", "streaming"])
def test_parameters_build_it_again(name):
    scorer = get_scorer(name, window=5)
    again = get_scorer(name, **scorer.parameters())
    assert isinstance(scorer, Scorer)
    assert scorer.name == name
    assert scorer_class(name).reference
    assert again.window == 5
    assert again.parameters() == scorer.parameters()


def test_unknown_names_list_the_choices():
    with pytest.raises(InputError, match=r"no scorer 'sanpkv'.*snapkv.*xkv"):
        get_scorer("sanpkv")
    with pytest.raises(InputError, match=r"no option 'kernel'.*window, pool"):
        get_scorer("xkv", kernel=3)


def test_listing_and_building_needs_no_torch():
    code = (
        "import sys; from kvalloc.scorers import *; "
        "[get_scorer(name) for name in scorer_names()]; "
        "import kvalloc.measure; sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
