"""What benchmarks count, and the page and tables that are made of their rows."""

import json
from dataclasses import fields

import numpy as np
import pytest
import torch
from _common import cells_of
from bench_lm_eval import compared
from bench_quality import CELLS as ALL_CELLS
from bench_quality import calls_lost, of_solved, points_lost, ruler_picture, tail_over_rounding
from chat_long import (
    Reader,
    Segment,
    kl_rows,
    listed_score,
    path_after,
    peak_row,
    ranges,
    score_row,
    segment_ends,
)
from quality.cells import CELLS as KINDS
from quality.cells import OF, ORDER, row_of
from quality.tables import (
    ROUNDING,
    UNFITTED,
    against_best,
    earlier_rounding,
    mean_kl,
    pieces,
    shared_kl,
    tail_table,
)
from record import main as record_parts
from results import (
    BENCHMARKS,
    FOLDER,
    RESULTS,
    Record,
    load_records,
    parts_of,
    results_page,
    rows_in,
)

from kvalloc.evaluate.scoring import Outcome

# RESULTS.md is made from results.jsonl


PARTS = [(name, key) for name, benchmark in BENCHMARKS.items() for key in benchmark.parts]


def exists(command):
    script = FOLDER.parent / command.partition(" ")[0]
    return command.startswith("-m pytest ") or script.is_file()


def test_the_page_is_what_the_records_give():
    assert results_page() == RESULTS.read_text(encoding="utf-8")


@pytest.mark.parametrize(("name", "key"), PARTS)
def test_every_part_has_a_script_and_its_record_rows(name, key):
    part, record = BENCHMARKS[name].parts[key], load_records().get((name, key))
    assert record or part.command
    assert exists(part.command) or not part.command
    if record is not None:  # else nobody has run it yet
        assert any(row["what"].startswith(part.headline) for row in record.rows)
        found = part.command and exists(record.command.removeprefix("python "))
        assert bool(found) != record.script_removed


def test_a_record_is_read_as_it_was_saved(tmp_path, monkeypatch):
    monkeypatch.setattr("results.DATA", tmp_path / "results.jsonl")
    monkeypatch.setattr("results.PRINTED", tmp_path)
    numbers = {"name": "a", "figure": 1.5, "low": 1, "high": 2.25, "at_most": 1, "note": "n"}
    line = json.dumps(cells_of(numbers))
    rows = rows_in(f"a table:\n  1 2\n{line}\n")
    assert rows == [
        {"what": "a", "figure": "1.5", "low": "1", "high": "2.25"}
        | {"wanted": "<= 1", "verdict": "MISSED", "note": "n"}
    ]
    for date in ("2026-11-21", "2026-11-22"):
        where = {"date": date, "machine": "m", "versions": {"numpy": "2"}}
        record = Record(
            benchmark="solvers", part="scale", command="x", exit_code=1, rows=rows, **where
        )
        record.save(line)
    assert load_records() == {("solvers", "scale"): record}
    assert "a: 1.5 (1 to 2.25), wanted <= 1" in results_page()


def test_a_call_names_a_benchmark_a_part_and_options():
    assert parts_of(["solvers", "scale", "--quick"]) == ("solvers", ["scale"], ["--quick"])
    assert "auto" not in parts_of(["solvers"])[1]  # its script was removed
    assert record_parts(["solvers auto"]) == 2
    name, parts, options = parts_of(["quality", "--shares", "20"])
    assert (name, parts, options) == (
        "quality",
        ["peers", "long", "ruler", "agents"],
        ["--shares", "20"],
    )


@pytest.mark.parametrize(
    ("ours", "verdict"), [((0.5, 0.5), "met"), ((0.3, 0.9), "met"), ((0.6, 0.6), "MISSED")]
)
def test_our_tasks_are_easier_if_they_surely_score_more(ours, verdict):
    row = compared("fwe", np.array(ours), np.array([0.5, 0.5]), 1_900)
    assert (row["ours"], row["verdict"]) == (f"{np.mean(ours):.2f}", verdict)
    assert (row["low"], row["high"]) == tuple(f"{one - 0.5:+.2f}" for one in (min(ours), max(ours)))


# The tables of the quality benchmark, on cells made by hand


CELLS = ("text", "facts-after")


