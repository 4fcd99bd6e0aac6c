"""The oracle of the runtime, on a code path of its own, and tiny models to hold it against.

Full cache plus a mask of minus infinity on exactly the evicted entries, in float32 on eager
attention. Nothing of `kvalloc.runtime` is used here but the list of what was evicted, and the
rounding of numbers, which has tests by hand.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from scipy.linalg import hadamard
from tiny_models import FAMILIES, random_model
from transformers import DynamicCache

from kvalloc.accounting.costs import WIDTHS, constant_entries, turns
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.models.attention import intercept_attention
from kvalloc.models.loading import shape_of as looked_at
from kvalloc.runtime.quantization import quantised_keys, quantised_values
from kvalloc.shape import ModelShape

N_LAYERS, N_QUERY_HEADS, N_KV_HEADS, HEAD_DIM, VOCABULARY = 4, 4, 2, 16, 97
SINKS, WINDOW = 2, 4
IMAGE, IMAGE_START = 98, 97  # no other prompt has them


def tiny_model(
    family: str = "llama",
    attention: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 11,
    **changes: Any,
) -> Any:
    """A random model with peaky attention, so that an eviction really changes its output."""
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": N_LAYERS,
        "num_attention_heads": N_QUERY_HEADS,
        "num_key_value_heads": N_KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 1024,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "eos_token_id": FAMILIES[family][2].get("eos_token_id"),
    }
    model = random_model(family, attention, seed, {**sizes, **changes})
    model.config._name_or_path = "tiny"
    return model.to(dtype).eval()


def eager_twin(model: Any, dtype: torch.dtype = torch.float32) -> Any:
    """The same weights in float32, or more, on eager attention, on the CPU."""
    twin = copy.deepcopy(model).cpu()
    twin.set_attn_implementation("eager")
    return twin.to(dtype).eval()


def shape_of(model: Any, **changes: Any) -> ModelShape:
    """The model's sizes; of full and sliding layers written down independently of the runtime."""
    config = model.config
    if (
        {*(getattr(config, "layer_types", None) or ())} - {"full_attention", "sliding_attention"}
        or (getattr(config, "kv_lora_rank", None) or getattr(config, "num_kv_shared_layers", None))
        or any(hasattr(config, one) for one in ("mamba_d_ssm", "text_config"))
    ):
        return replace(looked_at(model, model_id="tiny"), **changes)
    types = getattr(config, "layer_types", None) or ["full_attention"] * config.num_hidden_layers
    values: dict[str, Any] = {
        "model_id": "tiny",
        "n_layers": config.num_hidden_layers,
        "n_query_heads": config.num_attention_heads,
        "n_kv_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "dtype_bytes": next(model.parameters()).element_size(),
        "layer_types": tuple("full" if kind == "full_attention" else "sliding" for kind in types),
        "sliding_window": config.sliding_window if "sliding_attention" in types else None,
    }
    return ModelShape(**{**values, **changes})


