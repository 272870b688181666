"""Values of a payload that are not finite under the mask, by tensor and kind, and their findings.

Every stream is counted, with or without another one beside it: a pair of streams counts its
own two, `NonFiniteCounts` the others.

If rows of one payload repeat a sample, the last one counts.
"""

from __future__ import annotations

import dataclasses
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.core.findings import finding, of_job
from stagescope_service.core.instructions import PayloadJob, PayloadKey
from stagescope_service.statistics import (
    PartRecord,
    StatisticsSettings,
    TokenBatch,
    skip_of,
    summarise,
)
from stagescope_service.statistics.cell import Bool
from stagescope_service.statistics.identity import RowIdentity, resolve
from stagescope_service.statistics.ledger import Ledger
from stagescope_service.statistics.mismatch import non_finite
from stagescope_service.statistics.step_summary import REPEATED
from stagescope_service.statistics.summary import Summary
from stagescope_service.statistics.token_batch import FLOATS, INTEGERS, flat_values, mask_bits
from stagescope_service.store.contract import Put
from stagescope_service.store.parts import part_key
from stagescope_wire.links import Link
from stagescope_wire.tensorfile import WireTensor
from stagescope_wire.tensors import STREAM_TENSORS

_VALUES: Final = (
    "rewards", "advantages", "returns", "values", "entropy", "rollout_is_weights", "prob_ratio",
    "elementwise_loss",
)  # fmt: skip
"""Tensors besides the streams that must be finite for a training."""
_EXPONENT: Final = 0x7F80
"""Bits of a bfloat16 that are all set where it is not finite."""


class _Kinds(NamedTuple):
    """Number of values of each kind."""

    nan: int
    posinf: int
    neginf: int


class NonFiniteCounts:
    """Counts the values of a payload that are not finite under its mask.

    Args:
        tensors: the payload's tensors. Without a mask nothing is counted: padding may be anything.
    """

    def __init__(self, tensors: Mapping[str, WireTensor]) -> None:
        self._tensors = tensors
        self._streams: dict[str, _Kinds] = {}
        mask = flat_values(tensors, "response_mask", (*FLOATS, *INTEGERS))
        self._on: Bool | None = None
        if mask is not None:
            bits, one = mask_bits(mask, tensors["response_mask"][0])
            self._on = bits == one

    @property
    def tokens(self) -> int:
        """Tokens under the mask."""
        return 0 if self._on is None else int(self._on.sum())

    def add(self, summary: Summary, streams: Sequence[str] | None = None) -> None:
        """Add the counts of streams from their summary, which leaves copies out."""
        found = non_finite(summary.total, *summary.pair)
        for stream in summary.pair if streams is None else streams:
            kinds = (int(found[f"nonfinite/{stream}_{kind}"]) for kind in _Kinds._fields)
            self._streams[stream] = _Kinds(*kinds)

    def of_streams(self) -> dict[str, int]:
        """Return 'stream_kind' -> number of log-probs, if it is over 0."""
        own = {stream: self._of(name) for stream, name in STREAM_TENSORS.items()
               if stream not in self._streams}  # fmt: skip
        return _named({**own, **self._streams})

    def of_values(self) -> dict[str, int]:
        """Return 'tensor_kind' -> number of values of the other tensors, if it is over 0."""
        return _named({name: self._of(name) for name in _VALUES})

    def _of(self, name: str) -> _Kinds:
        values = None if self._on is None else flat_values(self._tensors, name, FLOATS)
        if values is None:
            return _Kinds(0, 0, 0)
        if values.dtype == np.uint16:  # bfloat16
            bits = values.view(np.uint16)
            at = np.flatnonzero((bits & _EXPONENT) == _EXPONENT)
            odd = (bits[at].astype(np.uint32) << 16).view(np.float32)
        else:
            at = np.flatnonzero(~np.isfinite(values))
            odd = values[at].astype(np.float32)
        if self._on is not None and values.size == self._on.size:
            odd = odd[self._on[at]]
        elif values.size != self._rows:
            return _Kinds(0, 0, 0)  # values of other tokens: which of them count is unknown
        kinds = (np.isnan, np.isposinf, np.isneginf)
        return _Kinds(*(int(is_kind(odd).sum()) for is_kind in kinds))

    @property
    def _rows(self) -> int:
        """Return the number of the mask's rows."""
        _, shape, _, offsets = self._tensors["response_mask"]
        if offsets is not None:
            return len(offsets) - 1
        packed = self._tensors.get("cu_seqlens")
        return int(shape[0] if packed is None else packed[2].size - 1)