def row(cell, number, method, kl, *, share=0.2, **other):
    pieces = {"0-15": [kl, 16], "16-63": [kl, 48], "64-255": [None, 0]}
    known = {"cell": cell, "number": number, "seed": 9, "digest": f"{cell}{number}", "score": None}
    return {**known, "method": method, "share": share, "bytes": 0.2, "exact": 0, "kl": pieces,
            **other}  # fmt: skip


def test_rows_that_kvalloc_rounded_hold_while_it_rounds_alike():
    mine = [row("text", 0, method, 0.1) for method in ("default", UNFITTED, "A at 4 bits")]
    assert all(map(earlier_rounding, mine))
    assert not any(earlier_rounding({**one, "rounding": ROUNDING}) for one in mine)
    theirs = ("full", "A", "HQQ 4 bits", "A + quanto 4 bits")
    assert not any(earlier_rounding(row("text", 0, method, 0.1)) for method in theirs)


def rows():
    """Two cells of two prompts; A is the best peer of one, B of the other."""
    losses = {
        "text": {"A": (0.4, 0.8), "B": (1.0, 1.0), "default": (0.1, 0.2)},
        "facts-after": {"A": (0.9, 0.7), "B": (0.2, 0.4), "default": (0.2, 0.1)},
    }
    return [
        row(cell, number, method, value)
        for cell, methods in losses.items()
        for method, values in methods.items()
        for number, value in enumerate(values)
    ]


def test_the_ratio_is_to_the_best_peer_of_each_cell():
    tiny = [row("text", n, name, kl) for n in (0, 1) for name, kl in (("default", 9e-4), ("A", 0))]
    assert against_best(tiny, "default", ("text",))["text"].ratio == 1.0  # both below LEAST_KL
    result = against_best(rows(), "default", CELLS)
    # text 0.15 of 0.6, facts 0.15 of 0.3
    assert result["text"].ratio == pytest.approx(0.25)
    assert result["facts-after"].ratio == pytest.approx(0.5)
    before = [*rows(), *(row("text", number, UNFITTED, 0.03) for number in (0, 1))]
    assert against_best(before, "default", CELLS) == result  # no peer
    assert against_best(before, UNFITTED, CELLS)["text"].ratio == pytest.approx(0.05)
    whole = result["mean"]
    assert whole.ratio == pytest.approx(0.30 / 0.90)
    assert whole.low <= whole.ratio <= whole.high
    assert (result["text"].peer, result["facts-after"].peer, whole.n_prompts) == ("A", "B", 2)


def test_only_prompts_that_all_have_seen_count_and_one_gives_no_interval():
    some = [one for one in rows() if (one["method"], one["digest"]) != ("B", "text1")]
    assert against_best(some, "default", CELLS)["text"].n_prompts == 2  # B is worse on the other
    some = [one for one in some if (one["method"], one["digest"]) != ("B", "text0")]
    result = against_best([*some, row("text", 0, "B", 0.2)], "default", CELLS)
    assert result["text"].ratio == pytest.approx(0.1 / 0.2)
    assert (result["text"].n_prompts, result["text"].high, result["mean"].n_prompts) == (1, None, 1)
    assert "no interval" in str(result["text"])
    assert result["facts-after"].n_prompts == 2


def test_what_was_exact_before_an_eviction_is_compared_to_nobody():
    """A method that waits has nothing at the first tokens; only the others' later ones count."""
    late = row("text", 0, "default", 0.3)
    late["kl"] = {"0-15": [None, 0], "16-63": [0.3, 40], "64-255": [None, 0]}
    peer = row("text", 0, "A", 0.0)
    peer["kl"] = {"0-15": [9.0, 16], "16-63": [0.6, 48], "64-255": [None, 0]}
    assert mean_kl(late) == 0.3
    assert mean_kl(peer) == pytest.approx((16 * 9.0 + 48 * 0.6) / 64)
    assert shared_kl([late, peer]) == [0.3, pytest.approx(0.6)]
    assert against_best([late, peer], "default", ("text",))["text"].ratio == pytest.approx(0.5)
    gone = row("text", 0, "short", 0.0)
    gone["kl"] = dict.fromkeys(gone["kl"], [None, 0])
    assert mean_kl(gone) is None
    assert "mean" not in against_best([gone, peer], "A", ("text",))


