"""Engines run in environments of their own, beside what kvalloc predicts."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count, permutations
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch

from kvalloc.accounting.engine_formats import bytes_of
from kvalloc.formats.format_losses import FormatLosses
from kvalloc.measure.sampling import choose_samples
from kvalloc.models.gguf import converted_folder
from kvalloc.models.loading import DEMO, DEMO_FILE, DEMO_PACKAGE, LoadedModel, load_model
from kvalloc.prompts.texts import default_texts

HERE = Path(__file__).parent
ENVIRONMENTS = HERE.parents[1] / ".venv-engines"

CONTEXT_TOKENS = 4096
"""Bits a number are of so many tokens."""

Pairs: TypeAlias = Sequence[tuple[str, str]]
"""Formats of K and V of each layer, or of all layers at once."""


@dataclass(frozen=True)
class Subject:
    """A model, the texts that an engine reads, and what kvalloc measured of it on them."""

    name: str
    engine: str

    @property
    def weights(self) -> Path:
        """The GGUF file."""
        if self.name != DEMO:
            return Path(self.name).resolve()
        package = importlib.util.find_spec(DEMO_PACKAGE)  # importing it needs another package
        assert package is not None
        assert package.origin is not None
        return Path(package.origin).with_name(DEMO_FILE)

    @property
    def label(self) -> str:
        return f"{self.engine}-{self.weights.stem}"

    @property
    def folder(self) -> Path:
        """The model as `save_pretrained` writes it, in float32."""
        return converted_folder(self.weights, "float32")

    @cached_property
    def loaded(self) -> LoadedModel:
        return load_model(self.name)

    @cached_property
    def losses(self) -> FormatLosses:
        """Measured by `make`, on the texts below."""
        return FormatLosses.load(ENVIRONMENTS / f"{self.label}.formats.safetensors")

    @cached_property
    def tokens(self) -> list[list[int]]:
        """The texts that the losses were measured on."""
        samples = choose_samples(
            default_texts(),
            self.loaded.tokenizer,
            context_tokens=self.losses.context_tokens,
            least_tokens=2,
            samples=3,
            seed=0,
        )
        assert samples.digest() == self.losses.text_digest
        return [sample.token_ids.tolist() for sample in samples.samples]

    @property
    def first_loss(self) -> float:
        """Loss of the model on the first text: an engine that reads the same weights has it too."""
        ids = torch.tensor(self.tokens[:1])
        with torch.no_grad():
            return float(self.loaded.model(input_ids=ids, labels=ids).loss)

    def bits(self, pairs: Pairs) -> float:
        """Return the bits a number of K and V."""
        shape, whole = self.losses.shape, [("f16", "f16")]
        stored, full = (
            bytes_of(shape, self.by_layer(one), CONTEXT_TOKENS) for one in (pairs, whole)
        )
        return 16 * stored / full

    def predicted(self, pairs: Pairs) -> Any:
        """Return what kvalloc predicts."""
        index = dict(zip(self.losses.formats, count())) | {"f16": -1}
        choices = [[index[name] for name in pair] for pair in self.by_layer(pairs)]
        return self.losses.predict(choices)

    def by_layer(self, pairs: Pairs) -> list[tuple[str, str]]:
        return [*pairs] * (self.losses.shape.n_layers // len(pairs))


@dataclass(frozen=True, kw_only=True)
class Row:
    """A setting of an engine: what it loses there, and what kvalloc predicts; nats per token."""

    setting: str
    bits: float
    engine_mean: float
    engine_p99: float
    engine_top1: float
    predicted_mean: float
    predicted_p99: float
    predicted_top1: float
    is_predictable: bool = True

    @property
    def ratio(self) -> float:
        return self.predicted_mean / self.engine_mean

    @property
    def is_judged(self) -> bool:
        """Whether the loss is large enough to be predicted, of an engine that rounds as kvalloc."""
        return self.is_predictable and max(self.engine_mean, self.predicted_mean) > 0.001

    @property
    def is_predicted(self) -> bool:
        return 1 / 1.25 < self.ratio < 1.25


def run_engine(engine: str, job: Mapping[str, Any] | np.ndarray, folder: Path) -> Any:
    """Run a job in an engine's environment, and return the arrays that it wrote, by name."""
    if isinstance(job, np.ndarray):
        np.save(folder / "job.npy", job)
        return finished(started(engine, folder / "job.npy"))
    file = folder / "job.json"
    file.write_text(json.dumps({"threads": os.cpu_count(), **job}), encoding="utf-8")
    return finished(started(engine, file))


