"""The same files from any engine: in this process, in any order, over workers that die."""

import json
import os
import random
import socket
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from cli_tools import run, save_tiny_model, succeed
from surrogates import fit_surrogate
from tiny_models import equal_budgets, tiny_model
from transformers import AutoModelForCausalLM

import kvalloc
from kvalloc.engine.contract import LocalEngine
from kvalloc.engine.ray import RayEngine
from kvalloc.errors import InputError, MissingDependencyError, SampleError, UnsupportedModelError
from kvalloc.evaluate.methods import CacheMethod
from kvalloc.evaluate.scoring import CaseWork, evaluate
from kvalloc.formats.fitted import FittedSurrogate
from kvalloc.formats.merging import merge
from kvalloc.formats.score_profile import ScoreProfile
from kvalloc.measure import Prompt
from kvalloc.models.loading import ModelSource
from kvalloc.prompts.cases import Case, Turn
from kvalloc.prompts.tasks import TASKS

pytest.importorskip("ray", reason="needs Ray: pip install 'kvalloc[ray]'")

CONTEXT, POISON = 60, "w7"
"""Tokens of a sample; a word whose embedding is not a number."""

on_ray = pytest.mark.ray


class Shuffled(LocalEngine):
    """Results come in another order than that of the items."""

    def run(self, work, items, advance):
        results = list(super().run(work, items, advance))
        random.Random(3).shuffle(results)
        yield from results


