"""Variants of the trainer's model: hypotheses on what one side does differently.

Pure, except that `Model` is implemented by transformers.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from stagescope_wire.engines import Sampling
from stagescope_workers.bisect.kept import Float64

Float32 = npt.NDArray[np.float32]
Int64 = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True)
class Variant:
    """How a model scores; the defaults are the model's own way.

    Attributes:
        head: dtype in which the output projection is computed, such as "bfloat16"; "": the model's.
        softmax: dtype of the log-softmax; "": float32.
        shift: added to the position ids ...
        shift_from: ... of the tokens from this index of the row on.
    """

    head: str = ""
    softmax: str = ""
    shift: int = 0
    shift_from: int = 0


PLAIN: Final = Variant()


class Model(Protocol):
    """The trainer's model in this process."""

    def score_as(
        self,
        row: Sequence[int],
        variant: Variant = PLAIN,
        routes: Int64 | None = None,
    ) -> tuple[float, ...]:
        """Return the log-prob of each token of a row; NaN for the first."""
        ...

    def logits_at(self, row: Sequence[int], indices: Sequence[int]) -> Float32:
        """Return the logits from which the tokens at these indices were drawn, [n, vocabulary]."""
        ...


class Fit(NamedTuple):
    """Processed log-probs that come nearest to a side's.

    Attributes:
        sampling: temperature, top_p and top_k.
        mean: mean |difference| to that side, over the tried tokens.
    """

    sampling: Sampling
    mean: float


_TEMPERATURES: Final = tuple(round(0.05 * step, 2) for step in range(2, 61))
_TOP_P: Final = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.92, 0.95, 0.97, 0.98, 0.99, 0.995, 0.999)
_TOP_K: Final = (5, 10, 20, 40, 50, 64, 100, 200)
_NEAR: Final = 1.2
"""Times the smallest error up to which simpler settings are preferred."""
_LEAST_KEPT: Final = 0.95
"""Share of the drawn tokens that a cut must keep."""
_GOLDEN: Final = (5**0.5 - 1) / 2
_GOLDEN_STEPS: Final = 20


CELLS: Final = 4 << 20
"""Logits that are tried at most: 128 tokens of a vocabulary of 32 k."""


