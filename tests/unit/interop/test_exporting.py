"""Budgets for other engines and tools: what is written, read back, and never lost in silence."""

import importlib.util
import json
import sys
from types import SimpleNamespace

import numpy as np
import pytest
from cli_tools import refused, run, succeed
from factories import make_budget_profile, make_losses, make_shape

from kvalloc.errors import InputError, MissingDependencyError, UnsupportedRequestError
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.interop.exporting import TARGETS, export
from kvalloc.interop.openvino import scheduler_config
from kvalloc.interop.target import RESTRICTIONS, full_profile, lost, restrict

# Budgets for other engines and tools: what is written, read back, and never lost in silence


ALL = [*RESTRICTIONS]
XKV = Policy(scorer="xkv", scorer_parameters={"window": 3}, sinks=2, window=3)
FITTED = XKV.replace(name="attention_matching")
STREAMING = Policy(scorer="streaming", scorer_parameters={"window": 3}, sinks=2, window=3)
HEADS = [[10, 17], [40, 6], [23, 5]]


def wide(**changes):
    """Of 400 tokens, so that blocks of 32 fit; heads and layers differ."""
    budgets = np.array([[100, 170], [400, 90], [230, 105]])
    return make_budget_profile(budgets, **{"context_tokens": 400, **changes})


@pytest.mark.parametrize(("to", "profile", "names"), [
    ("csv", make_budget_profile(HEADS, policy=FITTED), []),
    ("parquet", make_budget_profile(HEADS, bits=np.full((3, 2), 4)), []),
    ("lu-kv", make_budget_profile(HEADS), []),
    ("lu-kv", make_budget_profile(HEADS, length_rule="fixed"), ["length-shares"]),
    ("lu-kv", make_budget_profile(HEADS, bits=np.full((3, 2), 4)), ["one-width"]),
    ("lu-kv", make_budget_profile(HEADS, policy=FITTED, by_prompt=True), ["plain-scores"]),
    ("attention-matching", make_budget_profile(HEADS), []),
    ("attention-matching", make_budget_profile(HEADS, bits=np.full((3, 2), 4)), ["one-width"]),
    ("duo-attention", make_budget_profile([[40, 5], [5, 5], [40, 40]], policy=STREAMING), []),
    ("duo-attention", make_budget_profile(HEADS), ["engine-policy", "full-or-streaming"]),
    ("tensorrt-llm", make_budget_profile([[9, 9], [7, 7], [40, 40]], policy=STREAMING,
                                         length_rule="fixed", level="layer"), []),
    ("tensorrt-llm", wide(), ["one-length", "engine-policy", "heads-to-layers"]),
    ("openvino", wide(length_rule="fixed"),
     ["engine-policy", "heads-to-layers", "layers-to-uniform", "whole-blocks"]),
    ("openvino", wide(bits=np.array([[16, 8], [8, 8], [8, 5]])),
     ["one-length", "one-width", "engine-policy", "heads-to-layers", "layers-to-uniform",
      "whole-blocks"]),
    ("vllm", make_budget_profile(np.full((3, 2), 40), bits=np.array([[16] * 2, [8] * 2, [8] * 2])),
     []),
    ("vllm", make_budget_profile(HEADS, bits=np.array([[16, 8], [5, 4], [4, 4]])),
     ["no-eviction", "one-width"]),
])  # fmt: skip
def test_what_a_target_cannot_say_is_accepted_by_name(tmp_path, to, profile, names):
    """All of it is refused at once, and what is left says it all and takes no more bytes."""
    target = TARGETS[to]
    assert list(lost(profile, target)) == names
    if to == "parquet" and importlib.util.find_spec("pyarrow") is None:
        pytest.skip("needs pyarrow")
    if names:
        with pytest.raises(InputError, match=rf"{names[0]} \(\w") as refusal:
            export(profile, to, tmp_path / "out", accept=names[1:])
        assert str(refusal.value).endswith(f"accept={tuple(names)}")
        assert not (tmp_path / "out").exists()
    left = export(profile, to, tmp_path / "out", accept=names)
    assert lost(left, target) == {}
    assert restrict(left, target) is left
    if not names:
        assert left is profile
    elif "no-eviction" not in names:
        assert left.retained_bytes <= profile.retained_bytes
        entry = profile.shape.bytes_per_entry
        slack = profile.budgets.size * target.block_tokens * entry
        if to == "duo-attention":  # a head keeps all or little
            slack = profile.context_tokens * entry
        assert left.retained_bytes > profile.retained_bytes - slack
        assert left.bound is None
        assert all(name in left.detail for name in names)


