"""Finished samples on disk, so that a killed measurement loses nothing that was finished."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from kvalloc.accounting import FloatArray
from kvalloc.errors import InputError, option
from kvalloc.files import atomic_write

_FORMAT = 1
_MANIFEST = "manifest.json"
_LOSSES = ("losses", "loss_stderr", "other_losses", "other_loss_stderr")


@dataclass(frozen=True, kw_only=True)
class MeasuredSample:
    """What one sample gave.

    Attributes
    ----------
    curves : ndarray of float64, (n_layers, n_kv_heads, n_points)
        Retention at the profile's ranks.
    masses : ndarray of float64, (n_layers, n_kv_heads)
        Evictable score mass.
    interpolation_error : float
        Largest difference between a curve and its interpolation.
    losses, loss_stderr : ndarray of float64, (n_layers, n_kv_heads or 1, n_levels), or None
        Loss curves and their standard errors, where those are measured.
    other_losses, other_loss_stderr : ndarray of float64, (n_layers, n_kv_heads or 1, n_policies,
            n_levels), or None
        The same with other policies.
    fidelity : ndarray of float64, (n_layers, n_kv_heads, n_bits), or None
        What each bit width leaves of the attention output, where that was asked for.
    shared : ndarray of float64, (n_runs, n_kv_heads, n_points), or None
        Joint curves of the runs of layers that share, where those are measured.
    """

    curves: FloatArray
    masses: FloatArray
    interpolation_error: float
    losses: FloatArray | None = None
    loss_stderr: FloatArray | None = None
    other_losses: FloatArray | None = None
    other_loss_stderr: FloatArray | None = None
    fidelity: FloatArray | None = None
    shared: FloatArray | None = None


def checkpoint_folder(output: str | Path) -> Path:
    """Where the samples of an unfinished ``output`` are kept: ``OUT.partial`` beside it."""
    target = Path(output)
    return target.with_name(f"{target.name}.partial")


class Checkpoint:
    """A folder with one file for each finished sample and a manifest of the job.

    Parameters
    ----------
    folder : str or Path
        Created if missing; its parent must exist.
    job : dict
        Everything that decides the numbers, as plain JSON values.
    resume : bool
        Whether to go on with what the folder holds.

    Raises
    ------
    InputError
        If the folder holds an unfinished job and `resume` is False, if it holds another job, or
        if it cannot be written to.
    """

    def __init__(self, folder: str | Path, job: dict[str, Any], *, resume: bool) -> None:
        self._folder = Path(folder)
        if (self._folder / _MANIFEST).exists():
            self._check_unfinished(job, resume=resume)
            return
        try:
            self._folder.mkdir(exist_ok=True)
        except OSError as error:
            raise InputError(
                f"cannot create the folder {self._folder} for finished samples "
                f"({error.strerror}); write to another folder"
            ) from error
        with atomic_write(self._folder / _MANIFEST) as temporary:
            manifest = {"format": _FORMAT, "job": job}
            temporary.write_text(json.dumps(manifest, indent=1), encoding="utf-8")

    def save(self, index: int, sample: MeasuredSample) -> None:
        """Keep a finished sample: whole or not at all."""
        from safetensors.numpy import save_file

        arrays = {
            "curves": np.ascontiguousarray(sample.curves),
            "masses": np.ascontiguousarray(sample.masses),
            "interpolation_error": np.array([sample.interpolation_error]),
        }
        for name in (*_LOSSES, "fidelity"):
            array = getattr(sample, name)
            if array is not None:
                arrays[name] = np.ascontiguousarray(array)
        if sample.shared is not None:
            arrays["shared"] = np.ascontiguousarray(sample.shared)
        with atomic_write(self._file(index)) as temporary:
            save_file(arrays, temporary)

    def load(
        self, index: int, curves_shape: tuple[int, int, int], n_runs: int = 0
    ) -> MeasuredSample | None:
        """A finished sample, or None when there is none that can be trusted.

        Parameters
        ----------
        index : int
            Which sample.
        curves_shape : tuple of int
            ``(n_layers, n_kv_heads, n_points)``.
        n_runs : int
            Runs of layers that share.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load_file

        try:
            arrays = load_file(self._file(index))
            sample = MeasuredSample(
                curves=arrays["curves"],
                masses=arrays["masses"],
                interpolation_error=float(arrays["interpolation_error"][0]),
                **{name: arrays.get(name) for name in _LOSSES},
                fidelity=arrays.get("fidelity"),
                shared=arrays.get("shared"),
            )
        except (OSError, SafetensorError, KeyError, IndexError):
            return None  # missing or damaged: measured again
        sound = sample.curves.shape == curves_shape and sample.masses.shape == curves_shape[:2]
        sound &= bool(np.isfinite(sample.curves).all())
        if n_runs:
            wanted, shared = (n_runs, *curves_shape[1:]), sample.shared
            sound &= shared is not None and shared.shape == wanted
            sound &= shared is not None and bool(np.isfinite(shared).all())
        return sample if sound else None

    def remove(self) -> None:
        """Delete the folder: the job is done."""
        self.remove_folder(self._folder)

    @staticmethod
    def remove_folder(folder: str | Path) -> None:
        """Delete the folder of a job that is done."""
        shutil.rmtree(folder, ignore_errors=True)

    def _file(self, index: int) -> Path:
        return self._folder / f"sample_{index:05d}.safetensors"

    def _check_unfinished(self, job: dict[str, Any], *, resume: bool) -> None:
        if not resume:
            raise InputError(
                f"{self._folder} holds an unfinished measurement; go on with "
                f"{option('resume', True)}, or delete the folder to start over"
            )
        try:
            manifest = json.loads((self._folder / _MANIFEST).read_text(encoding="utf-8"))
            begun, version = manifest["job"], manifest["format"]
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self._folder / _MANIFEST} cannot be read; delete the folder to start over"
            ) from error
        if version != _FORMAT:
            begun = {**begun, "format": version}
            job = {**job, "format": _FORMAT}
        wanted = json.loads(json.dumps(job))
        for field in sorted({*begun, *wanted}):
            if begun.get(field) != wanted.get(field):
                raise InputError(
                    f"cannot resume {self._folder}: it was begun with {field} "
                    f"{_brief(begun.get(field))}, now it is {_brief(wanted.get(field))}; repeat "
                    "the first command, or delete the folder to start over"
                )


def _brief(value: object, limit: int = 60) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text if len(text) <= limit else text[: limit - 3] + "..."
