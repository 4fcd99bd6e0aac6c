"""The README's picture: bytes of K and V against context, full cache and reduced by layer and head.

    python benchmarks/draw_memory.py

Each point is a prompt that the demo's model has read: the bytes are those of the storages that the
cache holds afterwards. Both reduced caches keep the same measured share of the attention, decided
from the same scores, so their distance is the saving by budgets of single heads.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench_runtime import prefill, text
from runtime_rows import stored_bytes
from transformers import DynamicCache

import kvalloc
from kvalloc.models.loading import load_model
from kvalloc.report.charts import themes

PICTURE = Path(__file__).parents[1] / "docs" / "memory.png"
RETENTION, CONTEXTS = 0.9, (512, 1024, 2048, 3072, 4096)
NAMES = {
    "full": "full cache",
    "layer": "a budget for each layer",
    "head": "a budget for each KV head",
}
MIB = 1 << 20


def main() -> None:
    loaded = load_model("demo", dtype="bfloat16")
    scores = kvalloc.profile(loaded.model, loaded.tokenizer, [text()], samples=4, context=1024)
    profiles = {
        level: kvalloc.solve(scores, target_retention=RETENTION, level=level)
        for level in ("layer", "head")
    }
    ids = loaded.tokenizer(text(), return_tensors="pt")["input_ids"]
    stored: dict[str, list[int]] = {name: [] for name in NAMES}
    for context in CONTEXTS:
        caches: dict[str, Any] = {
            "full": DynamicCache(config=loaded.model.config),
            **{
                level: kvalloc.make_cache(loaded.model, profile)
                for level, profile in profiles.items()
            },
        }
        for name, cache in caches.items():
            prefill(loaded.model, cache, ids[:, :context])
            stored[name].append(stored_bytes(cache))
        row = ", ".join(f"{name} {stored[name][-1]:,}" for name in NAMES)
        print(f"{context:,} tokens: {row} bytes", flush=True)
    draw(stored)


def draw(stored: dict[str, list[int]]) -> None:
    """Draw one line a cache, with its name and its bytes at the last point."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.0, 3.6), layout="constrained")
    colours = themes()["light"]["range"]["category"]
    for colour, (name, label) in zip(colours, NAMES.items(), strict=False):
        mib = [count / MIB for count in stored[name]]
        axes.plot(CONTEXTS, mib, color=colour, marker="o", markersize=4)
        share = stored[name][-1] / stored["full"][-1]
        phrase = f"{mib[-1]:.0f} MiB" if name == "full" else f"{mib[-1]:.1f} MiB, {share:.0%}"
        axes.annotate(
            f"{label}: {phrase}",
            (CONTEXTS[-1], mib[-1]),
            xytext=(-8, -32 if name == "head" else 9),
            textcoords="offset points",
            ha="right",
            va="top" if name == "head" else "bottom",
            color=colour,
            fontsize=9,
        )
    axes.set_xlabel("tokens of the prompt")
    axes.set_ylabel("K and V stored, MiB")
    axes.set_xlim(0, CONTEXTS[-1] * 1.02)
    axes.set_ylim(0, stored["full"][-1] / MIB * 1.12)
    axes.set_xticks([0, *CONTEXTS])
    axes.grid(visible=True, color="0.9", linewidth=0.8)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(
        f"SmolLM2-135M, bfloat16, one prompt; budgets for a retention of {RETENTION}", fontsize=10
    )
    figure.savefig(PICTURE, dpi=130, metadata={"Software": None})


if __name__ == "__main__":
    main()
