"""Random models and a tokenizer that fit into a test: same code paths, no weights to fetch."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
import transformers

from kvalloc.accounting.costs import constant_entries
from kvalloc.formats.budget_profile import BudgetProfile, Policy
from kvalloc.models.loading import shape_of

VOCABULARY = 101

_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.4,
}


FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": None}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "phi3": ("Phi3Config", "Phi3ForCausalLM", {"eos_token_id": 1, "bos_token_id": 1}),
    "gemma2": (
        "Gemma2Config",
        "Gemma2ForCausalLM",
        {"sliding_window": 16, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    ),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", {"sliding_window": 16}),
    "gpt-oss": (
        "GptOssConfig",
        "GptOssForCausalLM",
        {
            # all experts: rounding chooses none of them
            **{"sliding_window": 16, "num_local_experts": 2, "num_experts_per_tok": 2},
            "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
        },
    ),
    "qwen3_5": (
        "Qwen3_5TextConfig",
        "Qwen3_5ForCausalLM",
        {
            "layer_types": ["linear_attention", "full_attention"] * 2,
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 2},
            **{"linear_key_head_dim": 8, "linear_value_head_dim": 8},
        },
    ),
    "falcon_h1": (
        "FalconH1Config",
        "FalconH1ForCausalLM",
        {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_d_ssm": 64},
    ),
    "deepseek_v3": (
        "DeepseekV3Config",
        "DeepseekV3ForCausalLM",
        {
            **{"num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 16, "q_lora_rank": 16},
            **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 16},
            **{"n_routed_experts": 2, "num_experts_per_tok": 1, "n_group": 1, "topk_group": 1},
            **{"first_k_dense_replace": 4},
        },
    ),
    "gemma3n": (
        "Gemma3nTextConfig",
        "Gemma3nForCausalLM",
        {
            **{"sliding_window": 16, "num_kv_shared_layers": 2, "laurel_rank": 8},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            **{"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 128},
            "activation_sparsity_pattern": [0.0] * 4,
        },
    ),
    "llama4": (
        "Llama4TextConfig",
        "Llama4ForCausalLM",
        {
            **{"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 16},
            "layer_types": ["chunked_attention", "full_attention"] * 2,
        },
    ),
    "qwen2_5_vl": (
        "Qwen2_5_VLConfig",
        "Qwen2_5_VLForConditionalGeneration",
        {
            **{"image_token_id": 98, "video_token_id": 99, "vision_start_token_id": 97},
            "text_config": {
                "rope_parameters": {
                    **{"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]},
                },
            },
            "vision_config": {"hidden_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 64},
        },
    ),
}
"""Configuration, class and settings of each family; every other layer of gemma2 and 3 slides."""


def random_model(family: str, attention: str, seed: int, sizes: dict[str, Any]) -> Any:
    """A random causal model of a family."""
    config_class, model_class, settings = FAMILIES[family]
    if family in ("gemma2", "gemma3"):
        kinds = ("sliding_attention", "full_attention")
        settings = settings | {
            "layer_types": [kinds[n % 2] for n in range(sizes["num_hidden_layers"])]
        }
    if "text_config" in settings:
        text = settings["text_config"] | sizes | {"vocab_size": sizes["vocab_size"] + 3}
        settings, sizes = settings | {"text_config": text}, {}
    own = {name: settings[name] for name in ("num_key_value_heads", "head_dim") if name in settings}
    config = getattr(transformers, config_class)(**{**settings, **sizes, **own})
    torch.manual_seed(seed)
    make = getattr(transformers, model_class)._from_config
    return make(config, attn_implementation=attention).eval()


def tiny_model(kind: str = "llama", *, attention: str = "sdpa", seed: int = 0, **sizes: Any) -> Any:
    """A random causal model of 3 layers, 6 query heads and 2 KV heads."""
    return random_model(kind, attention, seed, {**_SIZES, **sizes})


class WordTokenizer:
    """One token a word, by its checksum; with a start token if asked."""

    def __init__(self, *, start: bool = False) -> None:
        self.bos_token_id = 1 if start else None
        self._start = start

    def __call__(
        self, text: str, add_special_tokens: bool = True, verbose: bool = True
    ) -> dict[str, list[int]]:
        ids = [2 + zlib.crc32(word.encode()) % (VOCABULARY - 2) for word in text.split()]
        return {"input_ids": [1, *ids] if self._start and add_special_tokens else ids}

    def apply_chat_template(
        self, messages: list[dict[str, str]], tokenize: bool, add_generation_prompt: bool
    ) -> str:
        return " ".join(f"{message['role']} {message['content']}" for message in messages)


class NumberTokenizer:
    """Writes token ids down as numbers; nothing ends an answer."""

    eos_token_id = None

    def decode(self, ids: Any, skip_special_tokens: bool = False) -> str:
        return " ".join(f"t{token}" for token in ids)


def words(n_words: int, seed: int = 0) -> str:
    """A text of that many words, hence tokens."""
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(0, 1000, (n_words,), generator=generator)
    return " ".join(f"w{number}" for number in numbers.tolist())


SCORED_BY = ("window", "pool", "group_reduce")
"""Parameters of scorers that `tiny_profile` takes beside the options of a profile."""


def tiny_profile(model: Any = None, texts: Any = None, **options: Any) -> Any:
    """Score profile of a tiny model on 2 samples of 60 words, unless something else is asked."""
    from kvalloc.measure import profile
    from kvalloc.scorers import get_scorer

    of_scorer = {name: options.pop(name) for name in SCORED_BY if name in options}
    if of_scorer:
        options["scorer"] = get_scorer(options.get("scorer", "xkv"), **of_scorer)
    values = {"context": 60, "samples": 2, "model_id": "tests/tiny", **options}
    texts = [words(300)] if texts is None else texts
    return profile(model or tiny_model(), WordTokenizer(), texts, **values)


def equal_budgets(model: Any, kept: int, *, context_tokens: int = 40) -> BudgetProfile:
    """The same budget for every KV head; sliding layers keep what they need."""
    shape = shape_of(model)
    budgets = np.full((shape.n_layers, shape.n_kv_heads), kept, dtype=np.int64)
    sliding = [layer for layer in range(shape.n_layers) if layer not in shape.full_layers]
    budgets[sliding] = constant_entries(shape, context_tokens)[sliding]
    policy = Policy(scorer="xkv", scorer_parameters={"window": 4, "pool": 3}, sinks=2, window=4)
    return BudgetProfile(
        shape=shape, level="layer", context_tokens=context_tokens, budgets=budgets, policy=policy
    )
