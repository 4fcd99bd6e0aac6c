"""What kvalloc needs to know of a model: how many entries there are and what one costs."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from kvalloc.errors import InputError, ModelMismatchError, option

LayerType = Literal["full", "sliding"]


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """The sizes of a model's KV cache.

    Attributes
    ----------
    model_id : str
        Hub id, or the base name of a local folder or file.
    revision : str or None
        Hub revision, if known.
    n_layers, n_query_heads, n_kv_heads : int
        Decoder layers; query heads and KV heads of one layer.
    head_dim : int
        Length of one key or value vector, elements.
    dtype_bytes : int
        Bytes of one element of a key or value vector.
    layer_types : tuple of {"full", "sliding"}
        Attention of each layer, ``(n_layers,)``. A sliding layer keeps a constant number of
        entries whatever kvalloc decides, so it is accounted for but never given a budget.
    sliding_window : int or None
        Window of the sliding layers, tokens.
    max_context_tokens : int or None
        The longest context the model was made for, tokens.

    Raises
    ------
    InputError
        If a size is not positive, the query heads are not a multiple of the KV heads, or the
        layer types do not fit.
    """

    model_id: str
    n_layers: int
    n_query_heads: int
    n_kv_heads: int
    head_dim: int
    dtype_bytes: int
    layer_types: tuple[LayerType, ...]
    revision: str | None = None
    sliding_window: int | None = None
    max_context_tokens: int | None = None

    def __post_init__(self) -> None:
        for name in ("n_layers", "n_query_heads", "n_kv_heads", "head_dim", "dtype_bytes"):
            if getattr(self, name) < 1:
                raise InputError(f"model shape: {name} is {getattr(self, name)}, expected >= 1")
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
        if "sliding" in self.layer_types and not self.sliding_window:
            raise InputError("model shape: sliding layers need a sliding_window in tokens")

    @property
    def bytes_per_entry(self) -> int:
        """Bytes of one entry: the K and the V vector of one token in one KV head."""
        return 2 * self.head_dim * self.dtype_bytes

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the full-attention layers: the ones that get budgets."""
        return tuple(i for i, kind in enumerate(self.layer_types) if kind == "full")

    def sliding_entries(self, context_tokens: int) -> int:
        """Entries one KV head of a sliding layer stores after ``context_tokens`` tokens.

        transformers keeps the last ``sliding_window - 1`` tokens: the newest query brings its
        own key.
        """
        if self.sliding_window is None:
            return context_tokens
        return min(context_tokens, self.sliding_window - 1)

    def full_bytes(self, context_tokens: int, batch: int = 1) -> int:
        """Bytes a plain cache stores for ``batch`` rows of ``context_tokens`` tokens."""
        entries = sum(
            context_tokens if kind == "full" else self.sliding_entries(context_tokens)
            for kind in self.layer_types
        )
        return entries * self.n_kv_heads * self.bytes_per_entry * batch

    def require_same_model(self, other: ModelShape, *, allow_other_model: bool = False) -> None:
        """Raise unless ``other`` is the model this shape describes.

        Parameters
        ----------
        other : ModelShape
            The model at hand.
        allow_other_model : bool
            Accept another name (a fine-tune, a renamed folder) as long as the sizes agree.

        Raises
        ------
        ModelMismatchError
            If the sizes differ, or the names do and ``allow_other_model`` is False.
        """
        sizes = ("n_layers", "n_query_heads", "n_kv_heads", "head_dim", "layer_types")
        for name in sizes:
            mine, theirs = getattr(self, name), getattr(other, name)
            if mine != theirs:
                raise ModelMismatchError(
                    f"the profile is for {self.model_id} with {name} {_brief(mine)}, but the model "
                    f"is {other.model_id} with {name} {_brief(theirs)}; make a profile for this "
                    "model with 'kvalloc profile'"
                )
        if not allow_other_model and _base_name(self.model_id) != _base_name(other.model_id):
            raise ModelMismatchError(
                f"the profile is for {self.model_id}, but the model is {other.model_id}; make a "
                "profile for this model with 'kvalloc profile', or allow another model of the "
                f"same sizes ({option('allow_other_model', True)})"
            )

    def to_dict(self) -> dict[str, Any]:
        """Plain values for a file header."""
        data = asdict(self)
        data["layer_types"] = list(self.layer_types)
        return data

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> ModelShape:
        """The shape that `to_dict` described."""
        values = dict(data)
        values["layer_types"] = tuple(values["layer_types"])
        return cls(**values)


def _base_name(model_id: str) -> str:
    return model_id.rstrip("/").rsplit("/", 1)[-1].casefold()


def _brief(value: object) -> str:
    if isinstance(value, tuple):
        return f"{len(value)} entries with {value.count('sliding')} sliding"
    return str(value)
