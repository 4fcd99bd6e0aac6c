"""Names that change between versions stand in one file, and a missing one costs one ability."""

import ast
import inspect
from pathlib import Path

import pytest
import runtime_oracle as tiny
import torch
import transformers
from cli_tools import python
from torch import nn

import kvalloc
from kvalloc.errors import MissingDependencyError
from kvalloc.models import names

ROOT = Path(kvalloc.__file__).parent
OURS = {"_cpu", "_cpu_avx512", "_exit", "_inv_freq", "_module_id", "_users", "_viewed"}
OURS |= {"_kvalloc_applied", "_kvalloc_installed", "_kvalloc_replaced", "_KVALLOC_COMPLETE"}
OURS |= {"_fields"}
"""Not defined by a statement: the kernel's builds, `os._exit`, attributes set through a dict, and
what every named tuple has."""
CHANGED = {"past_key_values", "cache_params", "cache_position", "_global_mapping"}


def product():
    found = {path: ast.parse(path.read_text(encoding="utf-8")) for path in ROOT.rglob("*.py")}
    assert len(found) > 200
    return found


def defined(tree):
    """Names that a file gives to something of its own."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls"):
                yield node.attr
        elif isinstance(node, ast.alias):
            yield node.asname or node.name


def used(tree):
    """Attributes, keywords and texts that could name something, and modules that are imported."""
    pieces = {
        one for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for one in node.values
    }
    for node in ast.walk(tree):
        if node in pieces:
            continue
        if isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.keyword) and node.arg:
            yield node.arg
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            if node.value.isidentifier() and len(node.value) > 3:
                yield node.value
        elif isinstance(node, ast.ImportFrom):
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (one.name for one in node.names)


def test_names_that_change_stand_in_one_file():
    trees = product()
    own = OURS | {name for tree in trees.values() for name in defined(tree)}

    def foreign(name):
        if "." in name:
            return name.startswith(("transformers.", "torch._"))
        private = name.startswith("_") and not name.startswith("__") and name not in own
        return private or name in CHANGED

    found = {path: {name for name in used(tree) if foreign(name)} for path, tree in trees.items()}
    assert {"_orig_mod", "torch._C._dynamo", "past_key_values"} <= found.pop(Path(names.__file__))
    assert not {str(path): some for path, some in found.items() if some}


class _Old(nn.Module):
    """A model of an older version, or of somebody's own."""

    def forward(self, input_ids, past_key_values=None):
        return past_key_values


class _New(nn.Module):
    def forward(self, input_ids, cache=None):
        return cache


class _Wrapper(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, *args, **kwargs):
        return self.model(*args, **kwargs)


def test_a_cache_goes_by_the_name_that_the_model_takes():
    cache = transformers.DynamicCache()
    for model in (_Old(), _New()):
        assert model(None, **names.cache_keyword(model, cache)) is cache
    model = tiny.tiny_model()
    own = names.cache_argument(model)
    assert own in inspect.signature(type(model).forward).parameters
    assert names.cache_argument(model.model) == names.cache_argument(_Wrapper(model)) == own
    assert names.cache_argument(torch.compile(model)) == own
    with torch.no_grad():
        wrapper = _Wrapper(model)
        wrapper(input_ids=torch.tensor([[3, 4]]), **names.cache_keyword(wrapper, cache))
    assert cache.get_seq_length() == 2


def test_a_third_name_of_the_cache_is_refused_and_never_swallowed(monkeypatch):
    """A forward takes any keyword: a cache under a name that it does not know would be lost."""

    def prepare_inputs_for_generation(self, input_ids, kv=None, **kwargs):
        raise AssertionError

    names.generation_argument.cache_clear()
    names.lookup.cache_clear()
    monkeypatch.setattr(
        transformers.GenerationMixin,
        "prepare_inputs_for_generation",
        prepare_inputs_for_generation,
    )
    try:
        with pytest.raises(MissingDependencyError, match="needs an argument 'cache' of generate"):
            names.cache_argument(_Wrapper(_New()))
    finally:
        names.generation_argument.cache_clear()
        names.lookup.cache_clear()


RUN = """
import importlib, sys
import torch, runtime_oracle as tiny
import transformers.generation.utils, transformers.masking_utils
model = tiny.tiny_model()
module, _, path = sys.argv[1].partition(":")
*parents, name = path.split(".")
owner = importlib.import_module(module)
for parent in parents:
    owner = getattr(owner, parent)
delattr(owner, name)
import kvalloc, kvalloc.runtime
with torch.no_grad():
    try:
        with kvalloc.apply(model, budget="40%", scorer="snapkv", solver="uniform") as applied:
            model.generate(torch.arange(300)[None] % 90 + 3, max_new_tokens=3, do_sample=False)
        print(applied.last_cache.retained_bytes < applied.last_cache.full_bytes)
    except kvalloc.errors.MissingDependencyError as error:
        print(error)
"""


@pytest.mark.parametrize(
    ("gone", "printed"),
    [
        ("torch._C._dynamo.eval_frame:set_eval_frame", "True"),
        ("torch._C._dynamo.eval_frame:_FrameAction", "True"),
        ("transformers.masking_utils:flex_attention_mask", "True"),
        ("transformers.generation.utils:GenerateDecoderOnlyOutput", "True"),
        ("transformers.cache_utils:LinearAttentionLayer", "True"),
    ],
)
def test_a_name_that_is_gone_costs_what_needs_it(gone, printed):
    """Not ``import kvalloc.runtime``, nor a model that is not compiled."""
    done = python(RUN, gone)
    assert (done.returncode, done.stdout.strip()) == (0, printed), done.stderr


def test_a_compiled_model_is_refused_without_dynamos_switches(monkeypatch):
    model, ids = tiny.tiny_model(), tiny.prompt(60)
    why = "it needs torch.some_name"
    monkeypatch.setattr("kvalloc.models.names.compile_obstacle", lambda: why)
    cache = kvalloc.make_cache(model, tiny.make_profile(model, 60, 0.4))
    compiled = torch.compile(model, backend="eager")
    with torch.no_grad():
        model(ids, **names.cache_keyword(model, cache))
        with pytest.raises(Exception, match=f"{why}, or do not compile the model"):
            compiled(ids[:, :1], **names.cache_keyword(model, cache))
        model(ids[:, :1], **names.cache_keyword(model, cache))
    assert cache.get_seq_length() == 61
