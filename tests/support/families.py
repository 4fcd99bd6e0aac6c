"""A tiny random model of each family of transformers that people run, and prompts with images."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
import transformers

VOCABULARY, IMAGE = 128, 120

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
_DIM = {"head_dim": 8}
_SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"]}
_GEMMA = _DIM | _SLIDING
_GEMMA_3N = _GEMMA | {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": VOCABULARY}
_GEMMA_4 = _GEMMA_3N | {"global_head_dim": 8, "num_kv_shared_layers": 0}
_SHARED = {
    "num_hidden_layers": 4,
    "num_kv_shared_layers": 2,
    "layer_types": _SLIDING["layer_types"] * 2,
}
_LAUREL = {"laurel_rank": 8, "activation_sparsity_pattern": [0.0, 0.0]}
_EXPERTS = {"num_experts_per_tok": 1, "moe_intermediate_size": 16}
_LINEAR = {
    "layer_types": ["linear_attention", "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
_MULTI_HEAD = {"num_key_value_heads": 4}
_NO_KV_HEADS = {"num_key_value_heads": None}
_NO_HEADS = {"num_attention_heads": None}
_LATENT = {
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 4,
    "v_head_dim": 8,
    "n_routed_experts": 2,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
_MROPE = {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 1, 1]}
}
_SEES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
_QWEN_SEES = {"depth": 1, "num_heads": 2, "patch_size": 14, "hidden_size": 16}
_QWEN_2_SEES = _QWEN_SEES | {"embed_dim": 16, "hidden_size": 32}
_QWEN_3_SEES = _QWEN_SEES | {"out_hidden_size": 32, "intermediate_size": 16}
_QWEN_IMAGE = {
    "image_token_id": IMAGE,
    "video_token_id": 121,
    "vision_start_token_id": 122,
    "vision_end_token_id": 123,
}
_PLAIN = {"num_hidden_layers": 2, "vocab_size": VOCABULARY, "pad_token_id": 0, "eos_token_id": None}
_IMAGE_INDEX = {"image_token_index": IMAGE}
_IMAGE_ID = {"image_token_id": IMAGE}
_GEMMA_IMAGE = _IMAGE_INDEX | {"mm_tokens_per_image": 4, "boi_token_index": 121}

TEXT_ONLY: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DIM),
    "gemma4": ("Gemma4ForCausalLM", "Gemma4TextConfig", _GEMMA_4),
    "gemma4 by layer": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        _GEMMA_4 | {"global_head_dim": 16},
    ),
    "gemma4 shared": (
        "Gemma4ForCausalLM",
        "Gemma4TextConfig",
        _GEMMA_4 | _SHARED,
    ),
    "gemma3": ("Gemma3ForCausalLM", "Gemma3TextConfig", _GEMMA),
    "gemma3n": (
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        _GEMMA_3N | _LAUREL | {"num_kv_shared_layers": 0},
    ),
    "gemma3n shared": (
        "Gemma3nForCausalLM",
        "Gemma3nTextConfig",
        _GEMMA_3N | _LAUREL | _SHARED | {"activation_sparsity_pattern": [0.0] * 4},
    ),
    "qwen3.5": ("Qwen3_5ForCausalLM", "Qwen3_5TextConfig", _DIM | _LINEAR),
    "qwen3-next": (
        "Qwen3NextForCausalLM",
        "Qwen3NextConfig",
        _DIM | _LINEAR | _EXPERTS | {"num_experts": 2, "shared_expert_intermediate_size": 16},
    ),
    "llama4": (
        "Llama4ForCausalLM",
        "Llama4TextConfig",
        _DIM
        | {
            "intermediate_size_mlp": 48,
            "num_local_experts": 2,
            "attention_chunk_size": 32,
            "layer_types": ["chunked_attention", "full_attention"],
        },
    ),
    "gpt-oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        _DIM | {"sliding_window": 32, "num_local_experts": 2, "num_experts_per_tok": 1},
    ),
    "olmo3": ("Olmo3ForCausalLM", "Olmo3Config", _SLIDING),
    "hunyuan": ("HunYuanDenseV1ForCausalLM", "HunYuanDenseV1Config", _DIM),
    "mimo": (
        "MiMoV2FlashForCausalLM",
        "MiMoV2FlashConfig",
        _DIM | _EXPERTS | {"sliding_window": 32, "v_head_dim": 4, "n_routed_experts": 2},
    ),
    "deepseek": ("DeepseekV3ForCausalLM", "DeepseekV3Config", _MULTI_HEAD | _EXPERTS | _LATENT),
    "granite": ("GraniteForCausalLM", "GraniteConfig", {}),
    "cohere": ("CohereForCausalLM", "CohereConfig", {}),
    "cohere2": ("Cohere2ForCausalLM", "Cohere2Config", _GEMMA),
    "glm4": ("Glm4ForCausalLM", "Glm4Config", _DIM),
    "smollm3": ("SmolLM3ForCausalLM", "SmolLM3Config", {"no_rope_layers": [1, 0]}),
    "exaone4": ("Exaone4ForCausalLM", "Exaone4Config", _SLIDING),
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _NO_KV_HEADS),
    "jamba": (
        "JambaForCausalLM",
        "JambaConfig",
        {
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "num_experts": 2,
            "mamba_d_state": 8,
        },
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        "Zamba2Config",
        _MULTI_HEAD
        | {
            "layers_block_type": ["mamba", "hybrid"],
            "mamba_d_state": 8,
            "mamba_headdim": 8,
            "n_mamba_heads": 8,
            "num_mem_blocks": 1,
        },
    ),
    "bamba": ("BambaForCausalLM", "BambaConfig", _MAMBA | {"attn_layer_indices": [1]}),
    "falcon-h1": ("FalconH1ForCausalLM", "FalconH1Config", _DIM | _MAMBA | {"mamba_d_ssm": 64}),
    "lfm2": ("Lfm2ForCausalLM", "Lfm2Config", {"layer_types": ["conv", "full_attention"]}),
    "mamba": ("MambaForCausalLM", "MambaConfig", _NO_HEADS | {"state_size": 8}),
    "rwkv": ("RwkvForCausalLM", "RwkvConfig", _NO_HEADS | {"attention_hidden_size": 32}),
    "bloom": ("BloomForCausalLM", "BloomConfig", {"n_head": 4}),
    "t5": ("T5ForConditionalGeneration", "T5Config", {"d_model": 32, "d_kv": 8, "num_heads": 4}),
    "bart": (
        "BartForConditionalGeneration",
        "BartConfig",
        {"d_model": 32, "encoder_attention_heads": 4, "decoder_attention_heads": 4},
    ),
}
"""Model class, config class, and settings beside those of all."""

WITH_IMAGES: dict[str, tuple[str, str, tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "gemma3 with images": (
        "Gemma3ForConditionalGeneration",
        "Gemma3Config",
        ("Gemma3TextConfig", _GEMMA),
        _GEMMA_IMAGE
        | {"eoi_token_index": 122, "vision_config": {"model_type": "siglip_vision_model", **_SEES}},
    ),
    "paligemma": (
        "PaliGemmaForConditionalGeneration",
        "PaliGemmaConfig",
        ("Gemma2Config", _DIM | {"sliding_window": 32}),
        _IMAGE_INDEX
        | {
            "projection_dim": 32,
            "vision_config": {"model_type": "siglip_vision_model", "projection_dim": 32, **_SEES},
        },
    ),
    "qwen2-vl": (
        "Qwen2VLForConditionalGeneration",
        "Qwen2VLConfig",
        ("Qwen2VLTextConfig", _MROPE),
        _QWEN_IMAGE | {"vision_config": _QWEN_2_SEES},
    ),
    "qwen2.5-vl": (
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen2_5_VLConfig",
        ("Qwen2_5_VLTextConfig", _MROPE),
        _QWEN_IMAGE | {"vision_config": _QWEN_3_SEES | {"fullatt_block_indexes": [0]}},
    ),
    "qwen3-vl": (
        "Qwen3VLForConditionalGeneration",
        "Qwen3VLConfig",
        ("Qwen3VLTextConfig", _DIM | _MROPE),
        _QWEN_IMAGE
        | {
            "vision_config": _QWEN_3_SEES
            | {"deepstack_visual_indexes": [0], "num_position_embeddings": 64}
        },
    ),
    "llava": (
        "LlavaForConditionalGeneration",
        "LlavaConfig",
        ("LlamaConfig", _DIM),
        _IMAGE_INDEX | {"vision_config": {"model_type": "clip_vision_model", **_SEES}},
    ),
    "llava-next": (
        "LlavaNextForConditionalGeneration",
        "LlavaNextConfig",
        ("LlamaConfig", _DIM),
        _IMAGE_INDEX
        | {
            "image_grid_pinpoints": [[28, 28]],
            "vision_config": {"model_type": "clip_vision_model", **_SEES},
        },
    ),
    "mistral3": (
        "Mistral3ForConditionalGeneration",
        "Mistral3Config",
        ("MistralConfig", _DIM | {"sliding_window": None}),
        _IMAGE_INDEX | {"vision_config": {"model_type": "pixtral", "head_dim": 8, **_SEES}},
    ),
    "internvl": (
        "InternVLForConditionalGeneration",
        "InternVLConfig",
        ("Qwen2Config", {}),
        _IMAGE_ID
        | {
            "vision_config": {
                **_SEES,
                "model_type": "internvl_vision",
                "image_size": [28, 28],
                "patch_size": [14, 14],
            }
        },
    ),
    "smolvlm": (
        "SmolVLMForConditionalGeneration",
        "SmolVLMConfig",
        ("LlamaConfig", _DIM),
        _IMAGE_ID | {"pad_token_id": 0, "vision_config": _SEES},
    ),
    "idefics3": (
        "Idefics3ForConditionalGeneration",
        "Idefics3Config",
        ("LlamaConfig", _DIM),
        _IMAGE_ID | {"pad_token_id": 0, "vision_config": _SEES},
    ),
    "qwen3.5 with images": (
        "Qwen3_5ForConditionalGeneration",
        "Qwen3_5Config",
        ("Qwen3_5TextConfig", _DIM | _LINEAR),
        _QWEN_IMAGE | {"vision_config": _QWEN_3_SEES | {"num_position_embeddings": 64}},
    ),
    "llama4 with images": (
        "Llama4ForConditionalGeneration",
        "Llama4Config",
        (
            "Llama4TextConfig",
            _DIM
            | {"intermediate_size_mlp": 48, "num_local_experts": 2, "attention_chunk_size": 32},
        ),
        _IMAGE_INDEX
        | {
            "vision_config": {
                **_SEES,
                "intermediate_size": 64,
                "vision_output_dim": 32,
                "projector_input_dim": 32,
                "projector_output_dim": 32,
            }
        },
    ),
}
"""Model class, config class, config class and settings of the text model, and other settings."""


def family(name: str) -> Any:
    """Return a random model; skip the test if this transformers has no such family."""
    kind, config_kind, *others = (TEXT_ONLY | WITH_IMAGES)[name]
    if not hasattr(transformers, kind):
        pytest.skip(f"this transformers has no {kind}")
    if name in TEXT_ONLY:
        settings = _TEXT | others[0]
    else:
        (text_kind, own), rest = others
        text = getattr(transformers, text_kind)(**_TEXT | own)
        settings = {"text_config": text.to_dict(), **rest}
    torch.manual_seed(0)
    model = getattr(transformers, kind)(getattr(transformers, config_kind)(**settings)).eval()
    config = model.config.get_text_config()
    if (
        getattr(config, "num_kv_shared_layers", None) == 0
        and not transformers.DynamicCache(config=config).layers
    ):
        pytest.skip("this transformers caches no layer if none is shared")
    takes = inspect.signature(model.forward).parameters
    if "image_grid_thw" in takes and "mm_token_type_ids" not in takes:
        pytest.skip("this transformers takes positions of another batch after a generate()")
    return model


def with_image(name: str, ids: torch.Tensor) -> dict[str, Any]:
    """Return a prompt whose tokens from the fifth on are an image."""
    ids = ids.clone()
    n_rows = len(ids)
    n_tokens = 4 if name.startswith(("gemma", "pali", "qwen")) else 1
    ids[:, 4 : 4 + n_tokens] = IMAGE
    prompt: dict[str, Any] = {"input_ids": ids, "pixel_values": torch.randn(n_rows, 3, 28, 28)}
    if name.startswith("qwen"):
        ids[:, 3] = 122
        prompt["pixel_values"] = torch.randn(16 * n_rows, 3 * 2 * 14 * 14)
        prompt["image_grid_thw"] = torch.tensor([[1, 4, 4]] * n_rows)
        prompt["mm_token_type_ids"] = (ids == IMAGE).int()
    if name.startswith(("gemma", "pali")):
        prompt["token_type_ids"] = (ids == IMAGE).long()
    if name in ("smolvlm", "idefics3"):
        prompt["pixel_values"] = prompt["pixel_values"][:, None]
    return prompt