@pytest.mark.parametrize("dtype_bytes", [2, 4])
def test_bits_are_paid_for_in_entries(dtype_bytes):
    """A number at 16 bits counts two bytes, also of a model that was loaded in float32."""
    shape = make_shape(head_dim=64, dtype_bytes=dtype_bytes)
    profile = make_budget_profile(np.full((3, 2), 300), shape=shape, context_tokens=400,
                                  bits=np.full((3, 2), 4))  # fmt: skip
    left = restrict(profile, TARGETS["lu-kv"], ["one-width"])
    assert set(left.bits.ravel().tolist()) == {16}
    assert left.budgets.mean() == pytest.approx(300 * (70 + 2) / (256 + 2), rel=0.03)


def eviction(*, start_size, max_cache_size, **sizes):
    """Stands in for the package's CacheEvictionConfig, which checks as much."""
    if not start_size:
        raise RuntimeError("start_size must be non-zero")
    return SimpleNamespace(get_max_cache_size=lambda: max_cache_size)


def test_openvino_reads_it(tmp_path, monkeypatch):
    """The package itself, where it is installed."""
    export(wide(), "openvino", tmp_path / "e.json", accept=ALL)
    if importlib.util.find_spec("openvino_genai") is None:
        with pytest.raises(MissingDependencyError, match="pip install openvino-genai"):
            scheduler_config(tmp_path / "e.json")
        stand_in = SimpleNamespace(
            AggregationMode=SimpleNamespace(NORM_SUM=1),
            CacheEvictionConfig=eviction,
            SchedulerConfig=SimpleNamespace,
        )
        monkeypatch.setitem(sys.modules, "openvino_genai", stand_in)
    config = scheduler_config(tmp_path / "e.json")
    assert config.use_cache_eviction
    assert config.cache_eviction_config.get_max_cache_size() == 160
    said = json.loads((tmp_path / "e.json").read_text())
    said["cache_eviction_config"]["start_size"] = 0
    for text in (json.dumps(said), "{}", "none"):
        (tmp_path / "e.json").write_text(text)
        with pytest.raises(InputError, match="is no cache eviction config of 'kvalloc export"):
            scheduler_config(tmp_path / "e.json")


SLIDING = make_shape(layer_types=("full", "sliding", "full"), sliding_window=9)


@pytest.mark.parametrize(("to", "profile", "changes", "written"), [
    ("tensorrt-llm",
     make_budget_profile([[10, 21], [8, 8], [40, 40]], shape=SLIDING,
                         bits=np.array([[8, 4], [16] * 2, [8] * 2])),
     {"policy": STREAMING, "budgets": [[14, 14], [8, 8], [37, 37]]},
     {"kv_cache_config": {"max_attention_window": [14, 9, 37], "sink_token_length": 2,
                          "dtype": "fp8", "enable_block_reuse": False}}),
    ("vllm", make_budget_profile(HEADS, bits=np.array([[16, 8], [5, 4], [4, 4]])),
     {"bits": [[16, 16], [8, 8], [8, 8]], "budgets": [[40, 40]] * 3},
     {"kv_cache_dtype": "fp8", "kv_cache_dtype_skip_layers": ["0"]}),
    ("openvino", wide(policy=XKV.replace(sinks=2, window=40, scorer_parameters={"window": 40})),
     {"budgets": [[160, 160]] * 3},  # of 182.5 in the mean
     {"cache_eviction_config": {"start_size": 32, "recent_size": 64, "max_cache_size": 160,
                                "aggregation_mode": "NORM_SUM"},
      "ov_config": {"KV_CACHE_PRECISION": "f16"}}),
])  # fmt: skip
def test_what_an_engine_reads(tmp_path, to, profile, changes, written):
    left = export(profile, to, tmp_path / "f", accept=ALL)
    for name, value in changes.items():
        result = getattr(left, name)
        assert (result.tolist() if isinstance(result, np.ndarray) else result) == value
    text = (tmp_path / "f").read_text()
    read = pytest.importorskip("yaml").safe_load(text)  # of which JSON is a part
    assert {name: part for name, part in read.items() if name != "from"} == written


def test_what_leaves_nothing_for_an_engine_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"rounds no layer.*bits=\(16, 8, 4\)"):
        export(make_budget_profile(HEADS), "vllm", tmp_path / "v", accept=ALL)
    policy = XKV.replace(sinks=2, window=40, scorer_parameters={"window": 40})
    for kept, said in (
        (100, "96 entries a head are no more than its 32 first and 64"),
        (50, "sinks and window alone, 96 tokens in every head"),
    ):
        small = wide(policy=policy).replace(budgets=np.full((3, 2), kept))
        with pytest.raises(InputError, match=said):
            export(small, "openvino", tmp_path / "e", accept=ALL)