def test_a_row_keeps_kl_by_position_with_the_numbers_of_tokens():
    kls = (None,) * 17 + (0.5,) * 47 + (0.25,) * 10
    unused = dict.fromkeys(field.name for field in fields(Outcome))
    sizes = {"bytes_at_16_bits": 10_291_200, "full_bytes_at_16_bits": 34_560_000}
    sizes |= {"prefill_seconds": 3.2, "agrees": ((None,) * 17 + (True,) * 56 + (False,),)}
    result = row_of(Outcome(**{**unused, **sizes, "kls": (kls,), "answers": ("",)}))
    assert result["kl"] == {"0-15": [None, 0], "16-63": [0.5, 47], "64-255": [0.25, 10]}
    assert result["kls"] == [0.5] * 47 + [0.25] * 10
    assert pieces([result]) == "-/.500/.250"
    assert (result["exact"], result["bytes"]) == (17, round(10_291_200 / 34_560_000, 5))
    assert mean_kl(result) == pytest.approx((47 * 0.5 + 10 * 0.25) / 57)
    assert set(CELLS) < set(KINDS) == set(ALL_CELLS)
    assert sorted(ORDER) == list(range(OF))


def test_tails_are_of_the_tokens_of_all_prompts_and_of_rows_that_have_them():
    kls = [0.5] * 196 + [12.0] * 4
    new = [row("text", n, "A", 0.7, kls=kls, agree=agree) for n, agree in ((0, 1.0), (1, 0.9))]
    short = [row("facts-after", 0, "A", 0.7, kls=[0.5] * 100, agree=1.0)]
    old = [row(cell, 0, "default", 0.1) for cell in CELLS]
    _, a, default = tail_table([*new, *short, *old], CELLS)
    assert a.split() == [
        "A",
        "500",
        ".730/12.000/-/95.0%",
        ".500/-/-/100.0%",
        ".684/12.000/-/96.0%",
    ]
    assert default.split() == ["default", "0", "-", "-", "-"]
    assert tail_table(old, CELLS) == []


# Tasks by rule


def scored(method, share, scores, *, cell="vt", size=0.125):
    """A row for each prompt's score."""
    known = {"bytes": size, "kls": [0.5] * 150, "agree": 1.0}
    return [row(cell, n, method, 0.5, share=share, **known | {"score": score})
            for n, score in enumerate(scores)]  # fmt: skip


def test_tasks_are_shown_if_the_full_cache_solves_half_of_them(capsys):
    solved, other = scored("full", None, (1, 0)), scored("full", None, (0.9, 0), cell="cwe")
    ours = scored("default", 0.125, (1, 0)) + scored("default", 0.125, (1, 0), cell="cwe")
    assert of_solved([*solved, *other, *ours]) == [*solved, *ours[:2]]
    assert capsys.readouterr().out.splitlines() == [
        "vt: the full cache scores 50% of 2 prompts",
        "cwe: the full cache scores 45% of 2 prompts, not shown",
    ]


@pytest.mark.parametrize(
    ("ours", "of_kvzip", "limit", "met"),
    [
        ((1, 1), (1, 1), 0.0, True),  # half of what KVzip loses is nothing
        ((1, 0.99), (1, 0.5), 0.01, True),
        ((1, 0.9), (1, 0.5), 0.01, False),
        ((1, 0.99), None, 0.01, True),
    ],
)
def test_points_lost_are_those_of_the_same_prompts(ours, of_kvzip, limit, met):
    rows = scored("full", None, (1, 1, 0)) + scored("default", 0.125, ours)
    rows += scored("KVzip", 0.125, of_kvzip or ())
    result = points_lost(rows, 0.125, ["vt"])
    assert result["figure"] == f"{1 - sum(ours) / 2:.3f}"
    assert float(result["low"]) <= float(result["figure"]) <= float(result["high"])
    assert result["wanted"] == f"{limit:.3f}"
    assert (result["verdict"] == "met") == met
    assert points_lost(rows, 0.25, ["vt"]) is None


def test_calls_are_lost_where_the_interval_is_above_zero():
    def lost(scores):
        rows = scored("full", None, (1,) * 4, cell="tools")
        return calls_lost([*rows, *scored("default", 0.2, scores, cell="tools")], 0.2)

    some, surely = lost((1, 1, 1, 0.5)), lost((0.5, 0.25, 0.5, 0.75))
    assert (some["figure"], some["low"], some["verdict"]) == ("0.125", "0.000", "met")
    assert (surely["figure"], surely["prompts"], surely["verdict"]) == ("0.500", "4", "MISSED")
    assert calls_lost(scored("default", 0.2, (1,)), 0.2) is None