def saved(folder, **options):
    """A tiny model as a folder, with a word that is poison."""
    torch.set_num_threads(1)
    model = tiny_model(**options)
    with torch.no_grad():
        model.get_input_embeddings().weight[int(POISON[1:]) + 2] = float("nan")
    return save_tiny_model(folder, model)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return saved(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def loaded(folder):
    return ModelSource(source=str(folder)).load()


@pytest.fixture(scope="module")
def workers(folder):
    """Two workers of a cluster that has room for two more; what is sent may be of this module."""
    import ray
    from ray import cloudpickle

    os.environ.update({"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"})
    small = {"num_cpus": 4, "object_store_memory": 80 * 2**20, "include_dashboard": False}
    ray.init("local", log_to_driver=False, logging_level="ERROR", **small)
    own = [sys.modules[name] for name in (__name__, "tiny_models")]
    for module in own:
        cloudpickle.register_pickle_by_value(module)
    try:
        with RayEngine(source=ModelSource(source=str(folder)), workers=2, threads=1) as engine:
            yield engine
    finally:
        for module in own:
            cloudpickle.unregister_pickle_by_value(module)
        ray.shutdown()


def texts(*poisoned, samples=6):
    """Prompts; of some the last word is the poisonous one."""
    return [
        Prompt(
            text=" ".join([f"w{10 + (31 * seed + n * n) % 80}" for n in range(CONTEXT - 1)])
            + f" {POISON if seed in poisoned else 'w1'}",
            name="p.jsonl",
            line=seed + 1,
        )
        for seed in range(samples)
    ]


def measured(model, loaded, prompts, output=None, **options):
    values = {"context": CONTEXT, "model_id": loaded.model_id, "samples": len(prompts), **options}
    return kvalloc.profile(model, loaded.tokenizer, prompts, output=output, **values)


def fitted(model, loaded, prompts, output=None, **options):
    values = {"context": CONTEXT, "model_id": loaded.model_id, "samples": len(prompts), **options}
    return fit_surrogate(model, loaded.tokenizer, prompts, output=output, **values)


JOBS = {
    "profile": measured,
    "losses": partial(measured, loss="fast", loss_level="head"),
    "fit": fitted,
}
every_job = pytest.mark.parametrize("job", JOBS)


@every_job
def test_the_order_of_results_does_not_matter(loaded, tmp_path, job):
    files = [tmp_path / "one", tmp_path / "two"]
    for file, model in zip(files, (loaded.model, Shuffled(loaded.model)), strict=True):
        JOBS[job](model, loaded, texts(), file)
    assert files[0].read_bytes() == files[1].read_bytes()


@on_ray
@every_job
def test_workers_write_the_same_file(loaded, workers, tmp_path, job):
    files = [tmp_path / "one", tmp_path / "two"]
    for file, model in zip(files, (loaded.model, workers), strict=True):
        JOBS[job](model, loaded, texts(2), file)
    assert files[0].read_bytes() == files[1].read_bytes()
    assert not list(tmp_path.glob("*.partial"))


def test_a_sample_that_fails_by_itself_is_set_aside(loaded, tmp_path):
    told = []
    found, without = (
        measured(loaded.model, loaded, some, progress=lambda *now: told.append(now))
        for some in (texts(1, 4), [one for one in texts() if one.line not in (2, 5)])
    )
    assert {place: said[:16] for place, said in found.set_aside.items()} == {
        1: "p.jsonl, line 2:",
        4: "p.jsonl, line 5:",
    }
    assert "layer 0, sample 1 are not finite" in found.set_aside[1]
    assert found.n_samples == 4
    for name in ("curves", "masses", "sample_tokens"):
        assert (getattr(found, name) == getattr(without, name)).all()
    assert told[-1][0] == told[-1][1]
    file = tmp_path / "s.safetensors"
    found.save(file)
    assert ScoreProfile.load(file) == found
    shown = run("inspect", file).out
    assert "set aside" in shown
    assert "p.jsonl, line 5" in shown


def test_parts_of_a_measurement_keep_what_was_set_aside(loaded, tmp_path):
    files = [tmp_path / name for name in ("1", "2", "whole", "merged")]
    for shard, file in zip(("1/2", "2/2", None), files[:3], strict=True):
        measured(loaded.model, loaded, texts(1, 2), file, shard=shard)
    merge(files[:2], files[3])
    assert files[3].read_bytes() == files[2].read_bytes()


def test_a_surrogate_is_fitted_on_the_others(loaded, tmp_path):
    found = fitted(loaded.model, loaded, texts(0, samples=5))
    assert [*found.set_aside] == [0]
    assert found.samples == 4
    found.save(tmp_path / "f.safetensors")
    assert FittedSurrogate.load(tmp_path / "f.safetensors") == found


@pytest.mark.parametrize("job", [measured, fitted])
def test_where_every_sample_fails_the_first_is_told(loaded, job):
    with pytest.raises(InputError, match="layer 0, sample 0 are not finite numbers"):
        job(loaded.model, loaded, texts(0, 1, 2, samples=3))


class Stopped(BaseException):
    """Stands for a kill."""


def stop(done, total):
    if done > total / 2:
        raise Stopped


@on_ray
@pytest.mark.parametrize("job", ["profile", "fit"])
@pytest.mark.parametrize("first", ["local", "ray"])
def test_what_one_engine_began_another_finishes(loaded, workers, tmp_path, job, first):
    engines, file = [loaded.model, workers], tmp_path / "s"
    if first == "ray":
        engines.reverse()
    with pytest.raises(Stopped):
        JOBS[job](engines[0], loaded, texts(), file, progress=stop)
    assert len(list((tmp_path / "s.partial").glob("sample_*"))) >= 2
    JOBS[job](engines[1], loaded, texts(), file, resume=True)
    JOBS[job](loaded.model, loaded, texts(), tmp_path / "whole")
    assert file.read_bytes() == (tmp_path / "whole").read_bytes()


def deadly(model, item, advance):
    """Work that ends its process: always, or where a file says that it has not done so yet."""
    advance(1)
    if item == "always" or (item and Path(item).exists()):
        if item != "always":
            Path(item).unlink()
        os._exit(1)
    if item == "wrong":
        raise ZeroDivisionError("by nothing")
    if item == "device":
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if item == "refused":
        raise InputError("a refusal")
    return model.config.hidden_size


@on_ray
def test_workers_that_die_are_replaced(workers, tmp_path, capfd):
    once, told = tmp_path / "once", []
    once.touch()
    items = {3: None, 5: "always", 7: str(once), 9: None, 11: "wrong", 13: "device"}
    found = dict(workers.run(deadly, items, told.append))
    assert [found[number] for number in (3, 7, 9)] == [24] * 3
    assert found[5].reason == found[13].reason == "it killed its worker 2 times"
    assert isinstance(found[5].error, SampleError)
    ((_, alone),) = LocalEngine(tiny_model()).run(deadly, {11: "wrong"}, told.append)
    assert found[11].reason == alone.reason == "ZeroDivisionError: by nothing"
    assert sum(told) <= 7
    with pytest.raises(RuntimeError, match="CUDA error"):  # in this process nothing can go on
        list(LocalEngine(tiny_model()).run(deadly, {13: "device"}, told.append))
    with pytest.raises(InputError, match="a refusal"):
        list(workers.run(deadly, {0: "refused", 1: None}, told.append))
    assert dict(workers.run(deadly, {0: None, 1: None}, told.append)) == {0: 24, 1: 24}


@on_ray
def test_the_command(folder, workers, tmp_path, loaded):
    """In a process that is connected, it takes that cluster."""
    prompts = tmp_path / "p.jsonl"
    lines = (json.dumps({"prompt": one.text}) for one in texts(3))
    prompts.write_text("\n".join(lines))
    flags = ("--prompts", prompts, "--samples", 6, "--context", CONTEXT, "--json")
    files = [tmp_path / "one", tmp_path / "two"]
    spread = ("--engine", "ray", "--workers", 1, "--threads", 1)
    for file, more in zip(files, (("--threads", 1), spread), strict=True):
        ran = succeed("profile", folder, *flags, "-o", file, *more)
        assert [*json.loads(ran.out)["set_aside"]] == ["3"]
        assert "set aside, and named in the file" in ran.err
    assert files[0].read_bytes() == files[1].read_bytes()


def evaluated(model, tokenizer):
    """Rows of an evaluation, without times."""
    case = partial(Case, turns=(Turn(answers=("w1",), max_new_tokens=4),))
    prompts = [[12 + (31 * seed + n * n) % 80 for n in range(CONTEXT)] for seed in range(5)]
    cases = [case(input_ids=tuple(ids)) for ids in prompts]
    tasks = [(TASKS["needle"], cases[:3]), (TASKS["kl"], cases[3:])]
    work = CaseWork(tokenizer, methods_of)
    scores = evaluate(model, tokenizer, tasks, work, context=CONTEXT)
    times = {"prefill_seconds": 0.0, "decode_seconds": 0.0}
    return [(s.name, s.task, [replace(one, **times) for one in s.outcomes]) for s in scores]


def methods_of(model):
    budgets = equal_budgets(model, 30, context_tokens=CONTEXT)
    return {"half": CacheMethod(make_cache=partial(kvalloc.make_cache, model, budgets))}


@on_ray
def test_an_evaluation_over_workers_is_the_same(loaded, workers):
    assert evaluated(workers, loaded.tokenizer) == evaluated(loaded.model, loaded.tokenizer)


def test_a_model_in_two_places_gives_the_same(folder, loaded, tmp_path):
    """Layers in memory and on disk stand for those on two devices."""
    layers = {f"model.layers.{layer}": "disk" if layer else "cpu" for layer in range(3)}
    others = ("model.embed_tokens", "model.rotary_emb", "model.norm", "lm_head")
    split = AutoModelForCausalLM.from_pretrained(
        folder, device_map=layers | dict.fromkeys(others, "cpu"), offload_folder=tmp_path
    )
    assert split.model.layers[1].self_attn.k_proj.weight.is_meta
    spread = ModelSource(source=str(folder), device="auto").load().model
    for job in (partial(measured, loss="measured"), fitted):
        alone, *found = (job(model, loaded, texts()) for model in (loaded.model, split, spread))
        for name in type(alone).model_fields:
            values = [getattr(one, name) for one in (alone, *found)]
            if isinstance(values[0], np.ndarray):
                assert {one.tobytes() for one in values} == {values[0].tobytes()}, name


def test_a_part_of_every_layer_is_refused(loaded, monkeypatch):
    """As transformers marks a model that tensor parallelism has split over processes."""
    monkeypatch.setattr(loaded.model, "_tp_size", 2)
    assert loaded.model.tp_size == 2
    said = "split over 2 processes by tensor parallelism.*device_map='auto'"
    with pytest.raises(UnsupportedModelError, match=said):
        measured(loaded.model, loaded, texts())


@contextmanager
def answering(content):
    """A port of this machine where something answers that is no cluster."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer():
            connection, _ = server.accept()
            with connection:
                connection.recv(100)
                connection.sendall(content)

        thread = threading.Thread(target=answer, daemon=True)
        thread.start()
        yield server.getsockname()[1]


def engine_of(folder, **options):
    return RayEngine(source=ModelSource(source=str(folder)), **options)


def test_a_cluster_that_cannot_be_reached_is_one_line(folder, monkeypatch):
    monkeypatch.setattr("ray.is_initialized", lambda: False)
    with answering(b"HTTP/1.1 400 Bad Request\r\n\r\n") as port:
        for address, said in (
            ("127.0.0.1:1", "127.0.0.1:1 cannot be reached: .*refused.*ray start --head"),
            (f"127.0.0.1:{port}", "what answers there is no Ray cluster"),
            ("ray://127.0.0.1:10001", "is no address of a Ray cluster; give HOST:PORT, or auto"),
            ("127.0.0.1:99999999", "cannot be reached"),
        ):
            with pytest.raises(InputError, match=said), engine_of(folder, address=address):
                pass


def test_without_ray_there_is_one_line(folder, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match=r"pip install 'kvalloc\[ray\]'"):
        engine_of(folder).__enter__()


@on_ray
def test_workers_that_do_not_fit_are_refused(folder, workers, tmp_path, monkeypatch):
    for options, said in (
        ({"workers": 2, "threads": 1000}, "2 workers of 1000 CPU threads are more than"),
        ({"workers": 0}, "0 workers of"),
    ):
        with pytest.raises(InputError, match=said), engine_of(folder, **options):
            pass
    other = saved(tmp_path / "other", seed=1)
    monkeypatch.setattr(workers, "source", ModelSource(source=str(other)))
    items = {0: "always", 1: "always", 2: None}  # both workers die, and others take over
    with pytest.raises(InputError, match="not loaded the same model: weights is"):
        list(workers.run(deadly, items, lambda steps: None))
    monkeypatch.setattr("kvalloc.engine.ray._versions", lambda: {"torch": "1.0"})
    said = "has torch 2.*, and this process 1.0; install the same"
    with pytest.raises(InputError, match=said), engine_of(folder, workers=1, threads=1):
        pass
