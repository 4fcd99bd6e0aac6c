"""The measured half of the interface: retention curves with their provenance."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from kvalloc.accounting import FloatArray, IntArray
from kvalloc.errors import InputError, ProfileFileError, command, option
from kvalloc.files import atomic_write
from kvalloc.formats.policy import Policy
from kvalloc.formats.score_checks import first_fault
from kvalloc.formats.score_reading import read_scores
from kvalloc.formats.sharing_groups import run_index
from kvalloc.shape import ModelShape

SCHEMA_VERSION = 1
EXACT_CONTEXT_TOKENS = 4096
"""Up to this context the curves hold every rank; above it, a grid."""


_ARRAYS = ("ranks", "curves", "masses", "sample_tokens")
_OPTIONAL_ARRAYS = (
    *("loss_tokens", "losses", "loss_stderr"),
    *("other_losses", "other_loss_stderr"),
    "loss_probed",
    *("bit_widths", "bit_fidelity"),
    *("shared_runs", "shared_curves"),
)
"""Left out of file and digest where they are None."""

_HEADER_TYPES: dict[str, type] = {
    "shape": dict,
    **dict.fromkeys(("context_tokens", "sinks", "window"), int),
    **dict.fromkeys(("scorer_parameters", "versions"), dict),
    **dict.fromkeys(("scorer", "text_digest", "text_description", "created"), str),
    "interpolation_error": Real,
}


@dataclass(frozen=True, kw_only=True)
class ScoreProfile:
    """Retention curves of one model on some text, with everything that made them.

    Attributes
    ----------
    shape : ModelShape
        The model.
    scorer : str
        Name of the scorer.
    scorer_parameters : dict
        What rebuilds it: ``get_scorer(scorer, **scorer_parameters)``.
    context_tokens : int
        Reference context, tokens.
    sinks, window : int
        First and last tokens of the prompt that are never evicted and therefore left out of the
        curves.
    ranks : ndarray of int64, (n_points,)
        Numbers of kept evictable entries, from 0 to ``evictable_tokens``.
    curves : ndarray of float64, (n_samples, n_layers, n_kv_heads, n_points)
        ``curves[..., k]`` is R(ranks[k]), the share of a head's evictable score mass in its
        ``ranks[k]`` best entries, 0..1 (XKV, Eq. 4).
    masses : ndarray of float64, (n_samples, n_layers, n_kv_heads)
        The evictable score mass itself; zero in sliding layers, which have no curve of their own.
    sample_tokens : ndarray of int64, (n_samples,)
        Tokens of each sample. A sample shorter than the reference context has had its curve
        stretched over the reference ranks by the share kept.
    loss_tokens : ndarray of int64, (n_levels,), or None
        Budgets in tokens at the reference context, everything included, that the loss curves were
        measured at; rising, the last one is the context.
    losses : ndarray of float64, (n_samples, n_layers, n_kv_heads or 1, n_levels), or None
        Loss curves C(n): KL(full cache || reduced cache) of the next-token distribution, nats per
        token, with this unit alone reduced to ``loss_tokens``; one row a layer where whole layers
        were reduced. 0 at the last level. What was measured, noise included: a curve need not
        fall, be convex, or stay above 0 everywhere.
    loss_stderr : ndarray of float64, shaped as ``losses``, or None
        Standard error of each loss.
    loss_policies : tuple of Policy
        Policies whose losses were measured beside those of the scorer's best entries, each with a
        name of its own and the same sinks and window.
    other_losses : ndarray of float64, (n_samples, n_layers, n_kv_heads or 1, n_policies, n_levels)
        Their loss curves, at the same levels; or None. Every policy keeps the same where nothing
        but sinks and window is kept, and where everything is.
    other_loss_stderr : ndarray of float64, shaped as ``other_losses``, or None
        Standard error of each.
    loss_probed : ndarray of int64, (n_layers, n_kv_heads or 1, 1 + n_policies, n_levels), or None
        1 where a loss was measured and 0 where it is an estimate scaled to those (`kvalloc profile
        --probes`), the scorer's own entries first; None where all are of one kind.
    loss_method : {"measured", "fast", ""}
        Whether losses were measured or estimated (``--loss fast``); ``fast`` with `loss_probed`
        says which were measured as well. Empty where the file does not tell: it is older.
    bit_widths : ndarray of int64, (n_bits,), or None
        Bit widths whose fidelity was measured, of 16, 8 and 4.
    bit_fidelity : ndarray of float64, (n_samples, n_layers, n_kv_heads, n_bits), or None
        ``max(0, 1 - ||o_b - o|| / ||o||)`` of the window's rows of attention output with K and V
        at b bits (o_b) and as they are (o), nothing evicted; 0..1, and 1 at 16 bits. A stand-in
        for harm: it sees one layer, and neither what later layers make of it nor the answer.
    interpolation_error : float
        Largest measured difference between a curve and its interpolation on the grid; 0 when
        ``ranks`` holds every rank.
    text_digest : str
        SHA-256 over the token ids of all samples.
    text_description : str
        Where the text came from, for people.
    versions : dict of str
        Versions of the libraries that measured.
    created : str
        ISO date of the measurement.
    shared_runs : ndarray of int64, (n_runs, 2), or None
        First layer and number of layers of each run of adjacent layers whose joint curves were
        measured.
    shared_curves : ndarray of float64, (n_samples, n_runs, n_kv_heads, n_points), or None
        What the layers of a run keep together in one KV head, as the sum of their shares of their
        layer's score mass, when all keep the same ``ranks[k]`` entries: those with the largest sum
        of shares (MPCache, Sec. 4.4). At most the sum of the layers' contributions.

    Raises
    ------
    InputError
        If arrays do not fit each other, are not finite, curves are not rising, concave and
        within 0..1, or loss curves are no losses.

    References
    ----------
    XKV: Personalized KV Cache Memory Reduction, Eq. 3 and 4.
    """

    shape: ModelShape
    scorer: str
    scorer_parameters: dict[str, Any]
    context_tokens: int
    sinks: int
    window: int
    ranks: IntArray
    curves: FloatArray
    masses: FloatArray
    sample_tokens: IntArray
    loss_tokens: IntArray | None = None
    losses: FloatArray | None = None
    loss_stderr: FloatArray | None = None
    loss_policies: tuple[Policy, ...] = ()
    other_losses: FloatArray | None = None
    other_loss_stderr: FloatArray | None = None
    loss_probed: IntArray | None = None
    loss_method: str = ""
    bit_widths: IntArray | None = None
    bit_fidelity: FloatArray | None = None
    interpolation_error: float = 0.0
    text_digest: str = ""
    text_description: str = ""
    versions: dict[str, str] = field(default_factory=dict)
    created: str = ""
    shared_runs: IntArray | None = None
    shared_curves: FloatArray | None = None

    def __post_init__(self) -> None:
        problem = first_fault(self)
        if problem is not None:
            name, found, expected = problem
            raise InputError(f"score profile: {name} is {found}, expected {expected}")
        for array in self._arrays().values():
            array.flags.writeable = False

    def replace(self, **changes: Any) -> ScoreProfile:
        """A checked copy with other values of some fields."""
        return replace(self, **changes)

    @property
    def n_samples(self) -> int:
        """Number of measured samples."""
        return int(self.curves.shape[0])

    @property
    def protected_tokens(self) -> int:
        """Sinks and window: part of every budget, never evicted."""
        return self.sinks + self.window

    @property
    def evictable_tokens(self) -> int:
        """Entries of one head that can be evicted at the reference context."""
        return self.context_tokens - self.protected_tokens

    @property
    def has_losses(self) -> bool:
        """Whether loss curves were measured."""
        return self.losses is not None

    @property
    def policy(self) -> Policy:
        """The scorer's best entries: what the curves, and ``losses``, are about."""
        return Policy(
            scorer=self.scorer,
            scorer_parameters=dict(self.scorer_parameters),
            sinks=self.sinks,
            window=self.window,
        )

    @property
    def policies(self) -> tuple[Policy, ...]:
        """All policies whose losses can be told apart: the scorer's own, then the others."""
        return (self.policy, *self.loss_policies)

    @property
    def is_exact(self) -> bool:
        """Whether the curves hold every rank."""
        return self.ranks.size == self.evictable_tokens + 1

    def head_shares(self) -> FloatArray:
        """Each head's share of its layer's evictable score mass, per sample.

        Returns
        -------
        ndarray, (n_samples, n_layers, n_kv_heads)
            Sums to 1 over the heads; equal shares where a layer has no mass at all.
        """
        totals = self.masses.sum(axis=2, keepdims=True)
        even = np.full_like(self.masses, 1.0 / self.shape.n_kv_heads)
        shares: FloatArray = np.divide(self.masses, totals, out=even, where=totals > 0)
        return shares

    def fidelity(self, bits: int) -> FloatArray:
        """Measured fidelity of a bit width, per sample: 1 at 16.

        Returns
        -------
        ndarray of float64, (n_samples, n_layers, n_kv_heads)

        Raises
        ------
        InputError
            If it was not measured.
        """
        if bits == 16:
            return np.ones_like(self.masses)
        widths = [] if self.bit_widths is None else self.bit_widths.tolist()
        if bits not in widths or self.bit_fidelity is None:
            known = f"those of {', '.join(map(str, widths))} bits were" if widths else "none was"
            raise InputError(
                f"what {bits} bits do was not measured in this score profile ({known}); measure it "
                f"with {command('profile', bits=(16, 8, 4))}, or leave it out of {option('bits')}"
            )
        return self.bit_fidelity[..., widths.index(bits)]

    def contributions(self, sample: int | None = None, *, bits: int = 16) -> FloatArray:
        """What each head adds to its layer's retention, as a function of the entries it keeps.

        The retention of a layer whose heads keep n_h entries is the sum over its heads of
        ``share_h * R_h(n_h)``: the kept part of the layer's score mass, each head keeping its own
        best entries. At equal n_h this is the layer's own curve, so head-level and layer-level
        budgets are measured by one yardstick.

        Parameters
        ----------
        sample : int, optional
            One sample; the mean over all samples by default.
        bits : int
            Bit width of the entries: fewer than 16 take each head's measured fidelity off.

        Returns
        -------
        ndarray of float64, (n_layers, n_kv_heads, n_points)
        """
        shares = self.head_shares()
        if bits != 16:
            shares = shares * self.fidelity(bits)
        mean: FloatArray
        if sample is not None:
            mean = shares[sample][..., None] * self.curves[sample]
        else:
            mean = np.einsum("slh,slhp->lhp", shares, self.curves) / self.n_samples
        return mean

    def shared_contributions(self, group: Sequence[int], sample: int | None = None) -> FloatArray:
        """The same of layers that all keep the same entries in a KV head, chosen for their sum.

        Parameters
        ----------
        group : sequence of int
            A measured run of adjacent layers.
        sample : int, optional
            One sample; the mean over all samples by default.

        Returns
        -------
        ndarray of float64, (n_kv_heads, n_points)

        Raises
        ------
        InputError
            If that run was not measured.
        """
        run = run_index(self, group)
        assert self.shared_curves is not None  # there is such a run
        curves = self.shared_curves[:, run]
        chosen: FloatArray = curves.mean(axis=0) if sample is None else curves[sample]
        return chosen

    def digest(self) -> str:
        """SHA-256 over header and arrays: the identity of this measurement."""
        hasher = hashlib.sha256(json.dumps(self._header(), sort_keys=True).encode())
        for name, array in self._arrays().items():
            hasher.update(name.encode())
            hasher.update(np.ascontiguousarray(array).data)
        return hasher.hexdigest()

    def save(self, path: str | Path) -> None:
        """Write a safetensors file with a JSON header entry, atomically.

        Parameters
        ----------
        path : str or Path
            Usually ``*.safetensors``.

        Raises
        ------
        InputError
            If the folder does not exist or is read-only.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import save_file

        header = {**self._header(), "digest": self.digest()}
        arrays = {name: np.ascontiguousarray(array) for name, array in self._arrays().items()}
        metadata = {"kvalloc": json.dumps(header, sort_keys=True)}
        with atomic_write(path) as temporary:
            try:
                save_file(arrays, temporary, metadata=metadata)
            except SafetensorError as error:  # a full disk is not an OSError there
                raise OSError(str(error)) from error

    @classmethod
    def load(cls, path: str | Path) -> ScoreProfile:
        """Read and check a score profile.

        Parameters
        ----------
        path : str or Path
            A file written by `save`.

        Raises
        ------
        ProfileFileError
            If the file is missing, truncated, of another schema version, edited, or holds values
            that cannot be; names the file, the field, what was found and the way out.
        """
        again = "make it again with 'kvalloc profile'"
        header, arrays = read_scores(Path(path), _ARRAYS, _OPTIONAL_ARRAYS)
        version = header.get("schema_version")
        if version != SCHEMA_VERSION:
            raise ProfileFileError(
                path,
                field="schema_version",
                found=version,
                expected=str(SCHEMA_VERSION),
                way_out=again,
            )
        digest = header.pop("digest", None)
        header.pop("schema_version")
        for name, kind in _HEADER_TYPES.items():
            if not isinstance(header.get(name), kind):
                found = header.get(name, "missing")
                raise ProfileFileError(
                    path, field=name, found=found, expected=f"a {kind.__name__}", way_out=again
                )
        try:
            header["shape"] = ModelShape.from_dict(header["shape"])
            header["loss_policies"] = tuple(
                Policy(**record) for record in header.get("loss_policies", ())
            )
            for name, kind in (("ranks", np.int64), ("sample_tokens", np.int64)):
                if arrays[name].dtype != kind:
                    raise InputError(f"{name} has dtype {arrays[name].dtype}, expected int64")
            profile = cls(**header, **arrays)
        except (KeyError, TypeError, ValueError, InputError) as error:
            raise ProfileFileError(
                path, field="content", found=str(error), expected="a sound profile", way_out=again
            ) from error
        if digest != profile.digest():
            raise ProfileFileError(
                path,
                field="digest",
                found=digest,
                expected="the digest of the content (the file was edited or damaged)",
                way_out=again,
            )
        return profile

    def _arrays(self) -> dict[str, npt.NDArray[Any]]:
        """The arrays that are there, in the order of the file's digest."""
        optional = {name: getattr(self, name) for name in _OPTIONAL_ARRAYS}
        present = {name: array for name, array in optional.items() if array is not None}
        return {name: getattr(self, name) for name in _ARRAYS} | present

    def _header(self) -> dict[str, Any]:
        others = [
            {k: v for k, v in policy.record().items() if v or k != "label"}
            for policy in self.loss_policies
        ]
        return {
            "schema_version": SCHEMA_VERSION,
            "shape": self.shape.to_dict(),
            "scorer": self.scorer,
            "scorer_parameters": self.scorer_parameters,
            "context_tokens": self.context_tokens,
            "sinks": self.sinks,
            "window": self.window,
            "interpolation_error": self.interpolation_error,
            "text_digest": self.text_digest,
            "text_description": self.text_description,
            "versions": self.versions,
            "created": self.created,
            **({"loss_policies": others} if others else {}),
            **({"loss_method": self.loss_method} if self.loss_method else {}),
        }


