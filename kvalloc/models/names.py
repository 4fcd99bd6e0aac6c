"""Names of transformers and torch that are private or change between versions.

No other file contains one (``tests/unit/models/test_names.py``). A missing name costs only the
ability that needs it.
"""

from __future__ import annotations

import importlib
import inspect
import operator
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from kvalloc.errors import MissingDependencyError, UnsupportedModelError
from kvalloc.shape import LayerType

if TYPE_CHECKING:
    from torch import Tensor, nn
    from torch.utils.hooks import RemovableHandle

CACHE_ARGUMENTS = ("cache", "past_key_values")
"""Names of the cache in arguments and outputs of models, newest (transformers 5.24) first."""

COLUMN = "cache_position"
"""Argument of older versions: the columns of new tokens in the cache, (n_new_tokens,)."""

IMAGE_PLACES, IMAGE_FEATURES = "visual_pos_masks", "deepstack_visual_embeds"
"""Arguments of a decoder: the new tokens of images, and the list of tensors that its first layers
add to them, (n_image_tokens, hidden_size)."""

BY_TOKEN = {
    **dict.fromkeys(("inputs_embeds", "per_layer_inputs"), 1),
    **dict.fromkeys(("input_ids", "position_ids", COLUMN, "token_type_ids", IMAGE_PLACES), -1),
    **dict.fromkeys(("moe_mm_token_type_ids", "ple_input_ids", "task_type_ids"), -1),
    **dict.fromkeys(("input_shape_ids", "input_pronunciation_ids"), -1),
}
"""Arguments of a decoder with an axis of new tokens, and the index of that axis."""

IMAGE_AXES = "get_rope_index"
"""Method of a model that gives image tokens positions on several axes."""

LAYER = "layer_idx"
"""Attribute of an attention: its layer's index; an argument if layers share it."""

KEPT_LOGITS = "logits_to_keep"
"""Argument of a forward: number of latest tokens with logits; 0 for all."""

ENCODED = "mm_encoder_outputs"
"""Argument of ``generate()``: outputs of encoders, such as of images."""

READ_AGAIN = tuple(one for one in BY_TOKEN if one not in ("position_ids", COLUMN, IMAGE_PLACES))
"""Arguments of a decoder, (batch, n_new_tokens, ...), that identify the tokens."""

IMPLEMENTATION = "_attn_implementation"
"""Attribute of a config: the name of the attention implementation that its model uses."""

COMMIT = "_commit_hash"
"""Attribute of a config: the revision of the repository that it was read from."""

#: Makes the masks of an attention implementation. Eager attention adds its mask to the logits; in a
#: mask of sdpa, True marks visible entries; flash attention is always causal, aligned at the end,
#: and takes only the padding, (batch, n_tokens); flex attention takes a `BlockMask`.
MaskFunction: TypeAlias = Callable[..., Any]

AttentionFunction: TypeAlias = "Callable[..., tuple[Tensor, Tensor | None]]"


@cache
def lookup(path: str, ability: str) -> Any:
    """Return an object of torch or transformers, such as ``"torch.nn:Module.forward"``.

    Raises
    ------
    MissingDependencyError
        If the installed version lacks it; names the `ability` that needs it.
    """
    module, _, name = path.partition(":")
    try:
        return operator.attrgetter(name)(importlib.import_module(module))
    except (ImportError, AttributeError) as error:
        raise _missing(module.partition(".")[0], path.replace(":", "."), ability) from error


def _missing(package: str, name: str, ability: str) -> MissingDependencyError:
    version = importlib.import_module(package).__version__
    return MissingDependencyError(
        f"{ability} needs {name}, which {package} {version} does not have; install a version that "
        "kvalloc is tested with (README.md, 'Tested on')"
    )


# The cache


def cache_argument(model: Any) -> str:
    """Return the name of the cache in a model's forward.

    For a wrapper that takes any argument, such as PEFT's, it is `generation_argument`.
    """
    return _named_cache(type(model).forward) or generation_argument()


@cache
def generation_argument() -> str:
    """Return the name of the cache in ``generate()``.

    Raises
    ------
    MissingDependencyError
        If it is none of `CACHE_ARGUMENTS`.
    """
    path, ability = "transformers:GenerationMixin.prepare_inputs_for_generation", "a reduced cache"
    name = _named_cache(lookup(path, ability))
    if name is None:
        raise _missing("transformers", "an argument 'cache' of generate()", ability)
    return name


def _named_cache(function: Callable[..., Any]) -> str | None:
    return next((name for name in CACHE_ARGUMENTS if takes(function, name)), None)


def cache_keyword(model: Any, cache: Any) -> dict[str, Any]:
    """Return a cache as a keyword of a model's forward."""
    return {cache_argument(model): cache}


