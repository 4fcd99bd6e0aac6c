"""Export to all targets."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from kvalloc.errors import one_of
from kvalloc.files import check_writable
from kvalloc.formats.budget_profile import BudgetProfile
from kvalloc.interop.attention_matching import AttentionMatching
from kvalloc.interop.duo_attention import DuoAttention
from kvalloc.interop.lu_kv import LUKV
from kvalloc.interop.openvino import OpenVINO
from kvalloc.interop.tables import CSV, Parquet
from kvalloc.interop.target import ExportTarget, at_length, restrict
from kvalloc.interop.tensorrt_llm import TensorRTLLM
from kvalloc.interop.vllm import VLLM

_KINDS = (OpenVINO, TensorRTLLM, VLLM, DuoAttention, LUKV, AttentionMatching, CSV, Parquet)
TARGETS: dict[str, ExportTarget] = {kind.name: kind() for kind in _KINDS}
"""All targets, by name."""


def export(
    profile: BudgetProfile,
    to: str,
    output: str | Path,
    *,
    accept: Collection[str] = (),
    context: int | None = None,
) -> BudgetProfile:
    """Write a budget profile for another engine or tool.

    Parameters
    ----------
    profile : BudgetProfile
    to : str
        One of `TARGETS`.
    output : str or Path
        The file, or DuoAttention's folder.
    accept : collection of str
        Accepted losses, of `kvalloc.interop.target.RESTRICTIONS`.
    context : int, optional
        Prompt length, tokens, at which targets with fixed numbers of entries lose no growth.

    Returns
    -------
    BudgetProfile
        The target's part, to evaluate beside ``profile``.

    Raises
    ------
    InputError
        If a loss is not accepted, or the file cannot be written.
    """
    target = one_of("target", to, TARGETS)
    if target.suffix:
        check_writable(output, stream=True)
    if context is not None:
        profile = at_length(profile, context, fixed="one-length" in target.restrictions)
    left = restrict(profile, target, accept)
    target.write(left, Path(output))
    return left
