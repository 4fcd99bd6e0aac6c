"""What a newcomer sees of the library: names, signatures, docstrings and short representations."""

import inspect
import json
import re
from pathlib import Path
from typing import get_args, get_type_hints

import pytest
from cli_tools import python
from runtime_oracle import prompt, tiny_model

import kvalloc
from kvalloc.allocation.request import TARGETS
from kvalloc.models.loading import LoadedModel
from kvalloc.online.per_prompt import NOT_OF_A_PROMPT

FUNCTIONS = [name for name in kvalloc.__all__ if inspect.isfunction(getattr(kvalloc, name))]
NOT_SHOWN = {"apply": NOT_OF_A_PROMPT, "frontier": TARGETS}
DOCS = Path(__file__).parents[2] / "docs"


def test_dir_holds_the_public_names_and_nothing_else():
    _ = kvalloc.apply, kvalloc.runtime  # what was used is bound, and not listed for it
    assert dir(kvalloc) == sorted(kvalloc.__all__)


def test_the_rooms_that_the_documentation_names_are_reached_after_import_kvalloc():
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    rooms = sorted({*re.findall(r"kvalloc\.([a-z_]+)\.", pages)} - {"org"})
    assert {"runtime", "testing", "formats", "interop"} <= {*rooms}
    code = (
        f"import kvalloc, json; print(json.dumps([getattr(kvalloc, r).__name__ for r in {rooms}]))"
    )
    done = python(code, check=True)
    assert json.loads(done.stdout) == [f"kvalloc.{room}" for room in rooms]
    for name in ("no_such_room", "__no_such__"):
        with pytest.raises(AttributeError, match=f"module 'kvalloc' has no attribute '{name}'"):
            getattr(kvalloc, name)


@pytest.mark.parametrize("name", FUNCTIONS)
def test_every_keyword_stands_in_the_docstring(name):
    function = getattr(kvalloc, name)
    parameters = inspect.signature(function).parameters
    described = inspect.getdoc(function) or ""
    for one in parameters.values():
        if one.kind is not one.VAR_KEYWORD:
            assert re.search(rf"^(\w+, )*{one.name}(, \w+)* : ", described, re.MULTILINE), one.name
            continue
        assert f"**{one.name}\n" in described
        (options,) = get_args(get_type_hints(function)[one.name])
        ours = options.__annotations__.keys() - NOT_SHOWN.get(name, ())
        shown = re.findall(r"^(\w+)\n    \w", described.partition("Other Parameters")[2], re.M)
        assert ours == {*shown}


def test_a_loaded_model_and_an_applied_one_are_a_line():
    model = tiny_model()
    loaded = LoadedModel(model=model, tokenizer=None, model_id="a/model")
    assert repr(loaded) == "LoadedModel(a/model, LlamaForCausalLM, float32 on cpu)"
    applied = kvalloc.apply(model, budget="20%")
    assert repr(applied) == "Applied(LlamaForCausalLM, in effect; nothing read yet)"
    model.generate(prompt(60), max_new_tokens=20)
    applied.remove()
    share = f"asked for 20.0%, {applied.last_cache.share:.1%} of a cache at 16 bits, "
    assert repr(applied).startswith(f"Applied(LlamaForCausalLM, removed; last cache: {share}")
