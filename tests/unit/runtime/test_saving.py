"""A cache in a file: the same answers later, and no answers from what cannot be trusted."""

import pytest
import runtime_oracle as tiny
import torch
from attention_cases import with_widths
from prompt_runs import run

import kvalloc
from kvalloc.errors import ModelMismatchError

CONTEXT = 150


@pytest.mark.parametrize(
    ("scorer", "every", "widths"),
    [("xkv", None, (4, 3)), ("xkv", 20, (8, 16, 4)), ("reconstruction", None, ()),
     ("reconstruction", 20, ())],
)  # fmt: skip
def test_a_loaded_conversation_keeps_what_the_saved_one_keeps(tmp_path, scorer, every, widths):
    """Saved between two turns of which the later ones let all that is kept compete again."""
    model = tiny.tiny_model()
    profile = tiny.make_profile(model, CONTEXT, 0.5, scorer=scorer)
    cache = kvalloc.make_cache(model, profile, decode_every=every)
    for tokens in (CONTEXT, 30):
        run(model, tiny.prompt(tokens, 2), cache)
    cache.end_turn()
    if widths:
        with_widths(cache, *widths)
    kvalloc.save_cache(cache, tmp_path / "c.safetensors")
    loaded = kvalloc.load_cache(tmp_path / "c.safetensors", model)
    for turn, tokens in enumerate((30, 10, 15, 70)):
        question = tiny.prompt(tokens, 2, seed=turn)
        assert torch.equal(run(model, question, loaded), run(model, question, cache))
        assert tiny.same_kept(loaded, cache)
        assert (loaded.kept_tokens == cache.kept_tokens).all()


def test_other_weights_may_be_allowed_but_not_other_sizes(tmp_path):
    model, path = tiny.tiny_model(), tmp_path / "c.safetensors"
    cache = kvalloc.make_cache(model, tiny.by_head(tiny.make_profile(model, CONTEXT, 0.5), 40))
    run(model, tiny.prompt(CONTEXT), cache)
    kvalloc.save_cache(cache, path)
    tuned = tiny.copy.deepcopy(model)
    with torch.no_grad():
        for parameter in tuned.parameters():
            parameter.mul_(1.001)
    assert kvalloc.load_cache(path, tuned, allow_other_model=True).get_seq_length() == CONTEXT
    with pytest.raises(ModelMismatchError):
        kvalloc.load_cache(path, tiny.tiny_model(num_hidden_layers=3), allow_other_model=True)
