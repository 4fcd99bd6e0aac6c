"""The state of a descent on disk, so that a killed one goes on and ends with the same numbers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from kvalloc.errors import InputError, option
from kvalloc.files import atomic_write

_FORMAT = 1
_META = "kvalloc.descent"


class StateFile:
    """One file with where a descent stands, rewritten after every step.

    Parameters
    ----------
    path : str or Path
        Beside the output.
    job : dict
        Everything that decides the numbers, as plain JSON values.
    resume : bool
        Whether to go on with what the file holds.

    Raises
    ------
    InputError
        If the file holds an unfinished descent and `resume` is False, it holds another descent, or
        it cannot be read.
    """

    def __init__(self, path: str | Path, job: dict[str, Any], *, resume: bool) -> None:
        self._path = Path(path)
        self._job: dict[str, Any] = json.loads(json.dumps({"format": _FORMAT, **job}))
        if not self._path.exists():
            return
        if not resume:
            raise InputError(
                f"{self._path} holds an unfinished descent; go on with "
                f"{option('resume', True)}, or delete the file to start over"
            )
        begun = self._read()[1]["job"]
        for field in sorted({*begun, *self._job}):
            if begun.get(field) != self._job.get(field):
                raise InputError(
                    f"cannot resume {self._path}: it was begun with another {field}; repeat the "
                    "first command, or delete the file to start over"
                )

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        """Tensors and plain values of the last step; None before the first."""
        if not self._path.exists():
            return None
        tensors, meta = self._read()
        return tensors, meta["values"]

    def save(self, tensors: dict[str, Tensor], values: dict[str, Any]) -> None:
        """Keep where the descent stands: whole or not at all."""
        from safetensors.torch import save_file

        told = json.dumps({"job": self._job, "values": values})
        own = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
        with atomic_write(self._path) as temporary:
            save_file(own, temporary, metadata={_META: told})

    def _read(self) -> tuple[dict[str, Tensor], dict[str, Any]]:
        from safetensors import SafetensorError, safe_open

        try:
            with safe_open(self._path, framework="pt") as file:
                meta = json.loads((file.metadata() or {})[_META])
                tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            meta["job"], meta["values"]
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            raise InputError(
                f"{self._path} cannot be read as the state of a descent; delete it to start over"
            ) from error
        return tensors, meta


def adam_tensors(adam: torch.optim.Adam, variables: dict[str, Tensor]) -> dict[str, Tensor]:
    """The variables of a descent and what Adam remembers of each."""
    found = dict(variables)
    for name, variable in variables.items():
        for key, value in adam.state[variable].items():
            found[f"{name}.{key}"] = torch.as_tensor(value)
    return found


def restore_adam(
    adam: torch.optim.Adam, variables: dict[str, Tensor], tensors: dict[str, Tensor]
) -> None:
    """Put back what `adam_tensors` gave."""
    with torch.no_grad():
        for name, variable in variables.items():
            variable.copy_(tensors[name])
            adam.state[variable] = {
                key: tensors[f"{name}.{key}"].to(
                    "cpu" if key == "step" else variable.device, copy=True
                )
                for key in ("step", "exp_avg", "exp_avg_sq")
            }
