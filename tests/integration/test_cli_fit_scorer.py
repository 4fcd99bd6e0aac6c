"""``kvalloc fit-scorer`` on tiny models."""

from __future__ import annotations

from cli_tools import generate_arguments, refused, run


def test_a_surrogate_is_fitted_and_picks_entries(models, profiles, folder):
    file, text = folder / "f.safetensors", ("--text", folder / "text.txt")
    fit = ("fit-scorer", models / "tiny", *text, "-o")
    said = run(*fit, file, "--context", 64, "--samples", 4, "--json").json
    assert (said["samples"], said["context_tokens"]) == (4, 64)
    assert len(said["r_squared"]) == len(said["rank_correlation"]) == 3
    assert said["file_bytes"] == file.stat().st_size
    picking = ("--policy", f"surrogate:file={file}", "--json")
    for more in ((), ("--decode-every", 1)):
        ran = run(*generate_arguments(models, profiles, folder), *picking, *more)
        assert ran.json["scorer"] == "surrogate"
        assert ran.json["retained_bytes"] < 0.7 * ran.json["full_bytes"]
    said = refused(
        folder, "profile", models / "twin", *text, "--context", 64,
        "--scorer", f"surrogate:file={file}", "-o", folder / "s.safetensors",
    )  # fmt: skip
    assert "is for the weights of tiny" in said
    assert "choose --context 256 or less" in refused(folder, *fit, file, "--context", 400)
    assert "does not exist" in refused(folder, *fit, folder / "no" / "s.safetensors")