def test_the_tail_is_that_of_prompts_that_both_have():
    rows = [{**one, "kls": [0.25] * 150} for one in scored("default", 0.2, (1, 1, 1))]
    rows += [{**one, "kls": [0.5] * 150} for one in scored("8 bits", None, (1, 1))]
    ratio = tail_over_rounding(rows, 0.2)
    assert (ratio["figure"], ratio["verdict"], ratio["prompts"]) == ("0.50", "met", "2")
    assert (ratio["low"], ratio["high"]) == ("0.50", "0.50")
    assert ratio["what"].startswith("20%, 99% KL")
    assert "300 tokens" in ratio["note"]
    assert tail_over_rounding(rows[:4], 0.2) is None  # too few tokens
    assert tail_over_rounding(rows, 0.1) is None


def test_the_picture_of_scores_and_tails(tmp_path, monkeypatch):
    monkeypatch.setattr("bench_quality.FOLDER", tmp_path)
    (tmp_path / "quality").mkdir()
    short = scored("default", 0.125, (1, 1), size=0.125)
    ruler_picture([{**one, "kls": [0.5]} for one in short], "m")
    assert not [*tmp_path.rglob("*.png")]  # too few tokens for a percentile
    rows = [*short, *scored("default", 0.25, (1, 1), size=0.25), *scored("KVzip", 0.125, (1, 0))]
    ruler_picture([*rows, *scored("SnapKV", 0.25, (1,))], "m")
    (picture,) = tmp_path.rglob("*.png")
    assert picture.name == "ruler-m.png"


# Long answers


def test_an_answer_is_read_in_pieces_up_to_the_end_of_each_range():
    assert segment_ends(300, {130: None}) == [130, 250, 300]
    assert segment_ends(300, {296: None}) == [125, 250, 296]
    assert ranges(4000) == [(0, 500), (500, 1000), (1000, 2000), (2000, 4000)]
    assert ranges(700) == [(0, 500), (500, 700)]


def test_a_walk_stands_at_the_end_of_its_path():
    walk = "\ndown to pond\ndown to frog\nup to pond\ndown to fish"
    assert path_after(walk) == ("pond", "fish")
    assert path_after("\ndown to pond\nup to hill") == ()


def reader(name, losses, segments):
    result = Reader(name)
    result.kl, result.segments = [torch.tensor(losses)], segments
    return result


def test_long_answers_are_compared_by_range_to_the_best_method():
    ours = reader(
        "kvalloc", [0.1] * 500 + [0.3] * 200, [Segment(500, 0.2, 0.5), Segment(700, 0.3, 2)]
    )
    others = [Segment(500, 0.2, 0.0), Segment(700, 0.2, 0.0)]
    peers = [reader("A", [0.4] * 500 + [0.2] * 200, others), reader("B", [0.5] * 700, others)]
    first, second = kl_rows("m", [[ours, *peers]], 700, largest=0.22)
    assert first["name"] == "m, tokens 0-499 of an answer, KL over that of A"
    assert (first["figure"], first["met"]) == (pytest.approx(0.25), True)
    assert first["where"] == "at most 22% of the bytes"
    assert (second["figure"], second["met"]) == (pytest.approx(1.5), False)
    assert second["note"] == "kvalloc 0.3000 at 30.0%, A 0.2000 at 20.0%, B 0.5000 at 20.0%"
    peak = peak_row("m", [[ours]], 700, "all")
    assert (peak["figure"], peak["note"]) == (2, "0.500 in 0-499, 2.000 in 500-699; promised: all")


@pytest.mark.parametrize(
    ("ours", "tova", "ratio", "met"),
    [
        (0.8, 0.4, 2, True),
        (0.7, 0.4, 1.75, False),
        (0.9, 0.6, 1.5, True),
        (0.2, 0, torch.inf, True),
    ],
)
def test_a_score_is_met_by_twice_the_peers_or_the_full_caches(ours, tova, ratio, met):
    row = score_row("m", ["full cache", "kvalloc", "TOVA"], torch.tensor([[0.9, ours, tova]]))
    assert (row["figure"], row["met"]) == (pytest.approx(ratio), met)


def test_a_list_of_all_nodes_is_not_the_path():
    assert listed_score(" pond > fish\nand on", ("pond", "fish")) == 1.0
    assert listed_score("pond > fish > mill > frog", ("pond", "fish")) == 0.5
    assert listed_score("", ("pond",)) == 0.0
