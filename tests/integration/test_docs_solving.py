"""docs/solving.md: every command in it runs, on a small made-up score profile."""

from __future__ import annotations

import json
import re
import shlex
from inspect import signature
from pathlib import Path

import pytest
from cli_tools import refused, run
from factories import make_bits, make_losses, make_shape, make_shared_scores

from kvalloc.cli.solve import solve as solve_command
from kvalloc.problem.registry import solver_names

TEXT = (Path(__file__).parents[2] / "docs" / "solving.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", TEXT, flags=re.DOTALL)
COMMANDS = [line for block in BLOCKS for line in block.splitlines()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("docs")
    shape = make_shape(n_layers=16, n_kv_heads=2, head_dim=16)
    bits = make_bits(shape=shape, context_tokens=120)
    measured = {"bit_widths": bits.bit_widths, "bit_fidelity": bits.bit_fidelity}
    losses = make_losses(shape=shape, context_tokens=120)
    names = ("loss_tokens", "losses", "loss_stderr")
    measured |= {name: getattr(losses, name) for name in names}
    shared = make_shared_scores(longest=2, n_layers=16, n_kv_heads=2, context_tokens=120)
    scores = shared.replace(shape=shape, **measured)
    scores.save(path / "s.safetensors")
    (path / "w.json").write_text(json.dumps([1] * 8 + [2] * 8))
    return path


def arguments(line: str) -> list[str]:
    words = shlex.split(line, comments=True)
    assert words[0] == "kvalloc"
    return words[1:]


@pytest.mark.parametrize("line", COMMANDS, ids=lambda line: line.partition("#")[0].strip())
def test_every_command_runs(line: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    if line.endswith("# refused"):
        (folder / "p.json").unlink(missing_ok=True)
        told = refused(folder, *arguments(line))
        assert "is not possible with --cap" in told
        assert "or use --cap" in told
        return
    if "verify" in line:
        run("solve", "s.safetensors", "--budget", "20%", "-o", "p.json")
    ran = run(*arguments(line))
    assert ran.code == 0, ran.err


def test_every_flag_of_solve_is_shown() -> None:
    flags = {f"--{name.replace('_', '-')}" for name in signature(solve_command).parameters}
    common = {"--return", "--scores", "--output", "--json", "--quiet", "--context", "--average"}
    missing = {flag for flag in flags - common if flag not in TEXT}
    assert not missing


def test_every_solver_is_named() -> None:
    assert {name for name in solver_names() if f"`{name}`" not in TEXT} == {"auto"}