def rank_grid(evictable_tokens: int, context_tokens: int, points: int = 4097) -> IntArray:
    """The ranks at which curves are stored.

    Parameters
    ----------
    evictable_tokens : int
        Largest rank.
    context_tokens : int
        Reference context: up to `EXACT_CONTEXT_TOKENS` every rank is stored.
    points : int
        Upper bound for the size of the grid above that: the first half of the points are the
        first ranks, where a curve bends most, the rest are spaced geometrically.

    Returns
    -------
    ndarray of int64, (n_points,)
        Strictly rising from 0 to ``evictable_tokens``.
    """
    if context_tokens <= EXACT_CONTEXT_TOKENS:
        return np.arange(evictable_tokens + 1, dtype=np.int64)
    dense = points // 2
    tail = np.geomspace(dense, evictable_tokens, points - dense)
    return np.unique(np.concatenate([np.arange(dense), np.rint(tail)]).astype(np.int64))


def interpolate_curves(curves: FloatArray, ranks: IntArray, at: FloatArray) -> FloatArray:
    """Curves at other ranks, linear in between (which keeps a concave curve concave).

    Parameters
    ----------
    curves : ndarray, (..., n_points)
        Values at ``ranks``.
    ranks : ndarray of int64, (n_points,)
        Strictly rising.
    at : ndarray, (n_at,)
        Ranks wanted, real numbers within ``ranks[0]..ranks[-1]``.

    Returns
    -------
    ndarray of float64, (..., n_at)
    """
    if at.size == ranks.size and np.array_equal(at, ranks):
        return curves
    left = np.clip(np.searchsorted(ranks, at, side="right") - 1, 0, ranks.size - 2)
    weight = (at - ranks[left]) / (ranks[left + 1] - ranks[left])
    values = np.empty((*curves.shape[:-1], at.size))
    rows = curves.reshape(-1, ranks.size), values.reshape(-1, at.size)
    # One curve at a time: with a long context, every copy of all curves is gigabytes.
    for curve, found in zip(*rows, strict=True):
        np.multiply(curve[left], 1.0 - weight, out=found)
        found += curve[left + 1] * weight
    return values