def run_texts_apart(engine: str, job: Mapping[str, Any], folder: Path) -> Any:
    """Run a job with a process for each text, as engines need that compute in one thread."""
    calls = []
    for place, text in enumerate(job["tokens"]):
        file = folder / f"job_{place}.json"
        file.write_text(json.dumps({**job, "tokens": [text]}), encoding="utf-8")
        calls.append(started(engine, file))
    found = [finished(call) for call in calls]
    return {name: np.concatenate([one[name] for one in found]) for name in found[0]}


def started(engine: str, job: Path) -> tuple[subprocess.Popen[str], Path]:
    """Start a job; return the process and the file that it will write."""
    python = ENVIRONMENTS / engine / "bin" / "python"
    assert python.exists(), f"there is no {python}; 'make test-engines' makes it"
    out = job.with_suffix(".npz")
    command = [python, HERE / f"run_{engine}.py", job, out]
    with job.with_suffix(".log").open("w", encoding="utf-8") as log:
        return subprocess.Popen(command, stdout=log, stderr=log, text=True), out


def finished(call: tuple[subprocess.Popen[str], Path]) -> Any:
    process, out = call
    log = out.with_suffix(".log")
    assert process.wait() == 0, log.read_text(encoding="utf-8")[-2000:]
    return np.load(out)


def compared(
    subject: Subject,
    caches: Mapping[str, Pairs],
    found: Any,
    *,
    engine: str = "",
    apart: str = "",
) -> list[Row]:
    """Put what an engine lost beside what kvalloc predicts, and keep it as JSON.

    Of settings whose names contain `apart`, the engine rounds otherwise than is predicted.
    """
    engine = engine or subject.engine
    np.testing.assert_allclose(found["nll"][0].mean(), subject.first_loss, atol=0.01)
    rows = []
    for name, pairs in caches.items():
        predicted = subject.predicted(pairs)
        row = Row(
            setting=name,
            bits=subject.bits(pairs),
            engine_mean=float(found[name].mean()),
            engine_p99=float(np.quantile(found[name], 0.99)),
            engine_top1=float(found[f"{name}.same"].mean()),
            predicted_mean=float(predicted.mean),
            predicted_p99=float(predicted.p99),
            predicted_top1=float(predicted.top1),
            is_predictable=not apart or apart not in name,
        )
        rows.append(row)
    rows.sort(key=lambda row: row.engine_mean)
    results = ENVIRONMENTS / "results"
    results.mkdir(exist_ok=True)
    kept = {
        "model": subject.losses.shape.model_id,
        "engine": engine,
        "tokens": int(found["nll"].size),
    }
    text = json.dumps({**kept, "rows": [vars(row) for row in rows]}, indent=1)
    (results / f"{engine}-{subject.weights.stem}.json").write_text(text, encoding="utf-8")
    return rows


def check_means(rows: Iterable[Row], *, within: float = 1.25) -> None:
    """A predicted loss is within a factor of the engine's, if either is above .001 nats."""
    assert not [row for row in rows if row.is_judged and not 1 / within < row.ratio < within]


def check_order(rows: Iterable[Row]) -> None:
    """Of two settings that differ by a tenth in the engine, the same one is predicted to be better.

    Neighbours that are closer can change places, on other texts in the engine itself.
    """
    swapped = [
        (one.setting, other.setting)
        for one, other in permutations(rows, 2)
        if other.engine_mean > 1.1 * one.engine_mean and other.predicted_mean < one.predicted_mean
    ]
    assert not swapped
