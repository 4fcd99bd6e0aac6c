"""A sample of transformers' names against the record of all, which `make families` writes."""

import json

import pytest
import torch
from family_checks import check
from family_runs import PAGE, RECORD, page
from hidden_entries import Twin
from named_models import named_model

MADE = json.loads(RECORD.read_text(encoding="utf-8"))
SAMPLE = (
    *("llama", "gemma3", "gpt_oss", "opt", "bloom", "mamba", "deepseek_v3", "mimo_v2_flash"),
    *("gemma3n_text", "gemma4", "gemma4_text", "llama4_text", "qwen3_5_text", "qwen3_next"),
    *("bamba", "falcon_h1", "jamba", "lfm2", "nemotron_h", "zamba2"),
)


@pytest.mark.parametrize("name", SAMPLE)
def test_a_name_is_served_or_refused_as_recorded(name):
    row = check(name)
    assert row == MADE["causal"][name]
    assert row["outcome"] in ("served", "refused")


def test_the_page_is_what_the_record_gives():
    assert page(MADE) == PAGE.read_text(encoding="utf-8")


def test_the_oracle_sees_what_a_cache_has_evicted(monkeypatch):
    monkeypatch.setattr(Twin, "follow", lambda twin, cache: None)
    row = check("llama")
    assert row["outcome"] == "wrong"
    assert "after a prompt forward 1 is" in row["note"]


def test_what_expands_latents_may_add_to_values(monkeypatch):
    """As adapters may."""

    def biased(*args):
        model = named_model(*args)
        for module in model.modules():
            if hasattr(module, "kv_b_proj"):
                module.kv_b_proj.bias = torch.nn.Parameter(
                    torch.randn(module.kv_b_proj.out_features)
                )
        return model

    monkeypatch.setattr("family_checks.named_model", biased)
    assert check("deepseek_v3") == MADE["causal"]["deepseek_v3"]
