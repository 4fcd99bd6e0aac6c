"""The shape of a model: numbers of layers, heads and tokens, and bytes of an entry."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from functools import cached_property
from re import fullmatch
from typing import Any, ClassVar, Literal

from kvalloc.errors import InputError, ModelMismatchError, one_line, option

LayerType = Literal["full", "sliding"]

HALF_BYTES = 2
"""A number at 16 bits."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model's KV cache, and by what a model is known.

    Raises
    ------
    InputError
        If a size is not positive, the query heads are not a multiple of the KV heads, or the
        layer types do not fit.
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
    """KV heads of one layer."""

    head_dim: int
    """Length of one key or value vector, elements."""

    dtype_bytes: int
    """Bytes of one element of a key or value vector as the model computes it."""

    layer_types: tuple[LayerType, ...]
    """Attention of each layer, ``(n_layers,)``. A sliding layer keeps a constant number of entries
    whatever kvalloc decides, so it is accounted for but never given a budget."""

    revision: str | None = None
    """Hub revision, if known."""

    sliding_window: int | None = None
    """Window of the sliding layers, tokens."""

    max_context_tokens: int | None = None
    """The longest context the model was made for, tokens."""

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
        if len(self.layer_types) != self.n_layers or set(self.layer_types) - {"full", "sliding"}:
            raise InputError(
                f"model shape: layer_types must name 'full' or 'sliding' for each of the "
                f"{self.n_layers} layers, found {len(self.layer_types)} names"
            )
        if "full" not in self.layer_types:
            raise InputError(
                f"model shape: {self.model_id} has no full-attention layer, so there is no budget "
                "to decide"
            )
        for digest in self.weights_digests or ():
            if not fullmatch("[0-9a-f]{64}", digest):
                raise InputError(
                    f"model shape: weights_digests has {one_line(digest, 80)}, expected SHA-256"
                )
        if "sliding" in self.layer_types and not self.sliding_window:
            raise InputError("model shape: sliding layers need a sliding_window in tokens")

    @cached_property
    def bytes_per_entry(self) -> int:
        """Return the bytes of an entry at 16 bits: K and V vector of a token in one KV head."""
        return 2 * self.head_dim * HALF_BYTES

    @cached_property
    def plain_bytes_per_entry(self) -> int:
        """Return the bytes of one entry as the model computes it, as sliding layers store it."""
        return 2 * self.head_dim * self.dtype_bytes

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Return the indices of the full-attention layers: those that get budgets."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full")

    @cached_property
    def sliding_layers(self) -> tuple[int, ...]:
        """Return the indices of the layers with a sliding window."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "sliding")

    def require_same_model(
        self,
        other: ModelShape,
        *,
        allow_other_model: bool = False,
        file: str = "profile",
        made_by: str = "kvalloc profile",
    ) -> None:
        """Raise unless ``other`` is the model this shape describes.

        The same weights are one model under any name, and other weights another model. If that is
        unknown, the name decides; see `has_weights_of`.

        Parameters
        ----------
        other : ModelShape
            The model at hand.
        allow_other_model : bool
            Accept another name and other weights (a fine-tune, a renamed folder) as long as the
            sizes agree.
        file, made_by : str
            What has this shape, and the command that makes one, for the message.

        Raises
        ------
        ModelMismatchError
            If sizes, vocabulary or rotary settings differ; or if weights or names do and
            ``allow_other_model`` is False.
        """
        heads = ("n_query_heads", "n_kv_heads", "head_dim")
        sizes = ("n_layers", *heads, "layer_types", "sliding_window")
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
        """Return whether both have the same weights, whatever floating-point types they are in.

        They do if they agree when rounded to bfloat16, or when rounded to float16. None if one
        side does not know its weights, or if one of two is a quantized form: rounded weights do
        not tell from which they were rounded.
        """
        mine, digests = self.weights_digests, other.weights_digests
        if mine is None or digests is None or len(mine) != len(digests):
            return None
        return any(one == another for one, another in zip(mine, digests, strict=True))

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for a file header."""
        data = asdict(self)
        data["layer_types"] = list(self.layer_types)
        return data


def _base_name(model_id: str) -> str:
    return model_id.rstrip("/").rsplit("/", 1)[-1].casefold()


def _brief(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} entries with {value.count('sliding')} sliding"
    return str(value)