class Logits:
    """The logits of some tokens, sorted, for trying temperatures and cuts.

    Args:
        logits: [n, vocabulary].
        ids: the tokens that were drawn, [n].
    """

    def __init__(self, logits: Float32, ids: Int64) -> None:
        own = logits[np.arange(len(ids)), ids]
        self._sorted = -np.sort(-logits, axis=1)
        self._own = own.astype(np.float64)
        self._rank = (self._sorted > own[:, None]).sum(axis=1)

    @property
    def log_probs(self) -> Float64:
        """The tokens' raw log-probs."""
        return self._log_probs(1.0)

    def fit(self, target: Float64, recorded: Sampling) -> Fit:
        """Return the temperature, top_p and top_k whose log-probs come nearest to `target`."""
        tried = [self._at(recorded.temperature or 1.0).error(target, recorded)]
        tried += self._temperatures(target)
        plain = min(tried, key=lambda fit: fit.mean)
        for temperature in dict.fromkeys((recorded.temperature or 1.0, 1.0, *_TEMPERATURES)):
            tried += self._at(temperature).cuts(target)
        best = min(tried, key=lambda fit: fit.mean)
        if best.sampling.top_p < 1:
            at = self._at(best.sampling.temperature)
            near = [round(best.sampling.top_p + 0.01 * step, 4) for step in range(-9, 10)]
            fine = [at.error(target, dataclasses.replace(best.sampling, top_p=each))
                    for each in near if 0 < each < 1]  # fmt: skip
            best = min(best, *fine, key=lambda fit: fit.mean)
        # A usual setting is likelier than one that fits the rounding of the logits.
        usual = [fit for fit in tried if fit.mean <= _NEAR * best.mean
                 and (fit.sampling.top_k in _TOP_K or fit.sampling.top_p in _TOP_P)]  # fmt: skip
        best = min(usual, default=best, key=lambda fit: fit.mean)
        return plain if plain.mean <= _NEAR * best.mean else best

    def _temperatures(self, target: Float64) -> list[Fit]:
        """Return fits without cuts: a coarse one, then finer and finer ones."""

        def error(temperature: float) -> Fit:
            found = Sampling(temperature=temperature)
            return Fit(found, float(np.abs(self._log_probs(temperature) - target).mean()))

        coarse = [error(each) for each in _TEMPERATURES]
        at = min(range(len(coarse)), key=lambda index: coarse[index].mean)
        low = _TEMPERATURES[max(at - 1, 0)]
        high = _TEMPERATURES[min(at + 1, len(coarse) - 1)]
        for _ in range(_GOLDEN_STEPS):
            one, two = high - _GOLDEN * (high - low), low + _GOLDEN * (high - low)
            low, high = (low, two) if error(one).mean < error(two).mean else (one, high)
        exact = error((low + high) / 2)
        # A round temperature is likelier than the one that fits the rounding of the log-probs.
        near = error(round(exact.sampling.temperature, 2))
        return [near if near.mean <= _NEAR * exact.mean else exact, coarse[at]]

    def _log_probs(self, temperature: float) -> Float64:
        scaled = self._sorted / np.float32(temperature)
        top = scaled[:, :1]
        sums = np.exp(scaled - top).sum(axis=1, dtype=np.float64)
        found: Float64 = self._own / temperature - (top[:, 0] + np.log(sums))
        return found

    def _at(self, temperature: float) -> _Scaled:
        powers = np.exp((self._sorted - self._sorted[:, :1]) / np.float32(temperature))
        mass = np.cumsum(powers, axis=1, dtype=np.float64)
        mass /= mass[:, -1:]
        return _Scaled(temperature, self._log_probs(temperature), mass, self._rank)

    def processed(self, sampling: Sampling) -> Float64:
        """Return the log-probs after temperature, top_k and top_p; -inf for a token that is cut."""
        found, is_kept = self._at(sampling.temperature).processed(sampling)
        return np.where(is_kept, found, -np.inf)


class _Scaled(NamedTuple):
    """Tokens at a temperature: log-probs, cumulative probability by rank, and own rank."""

    temperature: float
    log_probs: Float64
    mass: Float64
    rank: Int64

    def processed(self, sampling: Sampling) -> tuple[Float64, npt.NDArray[np.bool_]]:
        """Return the log-probs as if no token were cut, and which are not."""
        at = np.arange(len(self.rank))
        kept = np.full(len(at), self.mass.shape[1])
        if sampling.top_k:
            kept = np.minimum(kept, sampling.top_k)
        if sampling.top_p < 1:
            # Of the probabilities after top_k: the first tokens that reach top_p together.
            least = sampling.top_p * self.mass[at, kept - 1]
            kept = np.minimum(kept, (self.mass < least[:, None] - 1e-9).sum(axis=1) + 1)
        return self.log_probs - np.log(self.mass[at, kept - 1]), self.rank < kept

    def error(self, target: Float64, sampling: Sampling) -> Fit:
        """Return how near `target` these log-probs come.

        Rounded logits can move single tokens over the edge of a cut; more are a contradiction.
        """
        found, is_kept = self.processed(sampling)
        mean = float(np.abs(found - target).mean())
        return Fit(sampling, mean if is_kept.mean() >= _LEAST_KEPT else math.inf)

    def cuts(self, target: Float64) -> list[Fit]:
        """Return how near single top_k and top_p come."""
        with np.errstate(over="ignore"):
            own = np.exp(self.log_probs - target)  # the probability of what is kept
        if not np.isfinite(own).all() or np.median(own) > 1.2:
            return []
        counts = (self.mass < np.minimum(own, 1.0)[:, None] - 1e-6).sum(axis=1) + 1
        middle = int(np.median(counts))
        top_k = dict.fromkeys((middle - 1, middle, middle + 1, *_TOP_K))
        vocabulary = self.mass.shape[1]
        tried = [Sampling(temperature=self.temperature, top_k=each)
                 for each in top_k if 0 < each < vocabulary]  # fmt: skip
        tried += [Sampling(temperature=self.temperature, top_p=each) for each in _TOP_P]
        return [self.error(target, each) for each in tried]