def test_duo_attention_comes_back(tmp_path):
    policy = STREAMING.replace(window=7, scorer_parameters={"window": 7})
    profile = make_budget_profile([[40, 9], [9, 9], [9, 40]], policy=policy)
    assert export(profile, "duo-attention", tmp_path / "d") is profile
    assert (tmp_path / "d/full_attention_heads.tsv").read_text() == "1.0\t0.0\n0.0\t0.0\n0.0\t1.0\n"
    assert json.loads((tmp_path / "d/config.json").read_text()) == {
        "sink_size": 2, "recent_size": 7,
    }  # fmt: skip
    like, duo = make_budget_profile(HEADS), TARGETS["duo-attention"]
    back = duo.read(tmp_path / "d", like)
    assert (back.budgets == profile.budgets).all()
    assert back.policy == profile.policy
    assert (back.budgets_for(80) == np.where(profile.budgets == 40, 80, 9)).all()
    (tmp_path / "d/full_attention_heads.tsv").write_text("1.2\t0.2\n0.3\t0.1\n0.4\t0.6\n")
    few = duo.read(tmp_path / "d", full_profile(like.shape, 40), sparsity=0.5)  # three stream
    assert (few.budgets == 40).tolist() == [[True, False], [False, False], [True, True]]
    (tmp_path / "d/full_attention_heads.tsv").write_text("1\t0\n")
    with pytest.raises(InputError, match=r"shaped \(1, 2\), expected finite ones, \(3, 2\)"):
        duo.read(tmp_path / "d", like)
    with pytest.raises(InputError, match="is no pattern of DuoAttention"):
        duo.read(tmp_path, like)


def test_lu_kv_comes_back_at_any_total(tmp_path):
    profile, target = make_budget_profile(HEADS), TARGETS["lu-kv"]
    export(profile, "lu-kv", tmp_path / "b.npy")
    curves = np.load(tmp_path / "b.npy")
    assert curves.shape == (99, 3, 2)
    assert (np.diff(curves.mean(axis=(1, 2))) >= 0).all()
    assert curves[49].mean() == pytest.approx(0.5, abs=0.005)
    assert (target.read(tmp_path / "b.npy", profile).budgets == profile.budgets).all()
    half = target.read(tmp_path / "b.npy", profile, evicted=0.5)
    assert half.budgets.sum() == 120
    np.savez(tmp_path / "archive.npz", curves)
    for other in (b"none", (tmp_path / "archive.npz").read_bytes()):
        (tmp_path / "b.npy").write_bytes(other)
        with pytest.raises(InputError, match=r"b\.npy is no file of LU-KV"):
            target.read(tmp_path / "b.npy", profile)
    np.save(tmp_path / "b.npy", np.full((99, 2, 2), 0.5))
    with pytest.raises(InputError, match=r"\(99, 2, 2\), expected finite ones, \(99, 3, 2\)"):
        target.read(tmp_path / "b.npy", profile)


def test_attention_matching_comes_back_at_any_total(tmp_path):
    """Its published files hold such shares; one of a model with sliding layers names the others."""
    shape = make_shape(layer_types=("full", "sliding", "full"), sliding_window=10)
    profile = make_budget_profile([[10, 17], [9, 9], [40, 6]], shape=shape)
    target, file = TARGETS["attention-matching"], tmp_path / "b.json"
    export(profile, "attention-matching", file)
    shares = json.loads(file.read_text())
    assert list(shares) == ["L0H0", "L0H1", "L2H0", "L2H1"]
    assert shares["L0H1"] == pytest.approx(17 / 73)
    assert sum(shares.values()) == pytest.approx(1)
    assert (target.read(file, profile).budgets == profile.budgets).all()
    half = target.read(file, full_profile(shape, 40), kept=0.5).budgets
    assert half[[0, 2]].tolist() == [[12, 16], [40, 12]]  # 80 in all; sinks and window are 12
    for change, words in (
        ({"L9H0": 0.1}, "a share for each of the 4 heads L0H0 to L2H1 of"),
        ({"L0H0": "many"}, "could not convert"),
        ({"L0H0": None}, "must be a string or a real number"),
        ({"L0H0": -0.1}, "shares from 0 on"),
        (dict.fromkeys(shares, 0), "not all of them 0"),
    ):
        file.write_text(json.dumps(shares | change))
        with pytest.raises(InputError, match=rf"b\.json has no head budgets of .*: .*{words}"):
            target.read(file, profile)


