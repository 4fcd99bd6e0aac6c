"""Solvers by name: ours are found the way anybody's are."""

from importlib.metadata import EntryPoint

import pytest
from cli_tools import run
from factories import make_scores

from kvalloc.allocation.decision import solve
from kvalloc.errors import InputError, SolverError
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.problem import registry


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


def test_an_option_without_a_value_is_refused():
    with pytest.raises(InputError, match="solver ilp cannot be made with"):
        registry.get_solver("ilp", workers=None)


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


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("kvalloc_fails:Solver", "cannot be loaded: division by zero; reinstall or remove the"),
        ("pathlib:Path", r"is not a subclass of kvalloc\.problem\.solver\.Solver"),
    ],
)
def test_a_broken_plug_in_is_named(own, monkeypatch, value, words):
    (own / "kvalloc_fails.py").write_text("1 / 0\n", encoding="utf-8")
    point = EntryPoint(name="broken", value=value, group=registry.SOLVERS)
    monkeypatch.setattr(registry, "_group", lambda group: {"broken": point})
    with pytest.raises(SolverError, match=rf"'broken' \({value}\) {words}"):
        registry.get_solver("broken")


def test_only_a_solver_is_named_by_module_and_class(own):
    """A file states a scorer's name, and must not load what it names."""
    with pytest.raises(InputError, match="no scorer 'kvalloc_own_solver:Floors'"):
        registry.load(registry.SCORERS, "kvalloc_own_solver:Floors")
