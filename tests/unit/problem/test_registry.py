"""Solvers by name: ours are found the way anybody's are."""

import subprocess
import sys
from importlib.metadata import EntryPoint

import pytest
from cli_tools import run
from factories import make_scores

from kvalloc.allocation.decision import solve
from kvalloc.errors import InputError, SolverError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.problem import registry


@pytest.fixture
def plug_in(monkeypatch):
    """Register an entry point for one test."""

    def register(name, value):
        point = EntryPoint(name=name, value=value, group=registry.SOLVERS)
        monkeypatch.setattr(registry, "_group", lambda group: {name: point})

    return register


@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("pyramid:beta=10", {"beta": 10.0}),
        ("adaptive_head:safeguard=floor:alpha=0", {"safeguard": "floor", "alpha": 0.0}),
        ("ilp: workers = 2", {"workers": 2}),
        ("head_classes:sink-tokens=2", {"sink_tokens": 2}),
        ("greedy", {}),
    ],
)
def test_options_get_the_type_that_the_solver_takes(text, options):
    found = registry.options_of(registry.get_solver(text))
    assert found == options
    assert {name: type(value) for name, value in found.items()} == {
        name: type(value) for name, value in options.items()
    }


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("pyramid:beta", {}, "no solver 'pyramid:beta'; the nearest is 'pyramid'"),
        ("pyramid:=3", {}, "'pyramid:=3' is not NAME or NAME:KEY=VALUE"),
        ("pyramid:beta=", {}, "'pyramid:beta=' is not NAME or NAME:KEY=VALUE"),
        ("pyramid:beta=3:beta=4", {}, "'pyramid:beta=3:beta=4' gives beta twice"),
        ("ilp:workers=1.5", {}, "workers is '1.5', expected a valid integer"),
        ("pyramid", {"gamma": 1}, "solver pyramid has no option 'gamma'; choose from: beta"),
        ("greedy", {"beta": 1}, "solver greedy has no option 'beta'; choose from: it has none"),
        ("pyramid", {"beta": "steep"}, "beta is 'steep', expected a valid number"),
        ("pyramid", {"beta": 1.0}, "beta is 1, expected more than 1"),
        ("pyramid", {"beta": float("nan")}, "expected more than 1"),
        ("adaptive_head", {"alpha": 1.5}, "alpha is 1.5"),
        ("adaptive_head", {"alpha": float("nan")}, "alpha is nan"),
        ("adaptive_head", {"safeguard": "none"}, "expected one of reference, floor"),
        ("ilp", {"gap": -0.1}, "gap -0.1 must be >= 0"),
        ("ilp", {"workers": 0}, "workers 0 >= 1"),
        ("ilp", {"backend": "scipy"}, "no back end 'scipy'; use auto, cp_sat"),
        ("ilp", {"workers": None}, "solver ilp cannot be made with"),
    ],
)
def test_options_that_cannot_be(name, options, words):
    with pytest.raises(InputError, match=words):
        registry.get_solver(name, **options)


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no.such.module:Solver", r"'broken' \(no.such.module:Solver\) cannot be loaded"),
        ("kvalloc.solvers.greedy:Nothing", "cannot be loaded"),
        ("kvalloc.solvers.pyramid:pyramid_line", r"pyramid_line\) is not a subclass of"),
        ("pathlib:Path", r"\(pathlib:Path\) is not a subclass of kvalloc\.problem\.solver\.Solver"),
    ],
)
def test_a_broken_plug_in_is_named(plug_in, value, words):
    plug_in("broken", value)
    with pytest.raises(SolverError, match=words):
        registry.get_solver("broken")


OWN = """from kvalloc.problem import Solution, Solver

class Floors(Solver):
    name, summary = "floors", "the smallest budgets"

    def __init__(self, step: int = 0) -> None:
        self.step = step

    def solve(self, problem, *, time_limit_seconds=None):
        return Solution.of(problem, 0 * problem.last_options + self.step)

class Nameless(Floors):
    name = None

class Unfinished(Solver):
    name, summary = "unfinished", "has no solve"
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    """A module of a user's own on the path, and a score profile."""
    (tmp_path / "kvalloc_own_solver.py").write_text(OWN, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    make_scores(4).save(tmp_path / "s.safetensors")
    return tmp_path


def test_a_solver_is_named_by_module_and_class(own):
    name, scores, out = "kvalloc_own_solver:Floors", own / "s.safetensors", own / "p.json"
    ran = run("solve", scores, "--budget", "50%", "--solver", f"{name}:step=1", "-o", out)
    assert (ran.code, ran.err) == (0, "")
    written = BudgetProfile.load(out)
    assert (written.solver, written.solver_options) == ("floors", {"step": 1})
    same = solve(scores, budget="50%", solver=f"{name}:step=1")
    assert same.budgets.tolist() == written.budgets.tolist()
    ran = run(
        "compare", scores, "--budget", "50%", "--solver", name, "--solver", "greedy", "--json"
    )
    assert [row["solver"] for row in ran.json] == ["greedy", "floors"]
    assert registry.get_solver("kvalloc.solvers.greedy:Greedy").name == "greedy"


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("no_such_module:Solver", "'no_such_module:Solver' cannot be loaded: No module named"),
        ("kvalloc_own_solver:Nothing", "has no attribute 'Nothing'; name a module that Python"),
        ("kvalloc_own_solver:OWN:step=1", "'kvalloc_own_solver:OWN' cannot be loaded"),
        ("pathlib:Path", "'pathlib:Path' is not a subclass of kvalloc.problem.solver.Solver"),
        ("json:dumps", "'json:dumps' is not a subclass of"),
        ("kvalloc_own_solver:Nameless", "has no name; set the class attributes name, summary"),
        ("kvalloc_own_solver:Unfinished", "cannot be made with {}: Can't instantiate abstract"),
        ("kvalloc_own_solver:Floors:size=2", "has no option 'size'; choose from: step"),
        ("kvalloc_own_solver:", "'kvalloc_own_solver:' cannot be loaded"),
        (":Floors", "':Floors' cannot be loaded"),
        ("kvalloc_own_solver", "no solver 'kvalloc_own_solver'"),
    ],
)
def test_a_module_or_class_that_is_no_solver_is_refused_in_one_line(own, name, words):
    ran = run("solve", own / "s.safetensors", "--budget", "50%", "--solver", name, "--json")
    assert ran.code == 2
    assert words in " ".join(ran.err.split())
    assert "Traceback" not in ran.err


def test_only_a_solver_is_named_by_module_and_class(own):
    """A file states a scorer's name, and must not load what it names."""
    with pytest.raises(InputError, match="no scorer 'kvalloc_own_solver:Floors'"):
        registry.load(registry.SCORERS, "kvalloc_own_solver:Floors")


def test_a_plug_in_that_fails_while_it_is_imported(plug_in, tmp_path, monkeypatch):
    (tmp_path / "kvalloc_plug_in_that_fails.py").write_text("1 / 0\n", encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    plug_in("broken", "kvalloc_plug_in_that_fails:Solver")
    with pytest.raises(SolverError, match="division by zero; reinstall or remove the package"):
        registry.get_solver("broken")


def test_listing_names_imports_no_solver():
    code = (
        "import sys; from kvalloc.problem.registry import solver_names; solver_names();"
        "print([m for m in sys.modules if m.startswith(('kvalloc.solvers', 'ortools', 'torch'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