def _named(counts: Mapping[str, _Kinds]) -> dict[str, int]:
    return {
        f"{name}_{kind}": count
        for name, kinds in sorted(counts.items())
        for kind, count in zip(_Kinds._fields, kinds, strict=True)
        if count
    }


def log_prob_rows(job: PayloadJob, counts: NonFiniteCounts) -> Iterator[Put]:
    """Yield the finding of log-probs that are not finite."""
    if found := counts.of_streams():
        see = Link.to_step(
            "tokens", job["step"], query={"kind": "nonfinite"}, shows="which they are"
        )
        yield finding(
            "nonfinite_log_probs",
            f"log-probs under the mask are not finite: {_listed(found)}, of {counts.tokens} tokens",
            **of_job(job, time.time()),
            severity="error",
            evidence={**found},
            advice="statistics are over the finite ones",
            see=(see,),
        )


def value_rows(job: PayloadJob, counts: NonFiniteCounts) -> Iterator[Put]:
    """Yield the finding of other values that are not finite."""
    if found := counts.of_values():
        yield finding(
            "nonfinite_values",
            f"values under the mask are not finite: {_listed(found)}, over {counts.tokens} tokens",
            **of_job(job, time.time()),
            severity="error",
            evidence={**found},
            advice="look at the samples that they are of: a group of one sample has no standard "
            "deviation, and a reward of NaN makes every advantage of its group NaN",
            see=(Link.to_step("samples", job["step"], shows="the step's samples"),),
        )


_SHOWN: Final = {"nan": "NaN", "posinf": "inf", "neginf": "-inf"}


def _listed(counts: Mapping[str, int]) -> str:
    shown = []
    for name, count in counts.items():
        of, _, kind = name.rpartition("_")
        shown.append(f"{count} {_SHOWN[kind]} in {of}")
    return ", ".join(shown)


Skips = tuple[tuple[int, int, int], ...]


class CountedOnce(NamedTuple):
    """A payload's statistics, each token once.

    Attributes:
        summary: its `left_out` counts the tokens of rows that do not count.
        copies: the (row, first, last) of these tokens.
        differing: samples with such a row whose numbers or mask differ.
    """

    summary: Summary
    copies: Skips = ()
    differing: tuple[str, ...] = ()


def summarise_once(
    batch: TokenBatch,
    settings: StatisticsSettings,
    key: PayloadKey,
    skip: npt.NDArray[np.uint8] | None = None,
) -> CountedOnce:
    """Compute a payload's statistics; rows that are copies of one sample count once.

    Different rows with one id are separate samples, which the step summary names (`identity`).

    Args:
        batch: its tokens.
        settings: the run's settings for the statistics.
        key: the payload's key.
        skip: uint8 [tokens], 1 where a token counts elsewhere.

    Raises:
        InvalidTensor: as `summarise`.
    """
    name = part_key(*key)
    summary = summarise(batch, settings, skip=skip, name=name)
    samples = summary.sequences.samples
    if not all(samples) or not Ledger().claim(summary, None, [*map(RowIdentity, samples)]).skips:
        return CountedOnce(summary)
    part = PartRecord(key=name, summary=summary, stage="", role="", rank=0)
    identities = resolve([part]).of_rows(name, summary)
    copies = Ledger().claim(summary, None, identities).skips
    if not copies:
        return CountedOnce(summary)
    again = skip_of(batch, copies)
    once = summarise(batch, settings, skip=again if skip is None else again | skip, name=name)
    left_out = Counter(summary.left_out)
    left_out[REPEATED] += summary.total.masked - once.total.masked
    once = dataclasses.replace(once, left_out=dict(left_out))
    return CountedOnce(once, copies, _differing(summary, identities, {row for row, _, _ in copies}))


def _differing(
    summary: Summary, identities: Sequence[RowIdentity], repeated: set[int]
) -> tuple[str, ...]:
    """Return the samples whose repeated rows have other numbers than the row that counts."""
    sequences = summary.sequences
    runs = sequences.runs()
    contents: dict[str, tuple[bytes, bytes]] = {}
    found: dict[str, None] = {}
    for index in reversed(range(len(identities))):
        identity = identities[index]
        positions = runs[index] + identity.shift
        content = (positions.tobytes(), sequences.values[index].tobytes())
        counts = contents.setdefault(identity.sample, content)
        if counts != content and int(sequences.row[index]) in repeated:
            found[sequences.samples[index]] = None
    return tuple(reversed(found))
