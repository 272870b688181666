"""Noise limits: thresholds by dtype and by name, and the noise floor of a run.

A pair of values is over its tolerance where |d| > atol + rtol * max(|x|, |y|). A tensor whose
values are equal is `same`; one that differs without a pair over its tolerance is `within noise`.

Reasons of the defaults:

* Tokens, masks, ids and all integers are exact: they are copied, never computed.
* float32: 1e-5 + 1e-4 |x|, as in NexRL's script: a log-prob is a reduction over a
  vocabulary of 1e5 values, each rounded to 6e-8.
* bfloat16: 2 units in the last place of its 8 bits (2^-7 relative); float16: the same, in 11 bits.
* losses: 1e-5 absolute, NexRL's threshold for loss, pg_loss and entropy_loss, plus 1e-6 |x|. The
  rounding of a sum over 1e5 tokens in float32 needs the second part. If the inputs of a loss are
  within noise, the difference that this noise causes in the loss is also noise (`derived`).
* gradients and parameters: a relative threshold for each value is useless if values are close to 0.
  So the relative error of the tensor counts: 1e-5 for bfloat16, `equivalent` in miles' severity
  guide, and 1e-10 for float32. The rounding of float32 is 2^16 times finer.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
from collections.abc import Mapping, Sequence
from typing import Final

from stagescope_service.compare.flow import LOG_PROBS, LOSSES, NAMED_SECTIONS, is_structural
from stagescope_service.statistics.pairwise import Pairwise
from stagescope_wire.errors import InvalidInput


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerance:
    """Largest difference that counts as noise.

    Attributes:
        atol, rtol: absolute and relative tolerance of each value.
        relative: tolerance of the tensor's relative error (`Pairwise.relative`). Up to it the
            tensor is within noise, whatever its values are. None: only single values count.
        reason: why this tolerance applies.
        is_given: whether the user set it; otherwise it is a default.
    """

    atol: float = 0.0
    rtol: float = 0.0
    relative: float | None = None
    reason: str = "exact"
    is_given: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class NoiseFloor:
    """Distance of the same log-probs, computed twice by one run.

    Attributes:
        mean, max: mean and maximum of |d|.
        source: where they were measured.
    """

    mean: float
    max: float
    source: str


EXACT: Final = Tolerance()
LOSS_TOLERANCE: Final = Tolerance(1e-5, 1e-6, None, "losses: 1e-5 + 1e-6 |x|")
BY_DTYPE: Final[Mapping[str, Tolerance]] = {
    "float64": Tolerance(1e-12, 1e-9, None, "float64: 1e-12 + 1e-9 |x|"),
    "float32": Tolerance(1e-5, 1e-4, None, "float32: 1e-5 + 1e-4 |x|"),
    "bfloat16": Tolerance(2.0**-9, 2.0**-7, None, "bfloat16: 2 units in the last place"),
    "float16": Tolerance(2.0**-14, 2.0**-9, None, "float16: 4 units in the last place"),
}
COARSE_FIRST: Final = ("bfloat16", "float16", "float32", "float64")
_RELATIVE: Final = {"float64": 1e-20, "float32": 1e-10, "bfloat16": 1e-5, "float16": 1e-6}
_FLOOR_FACTOR: Final = 3.0
"""The floor is one measurement of a random quantity: up to this multiple of it is noise."""
SEVERITIES: Final = (
    (1e-7, "identical"), (1e-5, "equivalent"), (1e-3, "minor"), (1e-1, "likely bug"),
    (math.inf, "severe"),
)  # fmt: skip
"""Upper bounds of the relative error and miles' names for them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Tolerances:
    """The thresholds of a comparison.

    Attributes:
        overrides: (pattern, tolerance): the first shell pattern (`*log_probs`) that matches
            `section/name` or `name` wins over the defaults.
    """

    overrides: tuple[tuple[str, Tolerance], ...] = ()

    @classmethod
    def parse(cls, texts: Sequence[str]) -> Tolerances:
        """Read `PATTERN=ATOL` or `PATTERN=ATOL,RTOL`, each once.

        Raises:
            InvalidInput: not of this form, or a negative or non-finite number.
        """
        overrides = []
        for text in texts:
            pattern, _, numbers = text.rpartition("=")
            try:
                values = [float(number) for number in numbers.split(",")]
            except ValueError:
                values = []
            wrong = any(not math.isfinite(value) or value < 0 for value in values)
            if not pattern or not 1 <= len(values) <= 2 or wrong:
                raise InvalidInput(
                    f"tolerance {text!r:.200} cannot be read",
                    expected="PATTERN=ATOL or PATTERN=ATOL,RTOL, such as '*log_probs=1e-3'",
                )
            rtol = values[1] if len(values) == 2 else 0.0
            overrides.append((pattern, Tolerance(values[0], rtol, None, f"given: {text}", True)))
        return cls(tuple(overrides))

    def for_tensor(self, section: str, name: str, dtypes: tuple[str, str]) -> Tolerance:
        """Return the tolerance of a tensor; the coarser of two dtypes counts."""
        for pattern, tolerance in self.overrides:
            if fnmatch.fnmatchcase(f"{section}/{name}", pattern) or fnmatch.fnmatchcase(
                name, pattern
            ):
                return tolerance
        coarse = next((tag for tag in COARSE_FIRST if tag in dtypes), None)
        if is_structural(name) or coarse is None:
            return EXACT
        if section in NAMED_SECTIONS:
            bound = _RELATIVE[coarse]
            return Tolerance(0.0, 0.0, bound, f"{section} in {coarse}: relative error {bound:g}")
        if name in LOSSES:
            return LOSS_TOLERANCE
        return BY_DTYPE[coarse]


def severity(relative: float) -> str:
    """Return miles' name for a relative error; empty if it is unknown."""
    return next((word for bound, word in SEVERITIES if relative <= bound), "")


def is_noise(
    found: Pairwise, tolerance: Tolerance, noise_floor: NoiseFloor | None, name: str
) -> bool:
    """Return whether unequal values differ by no more than noise."""
    if found.disagreeing_non_finite:
        return False
    if not found.over_count:
        return True
    if tolerance.relative is not None and found.relative <= tolerance.relative:
        return True
    if noise_floor is None or name not in LOG_PROBS:
        return False
    return (
        found.mean_abs <= _FLOOR_FACTOR * noise_floor.mean
        and found.max_abs <= _FLOOR_FACTOR * noise_floor.max
    )


def declared_noise_floor(about: Mapping[str, object], source: str) -> NoiseFloor | None:
    """Read `noise_floor` {mean, max} of |d| from the metadata of a dump; None without one."""
    declared = about.get("noise_floor")
    if not isinstance(declared, Mapping):
        return None
    mean, highest = declared.get("mean"), declared.get("max")
    if not isinstance(mean, int | float) or not isinstance(highest, int | float):
        return None
    return NoiseFloor(float(mean), float(highest), source)