def cache_among(arguments: Mapping[str, Any]) -> Any:
    """Return the cache among arguments, or None."""
    for name in CACHE_ARGUMENTS:
        if arguments.get(name) is not None:
            return arguments[name]
    return None


def without_cache(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments without the cache."""
    return {name: value for name, value in arguments.items() if name not in CACHE_ARGUMENTS}


def is_paged(cache: Any) -> bool:
    """Return whether a cache is the paged one of ``generate_batch()``."""
    # its module is loaded if such a cache exists
    module = sys.modules.get("transformers.generation.continuous_batching.cache")
    kind = getattr(module, "PagedAttentionCache", None)
    return kind is not None and isinstance(cache, kind)


_LAYER_KINDS: dict[str, LayerType] = {
    "DynamicLayer": "full",
    "DynamicSlidingWindowLayer": "sliding",
    "LinearAttentionLayer": "state",
    "LinearAttentionAndFullAttentionLayer": "hybrid",
    "LinearAttentionAndSlidingWindowAttentionLayer": "sliding",
    "DummyLayer": "none",
}


def layer_kind(layer: Any) -> LayerType | None:
    """Return the kind of a cache layer, or None."""
    if has_state(layer) and not hasattr(layer, "number_of_states"):
        return None
    return _LAYER_KINDS.get(type(layer).__name__)


def has_state(layer: Any) -> bool:
    """Return whether a cache layer has a state."""
    return hasattr(layer, "conv_states")


def state_class() -> type:
    """Return transformers' cache layer of a state, or raise `MissingDependencyError`."""
    path = "transformers.cache_utils:LinearAttentionLayer"
    return lookup(path, "a reduced cache beside states")  # type: ignore[no-any-return]


def state_tensors(layer: Any) -> list[Tensor]:
    """Return the tensors of a cache layer's state."""
    states = (getattr(layer, name, None) or {} for name in ("conv_states", "recurrent_states"))
    return [tensor for one in states for tensor in one.values() if tensor is not None]


EXPANSION = "expand_kv"
"""Method of a layer that expands latents and rotary keys, (batch, 1, n_tokens, dim) each, to keys
and values of all heads."""


@cache
def takes(function: Callable[..., Any], argument: str) -> bool:
    """Return whether a function has this argument."""
    return argument in inspect.signature(function).parameters


def can_take_back(layer: Any) -> bool:
    """Return whether a cache layer can remove its latest tokens."""
    slides = getattr(layer, "is_sliding", False)
    return not has_state(layer) and (not slides or hasattr(layer, "record_past"))


def record_past(layers: Iterable[Any]) -> None:
    """Let sliding-window layers keep all tokens until the next `crop`."""
    for layer in layers:
        if hasattr(layer, "activate_past_recording"):
            layer.activate_past_recording()


# Attention


def base_implementation(config: Any) -> str:
    """Return a model's attention implementation, such as ``"sdpa"``."""
    return getattr(config, IMPLEMENTATION) or "eager"


def set_implementation(config: Any, name: str) -> None:
    """Set the implementation in the config of a model that Dynamo traces.

    Restore it before the graph ends: Dynamo then writes the last value.
    """
    config._attn_implementation_internal = name


def register_implementation(name: str, function: Callable[..., Any]) -> None:
    """Add an implementation to transformers' table."""
    lookup("transformers:AttentionInterface", "a reduced cache").register(name, function)


@cache
def attention_function(kind: Any, base: str) -> AttentionFunction:
    """Return the function that a layer calls for an attention implementation.

    A modeling file may override one, and only it has the eager function. The file of the class
    comes first, then its parents' files.

    Raises
    ------
    UnsupportedModelError
    """
    for parent in kind.__mro__:
        modeling_file = sys.modules.get(parent.__module__)
        if base == "eager":
            eager = getattr(modeling_file, "eager_attention_forward", None)
            if eager is not None:
                return eager  # type: ignore[no-any-return]
        table = getattr(modeling_file, "ALL_ATTENTION_FUNCTIONS", None)
        if table is not None and base in table:
            return table[base]  # type: ignore[no-any-return]
    raise UnsupportedModelError(
        f"{kind.__name__} has no {base} attention function that kvalloc can call; load "
        'the model with attn_implementation="sdpa".'
    )


def mask_function(base: str) -> MaskFunction | None:
    """Return the mask function of an attention implementation; None if unknown.

    Another package's implementation is known by its registered mask function.
    """
    ability = f"a reduced cache on {base} attention"
    functions = lookup("transformers:AttentionMaskInterface", ability)()
    function: MaskFunction | None = functions.get(base)
    if base in ("eager", "sdpa"):
        return function
    kinds = ("flash_attention_mask", "flex_attention_mask")
    known = [lookup(f"transformers.masking_utils:{kind}", ability) for kind in kinds]
    return function if function in known else None


# Modules, and torch.compile


def forward_hooks(attributes: Mapping[str, Any]) -> Iterator[tuple[str, dict[int, Any]]]:
    """Yield a module's tables of forward hooks, by name."""
    return ((name, hooks) for name, hooks in attributes.items() if name.startswith("_forward_"))


def renumber(module: nn.Module, handle: RemovableHandle, number: int) -> None:
    """Replace torch's number of a module's hook."""
    for _, hooks in forward_hooks(vars(module)):
        if handle.id in hooks:
            hooks[number] = hooks.pop(handle.id)
    handle.id = number


def uncompiled(model: Any) -> Any:
    """Return the model without a wrapper of ``torch.compile``."""
    return getattr(model, "_orig_mod", model)


def is_compiled(module: nn.Module) -> bool:
    """Return whether a module is compiled, in place or by a wrapper."""
    attributes = vars(module)  # a failing attribute search of a module takes long
    compiled = attributes.get("_compiled_call_impl") is not None
    return compiled or "_orig_mod" in attributes["_modules"]


_FLOATS = {float, np.float64}
"""Exact types, which are compared in far less time than `isinstance` takes."""


def own_parts(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield a module's numbers, tensors, active adapters and modules, by name.

    Adapters that are off or merged are left out.
    """
    attributes, wraps = vars(module), hasattr(type(module), "adapter_layer_names")
    if not _FLOATS.isdisjoint(map(type, attributes.values())):  # few modules have any
        for name, value in attributes.items():
            if type(value) in _FLOATS and name != "p" and "drop" not in name:
                yield name, value
    tensors = {**attributes["_parameters"], **attributes["_buffers"]}
    yield from ((name, tensor) for name, tensor in tensors.items() if tensor is not None)
    weight = tensors.get("weight")
    if weight is not None and not weight.is_floating_point():
        for holder, name in ((weight, "absmax"), (weight, "SCB"), (attributes.get("state"), "SCB")):
            if (scales := getattr(holder, name, None)) is not None:
                yield name, scales
    for name, child in attributes["_modules"].items():
        if child is not None and (not wraps or name in ("base_layer", "original_module")):
            yield name, child
    if not wraps or module.disable_adapters:
        return
    for adapter in module.active_adapters:
        for name in (*module.adapter_layer_names, *module.other_param_names):
            part: Any = getattr(module, name, None)
            if adapter not in module.merged_adapters and hasattr(part, "keys") and adapter in part:
                yield f"{name}.{adapter}", part[adapter]


def packed_numbers(module: Any) -> Any:
    """Return the holder of weight and bias in a module quantized by torch."""
    return getattr(getattr(module, "_packed_params", None), "_packed_params", None)


def version(tensor: Tensor) -> int:
    """Return torch's count of writes to a tensor."""
    return 0 if tensor.is_inference() else tensor._version


def placement(module: nn.Module) -> Any:
    """Return accelerate's hook with a module's devices, or None."""
    hook = vars(module).get("_hf_hook")
    if hook is None:
        return None
    hooks = getattr(hook, "hooks", (hook,))  # one, or several in a row
    return next((one for one in hooks if hasattr(one, "weights_map")), None)


@cache
def compile_obstacle() -> str | None:
    """Return why this torch cannot serve compiled models, or None."""
    names = ("_FrameAction", "_FrameExecStrategy", "set_code_exec_strategy", "set_eval_frame")
    try:
        for name in names:
            lookup(f"torch._C._dynamo.eval_frame:{name}", "compiling a model with a reduced cache")
    except MissingDependencyError as error:
        return str(error)
    return None


def start_no_graph_at(function: Any) -> None:
    """Let Dynamo trace a function, but never start a graph at it."""
    if compile_obstacle() is None:
        from torch._C._dynamo import eval_frame

        skip, default = eval_frame._FrameAction.SKIP, eval_frame._FrameAction.DEFAULT
        strategy = eval_frame._FrameExecStrategy(skip, default)
        eval_frame.set_code_exec_strategy(function.__code__, strategy)


def set_frame_callback(callback: Any) -> Any:
    """Set Dynamo's callback for frames, None for no tracing; return the previous one.

    After a `compile_obstacle`, do nothing.
    """
    if compile_obstacle() is not None:
        return None
    from torch._C._dynamo.eval_frame import set_eval_frame

    return set_eval_frame(callback)


def mark_constant(function: Callable[..., Any]) -> None:
    """Let Dynamo run a function at trace time and put its result into the graph."""
    vars(function)["_dynamo_marked_constant"] = True


def is_tracing() -> bool:
    """Return whether this thread builds a graph, outside of traced code."""
    from torch._guards import TracingContext

    return TracingContext.try_get() is not None


def break_graph(why: str) -> None:
    """End the graph that Dynamo traces."""
    import torch

    torch._dynamo.graph_break(msg=why)