def make_profile(
    model: Any,
    context_tokens: int,
    budgets: list[int] | float = 0.5,
    *,
    scorer: str = "xkv",
    sinks: int = SINKS,
    window: int = WINDOW,
    parameters: dict[str, Any] | None = None,
    level: str = "layer",
    **changes: Any,
) -> BudgetProfile:
    """A layer-level profile; a share gives each full layer another budget around it."""
    shape = changes.pop("shape", None) or shape_of(model)
    full = shape.full_layers
    if isinstance(budgets, float):
        middle = budgets * context_tokens
        budgets = [
            round(min(max(middle + 3 * (i - len(full) // 2), sinks + window), context_tokens))
            if budgets < 1
            else context_tokens
            for i in range(len(full))
        ]
    table = np.full((shape.n_layers, shape.n_kv_heads), 0, dtype=np.int64)
    table[:] = constant_entries(shape, context_tokens)
    for layer, budget in zip(full, budgets, strict=True):
        table[layer] = budget
    return BudgetProfile(
        shape=shape,
        level=level,  # type: ignore[arg-type]
        context_tokens=context_tokens,
        budgets=table,
        policy=Policy(
            scorer=scorer,
            scorer_parameters={"window": window, **(parameters or {})},
            sinks=sinks,
            window=window,
        ),
        **changes,
    )


def prompt(tokens: int, batch: int = 1, seed: int = 0) -> torch.Tensor:
    """Random token ids, (batch, tokens)."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCABULARY, (batch, tokens), generator=generator)


def kept_of(cache: Any) -> dict[int, torch.Tensor]:
    """What each full-attention layer of a reduced cache kept of its prompt."""
    full = cache.profile.shape.full_layers
    return {layer: cache.kept_indices(layer).cpu() for layer in full}


def same_kept(*caches: Any) -> bool:
    """Whether all layers of several caches kept the same of their prompts."""
    first, *others = (kept_of(cache) for cache in caches)
    return all(torch.equal(kept, other[layer]) for other in others for layer, kept in first.items())


def by_head(profile: BudgetProfile, spread: int = 12) -> BudgetProfile:
    """The profile with a budget for each head, around the layer's."""
    budgets = profile.budgets.copy()
    least, most = profile.policy.protected_tokens, profile.context_tokens
    for layer in profile.shape.full_layers:
        moved = np.linspace(-spread, spread, budgets.shape[1]).round().astype(np.int64)
        budgets[layer] = np.clip(budgets[layer] + moved + layer % 3, least, most)
    return profile.replace(level="head", budgets=budgets)


class Shadow:
    """What the model would say, however tokens arrive, if evicted entries were hidden from then on.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model under test; an eager twin of it answers.
    dtype : torch.dtype
        The twin's. (Rotary angles, norms and softmax transformers computes in float32 at least.)
    """

    def __init__(self, model: Any, dtype: torch.dtype = torch.float32) -> None:
        self.model = eager_twin(model, dtype)
        self.cache = DynamicCache(config=self.model.config)
        self.shown: dict[int, torch.Tensor] = {}
        self.steps: dict[int, torch.Tensor] = {}  # half those of each segment's first keys

    def logits(
        self,
        ids: torch.Tensor,
        mask: torch.Tensor | None = None,
        sees: torch.Tensor | None = None,
        **inputs: Any,
    ) -> torch.Tensor:
        """Logits of the next tokens; ``mask`` is 0 for padding, all columns so far.

        ``sees``, (batch, n, n), is which of the next tokens see which, if that is not causal.
        """

        by_layer = shape_of(self.model).by_layer

        def hide(states: Any, compute: Any) -> Any:
            reads = by_layer[states.layer].reads
            layer = states.layer if reads is None else reads
            if layer not in self.layers():
                return compute(states.mask)
            new, total = states.queries.shape[2], states.keys.shape[2]
            batch, heads = states.keys.shape[:2]
            shown = torch.ones(batch, heads, new, total).tril(total - new).bool()
            if sees is not None:
                shown[..., total - new :] = sees[:, None]
            if mask is not None:
                shown &= mask.bool()[:, None, None]
            before = self.shown.get(layer)
            if before is not None:
                shown[..., : before.shape[-1]] &= before[:, :, None]
            own = torch.ones(new, total).tril(total - new).triu(total - new).bool()
            hidden = torch.zeros(shown.shape).masked_fill(~(shown | own), float("-inf"))
            group = states.queries.shape[1] // heads
            return compute(hidden.repeat_interleave(group, dim=1))

        with torch.no_grad(), intercept_attention(self.model, hide):
            out = self.model(ids, attention_mask=mask, past_key_values=self.cache, **inputs)
        found: torch.Tensor = out.logits
        return found

    def layers(self) -> tuple[int, ...]:
        """The full-attention layers."""
        return shape_of(self.model).full_layers

    def follow(self, cache: Any, *, combined: bool = False) -> None:
        """From now on hide what the cache has evicted, and go on with what it stores.

        ``combined`` as in `take_stored`.
        """
        columns = self.cache.get_seq_length()
        for layer, kept in kept_of(cache).items():
            # what followed a row's latest eviction: the window is always kept
            latest = torch.arange(columns) > kept.amax(dim=(1, 2))[:, None]
            self.shown[layer] = visible(kept, columns) | latest[:, None]
        self.take_stored(cache, combined=combined)

    def take_stored(self, cache: Any, *, combined: bool = False) -> None:
        """Go on with the numbers that the cache stores rounded, or that a policy made.

        A number in the middle between two codes is rounded up or down by the last bit of what the
        model computed, which no two programs share: hence the stored one is taken. It has to be
        the oracle's own one rounded: within half a step of its block, or where that is the first
        one of its keys, of what it was before. What a policy has put into entries that stay is held
        against loops elsewhere.

        Parameters
        ----------
        cache : BudgetCache
            Followed since its latest eviction.
        combined : bool
            Whether its policy puts its own numbers into entries that stay.
        """
        for layer in self.layers():
            entries, own = cache.layers[layer].kept, self.cache.layers[layer]
            columns = cache.kept_indices(layer).long().cpu()
            if entries is None or not (combined or entries.is_rounded):
                continue
            sizes = *entries.lengths.shape, max(WIDTHS) + 1, own.keys.shape[-1], 1
            steps = self.steps.setdefault(layer, torch.zeros(sizes).to(own.keys))
            tokens = entries.padded(np.arange(entries.rows))[2].cpu()
            for (row, head), piece in each_piece(entries):
                width, keys, values = WIDTHS[piece.bits], piece.keys, piece.values
                places = columns[row, head, torch.isin(tokens[row, head], piece.positions.cpu())]
                stored = keys.to(own.keys), values.to(own.values)
                before = own.keys[row, head, places], own.values[row, head, places]
                if not combined and keys.dtype == torch.float32 and len(places):
                    pairs = [(before[0].T, stored[0].T), (before[1], stored[1])]
                    dim = int(values.shape[-1])
                    if turned := turns(piece.bits, dim):
                        turn = torch.from_numpy(hadamard(dim)).to(own.values) / dim**0.5
                        pairs[1] = before[1] @ turn, stored[1] @ turn
                    for (exact, rounded), bits in zip(
                        pairs, (width.keys, width.values), strict=True
                    ):
                        centred = turned and exact is not pairs[0][0]
                        off = (exact - rounded).abs()
                        most = half_step(exact, bits, centred=centred)
                        if exact is pairs[0][0] and bits < 16:  # keys
                            first = most[:, :64]
                            first[:] = torch.maximum(first, steps[row, head, piece.bits])
                            steps[row, head, piece.bits] = first.amax(dim=1, keepdim=True)
                        if centred:  # a block has the least squared error of several steps
                            off, most = (of_blocks(own) for own in (off, most))
                        assert (off <= most).all(), float(off.max())
                own.keys[row, head, places], own.values[row, head, places] = stored

    def reorder(self, rows: torch.Tensor) -> None:
        """Let row i continue what row ``rows[i]`` holds."""
        self.cache.reorder_cache(rows)
        for held in (self.shown, self.steps):
            for layer in held:
                held[layer] = held[layer][rows]


class Oracle(Shadow):
    """What the model would say if the evicted entries of one prompt were hidden, not gone.

    Parameters
    ----------
    model : transformers.PreTrainedModel
        The model under test; a float32 eager twin of it answers.
    prompt_ids : Tensor, (batch, n_tokens)
        The prompt. It runs with nothing hidden.
    kept : dict of int to Tensor, each (batch, n_kv_heads, n_kept)
        For each reduced layer, the positions that stay visible afterwards.
    """

    def __init__(self, model: Any, prompt_ids: torch.Tensor, kept: dict[int, torch.Tensor]) -> None:
        super().__init__(model)
        self.logits(prompt_ids)
        for layer, positions in kept.items():
            self.shown[layer] = visible(positions, prompt_ids.shape[1])

    def greedy(self, first: torch.Tensor, tokens: int) -> torch.Tensor:
        """Token ids of greedy decoding that starts with ``first``, (batch, tokens)."""
        out = [first]
        while len(out) < tokens:
            out.append(self.logits(out[-1])[:, -1].argmax(-1, keepdim=True))
        return torch.cat(out, dim=1)


def logits_after(
    model: Any, prompt: torch.Tensor, following: torch.Tensor, shown: dict[int, torch.Tensor]
) -> torch.Tensor:
    """Logits at the tokens after a prompt, of whose entries some layers show only these.

    Token ids are (batch, n_tokens), what a layer shows is bool, (batch, n_kv_heads, n_tokens).
    """
    shadow = Shadow(model)
    shadow.logits(prompt)
    shadow.shown = shown
    return shadow.logits(following)


def as_stored(numbers: torch.Tensor) -> torch.Tensor:
    """Return numbers as a reduced cache keeps them where they are not rounded further."""
    half = numbers.half()
    stored = half if half.isfinite().all() else numbers.bfloat16()
    return stored.to(numbers.dtype) if numbers.itemsize > 2 else numbers


def rounded(
    keys: torch.Tensor, values: torch.Tensor, bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values (n, head_dim) of one head as a reduced cache keeps them.

    At fewer bits than 16 by what measuring rounds with.
    """
    if bits == 16:
        return as_stored(keys), as_stored(values)
    keys, values = keys[None, None], values[None, None]
    return quantised_keys(keys, bits)[0, 0], quantised_values(values, bits)[0, 0]


def visible(kept: torch.Tensor, columns: int) -> torch.Tensor:
    """Whether a column is among those kept, bool, (batch, n_kv_heads, columns); -1 is none."""
    shown = torch.zeros(*kept.shape[:2], columns + 1, dtype=torch.bool)
    return shown.scatter(2, kept.long() % (columns + 1), True)[..., :columns]


def half_step(numbers: torch.Tensor, bits: int, *, centred: bool = False) -> torch.Tensor:
    """How far from a number the nearest of the steps of its block may be, with float16 scales.

    Blocks are of up to 64 numbers along the last axis; those around 0 have a step of their size.
    """
    if bits == 16:
        step = 2.0**-11 if numbers.half().isfinite().all() else 2.0**-8
        return numbers.abs() * step + 1e-4
    found = []
    for block in numbers.split(64, dim=-1):
        low, high = (edge.expand_as(block) for edge in block.aminmax(dim=-1, keepdim=True))
        # the least number and the step are float16 themselves, and the model's keys not the twin's
        scales = (low.abs() + high - low) * 2.0**-11 + 1e-4
        most = (high - low) / (2**bits - 1) / 2
        if centred:
            size = block.square().mean(-1, keepdim=True).sqrt()
            step = {4: 0.3352, 3: 0.586, 2: 0.9957}[bits] * size
            most = torch.maximum(step / 2, block.abs() - (2**bits - 1) / 2 * step)
        found.append(most + scales)
    return torch.cat(found, dim=-1)


def of_blocks(numbers: torch.Tensor) -> torch.Tensor:
    """Return the norm of each block of 64 along the last axis."""
    return torch.stack([block.norm(dim=-1) for block in numbers.split(64, dim=-1)])


def worst(found: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor | None = None) -> float:
    """Largest difference of logits, rows of padding left out."""
    difference = (found.double().cpu() - expected.double()).abs().amax(dim=-1)
    assert torch.isfinite(difference).all()
    if mask is not None:
        difference = difference[mask[:, -difference.shape[1] :].bool()]
    return float(difference.max())


def pieces_of(kept: Any) -> dict[tuple[int, int], SimpleNamespace]:
    """Keys, values and width of each segment of stored entries that has one width, as numbers."""
    return dict(each_piece(kept))


def each_piece(kept: Any) -> Iterator[tuple[tuple[int, int], SimpleNamespace]]:
    """Row and head, keys, values and width of what each segment has in each part, as numbers."""
    for part in kept.parts:
        numbers, ends = part.unpacked(kept.like), part.lengths.cumsum()
        for segment, length, end in zip(part.segments, part.lengths, ends, strict=True):
            own = slice(int(end - length), int(end))
            piece = SimpleNamespace(
                bits=part.bits,
                keys=numbers.keys[own],
                values=numbers.values[own],
                positions=numbers.positions[own],
            )
            yield divmod(int(segment), kept.heads), piece
