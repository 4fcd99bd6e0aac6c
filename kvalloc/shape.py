"""The shape of a model: layers, heads and tokens, and bytes of an entry."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from functools import cached_property
from re import fullmatch
from typing import Any, ClassVar, Literal, get_args

from kvalloc.errors import InputError, ModelMismatchError, one_line, option

LayerType = Literal["full", "latent", "hybrid", "sliding", "chunked", "state", "shared", "none"]
"""Kind of a layer: see `LayerShape.kind`."""

REDUCIBLE: tuple[LayerType, ...] = ("full", "latent", "hybrid")
"""Kinds of layers that get budgets."""

WINDOWED: tuple[LayerType, ...] = ("sliding", "chunked")
"""Kinds of layers that store only the last tokens."""

HALF_BYTES = 2
"""Bytes of a number at 16 bits."""


@dataclass(frozen=True, kw_only=True)
class LayerShape:
    """Stored entries and state of one layer of a model.

    Attributes
    ----------
    kind : str
        *full*: keys and values of all tokens. *latent*: a latent and a rotary key of each token,
        for all heads. *hybrid*: as *full*, and a state. *sliding*, *chunked*: the last tokens.
        *state*: a constant size. *shared*, *none*: nothing.
    key_dim, value_dim : int
        Numbers; of *latent*, a latent's and a rotary key's.
    window : int or None
        Tokens that a query sees.
    reads : int or None
        Layer that a shared one reads.
    state_bytes : int
        Of one row.
    """

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid", "strict": True}

    kind: LayerType
    kv_heads: int = 0
    key_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    reads: int | None = None
    state_bytes: int = 0

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Return KV heads, and the numbers of a key and of a value."""
        return self.kv_heads, self.key_dim, self.value_dim

    @property
    def sizes_text(self) -> str:
        """Return the sizes in words."""
        heads, key, value = self.sizes
        return f"{heads} KV heads with keys of {key} and values of {value} numbers"

    def stored_tokens(self, tokens: int) -> int:
        """Return the tokens stored without a budget: the last ``window - 1``, or none."""
        if self.kind not in WINDOWED:
            return 0
        return tokens if self.window is None else min(tokens, self.window - 1)


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """Sizes of a model's KV cache, and the model's identity.

    Raises
    ------
    InputError
        If sizes or layers do not fit.
    """

    # For pydantic, where a shape is part of a file.
    __pydantic_config__: ClassVar[dict[str, Any]] = {
        "extra": "forbid",
        "strict": True,
    }

    model_id: str
    """Hub id, or the base name of a local folder or file."""

    n_layers: int
    """Decoder layers."""

    n_query_heads: int
    """Query heads of one layer."""

    n_kv_heads: int
    """KV heads of one layer with a budget."""

    head_dim: int
    """Length of one key vector, elements."""

    dtype_bytes: int
    """Bytes of one element of a key or value vector in the model's type."""

    layer_types: tuple[LayerType, ...]
    """Kind of each layer, ``(n_layers,)``. A layer that is not of `REDUCIBLE` stores a constant
    size, so it is accounted for but never given a budget."""

    value_dim: int | None = None
    """Length of one value vector, elements, if it differs from a key's."""

    layers: tuple[LayerShape, ...] | None = None
    """Each layer, ``(n_layers,)``, if the sizes above do not describe all of them."""

    revision: str | None = None
    """Hub revision, if known."""

    sliding_window: int | None = None
    """Window of the sliding layers, tokens."""

    max_context_tokens: int | None = None
    """The model's limit of tokens."""

    vocab_size: int | None = None
    """Tokens of the vocabulary; None if unknown."""

    rotary: str | None = None
    """Rotary settings of the config, as JSON; None if unknown or without."""

    weights_digests: tuple[str, ...] | None = None
    """Digests of all weights, rounded to bfloat16, and to float16; one digest of a quantized form;
    None if unknown."""

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and value < 1:
                raise InputError(f"model shape: {name} is {one_line(value, 40)}, expected >= 1")
        if self.n_query_heads % self.n_kv_heads:
            raise InputError(
                f"model shape: {self.n_query_heads} query heads cannot share "
                f"{self.n_kv_heads} KV heads evenly"
            )
        known = get_args(LayerType)
        if len(self.layer_types) != self.n_layers or {*self.layer_types} - {*known}:
            raise InputError(
                f"model shape: layer_types must name one of {', '.join(known)} for each of the "
                f"{self.n_layers} layers, found {len(self.layer_types)} names"
            )
        if not self.full_layers:
            raise InputError(
                f"model shape: {self.model_id} has no layer that can be reduced, so there is no "
                "budget to decide"
            )
        if self.layers is not None:
            self._check_layers(self.layers)
        elif {*self.layer_types} - {"full", "sliding"}:
            raise InputError("model shape: layers are needed where not all are full or sliding")
        for digest in self.weights_digests or ():
            if not fullmatch("[0-9a-f]{64}", digest):
                raise InputError(
                    f"model shape: weights_digests has {one_line(digest, 80)}, expected SHA-256"
                )
        if "sliding" in self.layer_types and not self.sliding_window:
            raise InputError("model shape: sliding layers need a sliding_window in tokens")

    def _check_layers(self, layers: tuple[LayerShape, ...]) -> None:
        alike = self.n_kv_heads, *self.dims
        for index, layer in enumerate(layers):
            faults = {
                f"has {layer.sizes_text}, and layers with budgets are alike": (
                    layer.kind in REDUCIBLE and layer.sizes != alike
                ),
                "has a size below 0": min(*layer.sizes, layer.state_bytes) < 0,
                "has a window below 1": layer.window is not None and layer.window < 1,
                "reads a layer that is not there": not 0 <= (layer.reads or 0) < self.n_layers,
            }
            if (fault := next((text for text, has in faults.items() if has), None)) is not None:
                raise InputError(f"model shape: layer {index} {fault}")
        if tuple(layer.kind for layer in layers) != self.layer_types:
            raise InputError("model shape: layers and layer_types differ")

    @property
    def dims(self) -> tuple[int, int]:
        """Return the numbers of a key, and of a value."""
        return self.head_dim, self.value_dim or self.head_dim

    @cached_property
    def by_layer(self) -> tuple[LayerShape, ...]:
        """Return each layer's shape, ``(n_layers,)``."""
        if self.layers is not None:
            return self.layers
        heads = {"kv_heads": self.n_kv_heads, "key_dim": self.dims[0], "value_dim": self.dims[1]}
        window = {"full": None, "sliding": self.sliding_window}
        return tuple(LayerShape(kind=k, window=window[k], **heads) for k in self.layer_types)

    @cached_property
    def bytes_per_entry(self) -> int:
        """Return the bytes of K and V of a token and KV head, at 16 bits."""
        return sum(self.dims) * HALF_BYTES

    @cached_property
    def plain_bytes_per_entry(self) -> int:
        """Return the same in the model's type."""
        return sum(self.dims) * self.dtype_bytes

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Return the indices of layers with budgets."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind in REDUCIBLE)

    @cached_property
    def constant_layers(self) -> tuple[int, ...]:
        """Return the indices of all other layers."""
        return tuple(sorted({*range(self.n_layers)} - {*self.full_layers}))

    @cached_property
    def state_bytes(self) -> int:
        """Return the bytes of all states of one row."""
        return sum(layer.state_bytes for layer in self.by_layer)

    def source(self, layer: int) -> int:
        """Return the layer that a layer reads: itself, or an earlier one."""
        reads = self.by_layer[layer].reads
        return layer if reads is None else reads

    def check_context(self, tokens: int) -> None:
        """Refuse a context beyond the model's limit."""
        limit = self.max_context_tokens
        if limit is not None and tokens > limit:
            raise InputError(
                f"a context of {tokens} tokens is beyond the {limit} tokens of {self.model_id}; "
                "ask for a shorter one"
            )

    def require_same_model(
        self,
        other: ModelShape,
        *,
        allow_other_model: bool = False,
        file: str = "profile",
        made_by: str = "kvalloc profile",
    ) -> None:
        """Raise unless ``other`` has the same sizes, vocabulary, rotary settings and weights.

        If weights are unknown, the name decides. ``allow_other_model`` accepts other weights and
        names. ``file`` and ``made_by`` are for messages.

        Raises
        ------
        ModelMismatchError
        """
        heads = ("n_query_heads", "n_kv_heads", "head_dim")
        sizes = ("n_layers", *heads, "value_dim", "layer_types", "sliding_window", "layers")
        for name in (*sizes, "vocab_size", "rotary"):
            mine, value = getattr(self, name), getattr(other, name)
            if mine != value and (name in sizes or None not in (mine, value)):
                raise ModelMismatchError(
                    f"the {file} is for {self.model_id} with {name} {_brief(mine)}, but the model "
                    f"is {other.model_id} with {name} {_brief(value)}; make a {file} for this "
                    f"model with '{made_by}'"
                )
        if allow_other_model or self.has_weights_of(other) is True:
            return
        way_out = (
            f"; make a {file} for this model with '{made_by}', or allow another model of the "
            f"same sizes ({option('allow_other_model', True)})"
        )
        if self.has_weights_of(other) is False:
            raise ModelMismatchError(
                f"the {file} is for the weights of {self.model_id}, but the model "
                f"{other.model_id} has other weights{way_out}"
            )
        if _base_name(self.model_id) != _base_name(other.model_id):
            raise ModelMismatchError(
                f"the {file} is for {self.model_id}, but the model is {other.model_id}{way_out}"
            )

    def has_weights_of(self, other: ModelShape) -> bool | None:
        """Return whether both have the same weights when rounded to bfloat16, or to float16.

        None if a side's are unknown, or only one is a quantized form.
        """
        mine, digests = self.weights_digests, other.weights_digests
        if mine is None or digests is None or len(mine) != len(digests):
            return None
        return any(one == another for one, another in zip(mine, digests, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a file header."""
        data = asdict(self)
        data["layer_types"] = list(self.layer_types)
        return {k: v for k, v in data.items() if v is not None or k not in ("value_dim", "layers")}


def _base_name(model_id: str) -> str:
    return model_id.rstrip("/").rsplit("/", 1)[-1].casefold()


def _brief(value: object) -> str:
    if isinstance(value, tuple):
        kinds = Counter(getattr(one, "kind", one) for one in value)
        return f"{len(value)} ({', '.join(f'{n} {kind}' for kind, n in kinds.items())})"
    return str(value)