@pytest.mark.parametrize("to", ["csv", "parquet"])
def test_tables_come_back(tmp_path, to):
    if to == "parquet":
        pytest.importorskip("pyarrow")
    profile = make_budget_profile(HEADS, bits=np.array([[16, 8], [5, 4], [4, 4]]))
    export(profile, to, tmp_path / "t")
    back = TARGETS[to].read(tmp_path / "t", make_budget_profile(np.full((3, 2), 20)))
    assert (back.budgets == profile.budgets).all()
    assert (back.bits == profile.bits).all()
    assert (back.solver, back.bound) == ("file", None)
    other = make_budget_profile(np.full((4, 2), 20))
    with pytest.raises(InputError, match="not every layer and head"):
        TARGETS[to].read(tmp_path / "t", other)


def test_a_table_may_be_edited(tmp_path):
    file, like = tmp_path / "t.csv", make_budget_profile([[20, 20]])
    for text, words in (
        ("layer,head,tokens\n0,0,4\n0,1,9\n", "at least the 5 tokens"),
        ("layer,head,tokens\n0,0,many\n0,1,9\n", "no table of budgets"),
        ("layer,head\n0,0\n0,1\n", "no table of budgets"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=words):
            TARGETS["csv"].read(file, like)
    file.write_text("head,layer,tokens\n1,0,9\n0,0,8\n")
    assert TARGETS["csv"].read(file, like).budgets.tolist() == [[8, 9]]


def test_what_cannot_be_read_back_says_so(tmp_path):
    with pytest.raises(UnsupportedRequestError, match="vllm says too little"):
        TARGETS["vllm"].read(tmp_path, make_budget_profile(HEADS))
    with pytest.raises(InputError, match="there is no target 'openvin'; the nearest is 'openvino'"):
        export(make_budget_profile(HEADS), "openvin", tmp_path / "out")


def test_a_length_is_said(tmp_path):
    profile, names = wide(), ["engine-policy", "heads-to-layers"]
    left = export(profile, "tensorrt-llm", tmp_path / "c", context=800, accept=names)
    assert (left.context_tokens, left.length_rule) == (800, "fixed")
    assert left.retained_bytes == pytest.approx(profile.retained_bytes_at(800), rel=0.01)


@pytest.fixture
def file(tmp_path):
    """A budget profile in a file."""
    wide().save(tmp_path / "p.json")
    return tmp_path / "p.json"


def test_the_command_lists_what_each_would_lose(file):
    shown = run("export", file).out
    assert [
        name for name, one in TARGETS.items() if name not in shown or one.says not in shown
    ] == []
    assert "heads-to-layers (budgets of single heads: each layer's mean counts)" in shown
    listed = {row["name"]: row["lost"] for row in run("export", file, "--json").json}
    assert listed["csv"] == {}
    assert "one-length" in listed["openvino"]


def test_the_command_writes_and_says_what_is_lost(file):
    names = "--accept one-length,engine-policy,heads-to-layers"
    asked = ("export", file, "--to", "tensorrt-llm", "-o", file.parent / "c.yaml")
    refused(file.parent, *asked, words=[names])
    ran = run(*asked, *names.split(), "--restricted", file.parent / "r.json")
    assert (ran.code, "kvalloc eval MODEL" in ran.err) == (0, True)
    left = BudgetProfile.load(file.parent / "r.json")
    assert left.level == "layer"
    assert f"{left.detail}" in ran.out
    assert "restriction (greedy), layer level" in run("inspect", file.parent / "r.json").out


def test_score_curves_are_exported_as_a_table(tmp_path):
    scores = make_losses(per="layer")
    scores.save(tmp_path / "s.safetensors")
    succeed("export", tmp_path / "s.safetensors", "--to", "csv", "-o", tmp_path / "c")
    rows = [line.split(",") for line in (tmp_path / "c").read_text().splitlines()]
    assert rows[0] == ["layer", "head", "curve", "tokens", "value"]
    assert len(rows) == 1 + 3 * 2 * (scores.ranks.size + scores.loss_tokens.size)
    last = [float(row[4]) for row in rows[1:] if row[:4] == ["2", "1", "retention", "40"]]
    assert last == [pytest.approx(scores.curves[:, 2, 1, -1].mean())]
    first = str(scores.loss_tokens[0])
    loss = [float(row[4]) for row in rows[1:] if row[:4] == ["1", "1", "loss", first]]
    assert loss == [pytest.approx(scores.losses[:, 1, 0, 0, 0].mean())]
