"""Parts of a measurement, and the file that they make together."""

import pytest
from cli_tools import refused, run
from factories import make_losses, make_scores, make_shape, part_of
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny_models import tiny_profile, words

from kvalloc.errors import InputError
from kvalloc.formats.merging import merge
from kvalloc.measure import Prompt
from kvalloc.measure.job import LossPlan

LOSSES = LossPlan(method="fast", level="head", shares=(0.0, 0.4), continuation_tokens=4)


@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_any_partition_in_any_order_gives_the_unbroken_file(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("parts")
    n_samples = data.draw(st.integers(2, 7))
    make = data.draw(st.sampled_from((make_scores, make_losses)))
    scores = make(n_samples, n_samples=n_samples)
    scores.save(folder / "whole")
    n_shards = data.draw(st.integers(2, n_samples))
    paths = [folder / f"{number}" for number in range(1, n_shards + 1)]
    for number, path in enumerate(paths, start=1):
        part_of(scores, number, n_shards).save(path)
    paths = data.draw(st.permutations(paths))
    found = merge(paths, folder / "merged")
    assert (folder / "merged").read_bytes() == (folder / "whole").read_bytes()
    assert found == scores


def test_shards_are_measured_to_the_bit_as_one_measurement(tmp_path):
    lengths = (60, 60, 60, 60, 40, 40, 60)
    prompts = [Prompt(text=words(length, seed=n)) for n, length in enumerate(lengths)]
    options = {"texts": prompts, "samples": len(prompts), "loss": LOSSES, "bits": (8,)}
    tiny_profile(output=tmp_path / "whole", **options)
    for number in (1, 2, 3):
        tiny_profile(output=tmp_path / f"{number}", shard=f"{number}/3", **options)
    merge([tmp_path / number for number in "312"], tmp_path / "merged")
    assert (tmp_path / "merged").read_bytes() == (tmp_path / "whole").read_bytes()


@pytest.fixture
def files(tmp_path):
    paths = [tmp_path / f"part{number}.safetensors" for number in (1, 2, 3)]
    for number, path in enumerate(paths, start=1):
        part_of(make_scores(n_samples=6), number, 3).save(path)
    return paths


def other(files, **changes):
    part_of(make_scores(n_samples=6, **changes), 2, 3).save(files[1])


WRONG = {
    "twice": (lambda files: files.append(files[0]), "overlap: both are shard 1 of 3"),
    "none": (lambda files: files.clear(), "nothing to merge"),
    "whole": (
        lambda files: make_scores(n_samples=6).save(files[1]),
        "part2.safetensors is a whole measurement and no part of one",
    ),
    "overlap": (
        lambda files: part_of(make_scores(n_samples=6), 1, 3).save(files[1]),
        "part1.safetensors and .*part2.safetensors overlap: both are shard 1 of 3",
    ),
    "model": (
        lambda files: other(files, shape=make_shape(model_id="tests/other")),
        "shape.model_id is tests/tiny in the first and tests/other in the second",
    ),
    "text": (lambda files: other(files, text_digest="1" * 64), "text_digest is 000"),
    "versions": (
        lambda files: other(files, versions={"numpy": "2"}),
        "versions.numpy is test in the first and 2 in the second",
    ),
    "losses": (
        lambda files: part_of(make_losses(n_samples=6), 2, 3).save(files[1]),
        "are no parts of one measurement: .*loss",
    ),
    "other shards": (
        lambda files: part_of(make_scores(n_samples=6), 2, 2).save(files[1]),
        "the number of shards is 3 in the first and 2 in the second",
    ),
    "in none": (
        lambda files: part_of(make_scores(n_samples=3), 2, 3).save(files[1]),
        "sample 4 is in none",
    ),
}


@pytest.mark.parametrize("change", WRONG)
def test_parts_that_do_not_belong_together_are_refused(tmp_path, files, change):
    spoil, said = WRONG[change]
    spoil(files)
    with pytest.raises(InputError, match=said):
        merge(files, tmp_path / "s")
    assert not (tmp_path / "s").exists()


def test_the_command_says_what_is_merged_and_what_is_missing(tmp_path, files):
    facts = run("merge", *files, "-o", tmp_path / "s", "--json").json
    assert (facts["samples"], facts["parts"]) == (6, 3)
    (tmp_path / "s").unlink()
    refused(
        tmp_path, "merge", files[0], "-o", tmp_path / "s", words=["of 3 shards are missing: 2, 3"]
    )
