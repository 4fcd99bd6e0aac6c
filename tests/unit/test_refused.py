"""Options and texts that cannot be are refused in one line that says why: see refused.toml."""

import dataclasses
import json
import tomllib
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import runtime_oracle as tiny
import torch
from factories import (
    make_bits,
    make_budget_profile,
    make_losses,
    make_problem,
    make_scores,
    make_shape,
)
from letters import Letters
from prompt_runs import policy
from tiny_models import WordTokenizer, tiny_profile, words

import kvalloc
from kvalloc.accounting.rounding import apportion
from kvalloc.allocation.request import Request
from kvalloc.errors import InputError, KVAllocError
from kvalloc.measure.job import LossPlan
from kvalloc.measure.kl import divergence
from kvalloc.measure.sampling import choose_samples
from kvalloc.models.loading import load_model
from kvalloc.problem.registry import get_solver
from kvalloc.prompts.calibration import calibration_prompts
from kvalloc.prompts.tasks import find_tasks
from kvalloc.prompts.tasks.longbench import read_records
from kvalloc.prompts.texts import read_prompts, read_texts
from kvalloc.scorers import get_scorer
from kvalloc.shape import LayerShape

REFUSED = tomllib.loads(Path(__file__).with_name("refused.toml").read_text(encoding="utf-8"))


def decided(make):
    def solve(of=None, **options):
        scores = make(shape=make_shape(max_context_tokens=100), **(of or {}))
        target = {} if {"target_retention", "target_loss"} & {*options} else {"budget": 0.5}
        kvalloc.solve(scores, **target, **options)

    return solve


def choose(texts=None, **options):
    texts = [words(100)] if texts is None else texts
    choose_samples(texts, WordTokenizer(), context_tokens=10, least_tokens=4, **options)


def make_cases(name, n_cases=3, n_tokens=5000, **options):
    [task] = find_tasks([name])
    task.make(Letters(), n_cases, n_tokens, 0, **options)


def calibrate(n_prompts=6, n_tokens=300, kinds=("needle", "kl"), **options):
    calibration_prompts(WordTokenizer(), n_prompts, n_tokens, kinds=kinds, **options)


def shape(layer_types=("full",) * 3, last=None, **sizes):
    if last is not None:
        full = LayerShape(kind="full", kv_heads=2, key_dim=4, value_dim=4)
        sizes["layers"] = (full, full, LayerShape(**last))
    make_shape(layer_types=tuple(layer_types), **{"n_query_heads": 4, **sizes})


def written(name, content):
    if content is not None:
        Path(name).write_text(content, encoding="utf-8")
    return Path(name)


def read_record(**record):
    read_records(written("p.jsonl", json.dumps(record)))


def apply(**options):
    model = tiny.tiny_model()
    try:
        kvalloc.apply(model, **options)
    finally:
        assert "generate" not in vars(model)


def generate(**options):
    model = tiny.tiny_model(head_dim=16)
    with kvalloc.apply(model, **options):
        model.generate(tiny.prompt(150), max_new_tokens=18)


def make_cache(**options):
    model = tiny.tiny_model()
    kvalloc.make_cache(model, tiny.make_profile(model, 60, 0.3), **options)


def solve_pool(members, **options):
    known = {"scores": make_scores(1), "losses": make_losses(1)}
    members = [
        one if isinstance(one, str) else (known.get(one[0], one[0]), *one[1:]) for one in members
    ]
    kvalloc.solve_pool(members, **{"memory": "1MiB", **options})


def arrays(changes):
    return {name: np.array(one) if isinstance(one, list) else one for name, one in changes.items()}


def pose_problem(without=None, **changes):
    changes = arrays(changes) | ({without: None} if without else {})
    sound = make_problem([[0.0, 0.5, 0.75], [0.0, 0.25, 0.375]], capacity=2)
    dataclasses.replace(sound, **changes)


def change_budgets(**changes):
    make_budget_profile([[20, 30]]).replace(**arrays(changes))


def ask_unknown(of, **options):
    """Refused before anything is read."""
    given = {"solve": ["nowhere"], "apply": [None], "compare": [make_scores()]}
    getattr(kvalloc, of)(*given.get(of, [None, None, ""]), **options)


CALLS = {
    "request": Request.parse,
    **{"scores": decided(make_scores), "losses": decided(make_losses), "bits": decided(make_bits)},
    "compare": partial(kvalloc.compare, make_scores(0), budget="40%"),
    **{"solver": get_solver, "scorer": get_scorer, "profile": tiny_profile, "loss": LossPlan},
    "texts": lambda name, content=None: read_texts([written(name, content)]),
    "prompts": lambda content: read_prompts(written("p.jsonl", content)),
    "records": read_record,
    "model": lambda source, content=None: written(source, content) and load_model(source),
    **{"samples": choose, "task": make_cases, "calibration": calibrate, "shape": shape},
    **{"apply": apply, "generate": generate, "cache": make_cache, "policy": policy},
    **{"pool": solve_pool, "problem": pose_problem},
    **{"apportion": apportion, "unknown": ask_unknown, "budgets": change_budgets},
    "divergence": lambda full, reduced: divergence(torch.zeros(full), torch.zeros(reduced)),
}
ERRORS = dict.fromkeys(("generate", "cache", "policy", "pool", "problem"), InputError)
ERRORS |= dict.fromkeys(("apportion", "unknown", "budgets", "divergence"), InputError)
"""What is raised; for other calls any error of ours."""


@pytest.mark.parametrize(
    ("call", "row"), [(call, row) for call, rows in REFUSED.items() for row in rows]
)
def test_what_cannot_be_is_named_in_one_line(call, row, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    of = {"of": row["of"]} if "of" in row else {}
    with pytest.raises(ERRORS.get(call, KVAllocError), match=row["words"]) as caught:
        CALLS[call](**row["asked"], **of)
    assert "\n" not in str(caught.value)
