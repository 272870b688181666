"""Rows of one payload that repeat a sample of it: the last one counts."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.core.instructions import PayloadKey
from stagescope_service.statistics import (
    PartRecord,
    StatisticsSettings,
    TokenBatch,
    skip_of,
    summarise,
)
from stagescope_service.statistics.identity import RowIdentity, resolve
from stagescope_service.statistics.ledger import Ledger
from stagescope_service.statistics.step_summary import REPEATED
from stagescope_service.statistics.summary import Summary
from stagescope_service.store.parts import part_key

Skips = tuple[tuple[int, int, int], ...]


class Once(NamedTuple):
    """A payload's statistics, each token once.

    Attributes:
        summary: its `left_out` counts the tokens of rows that do not count.
        copies: the (row, first, last) of these tokens.
        differing: samples of which such a row has other numbers, or another mask.
    """

    summary: Summary
    copies: Skips = ()
    differing: tuple[str, ...] = ()


def summarise_once(
    batch: TokenBatch,
    settings: StatisticsSettings,
    key: PayloadKey,
    skip: npt.NDArray[np.uint8] | None = None,
) -> Once:
    """Compute a payload's statistics; rows that are copies of one sample count once.

    Different rows with one id are separate samples, which the step summary names (`identity`).

    Args:
        batch: its tokens.
        settings: the run's settings for the statistics.
        key: of the payload.
        skip: uint8 [tokens], 1 where a token counts elsewhere.

    Raises:
        InvalidTensor: as `summarise`.
    """
    name = part_key(*key)
    summary = summarise(batch, settings, skip=skip, name=name)
    samples = summary.sequences.samples
    if not all(samples) or not Ledger().claim(summary, None, [*map(RowIdentity, samples)]).skips:
        return Once(summary)
    part = PartRecord(key=name, summary=summary, stage="", role="", rank=0)
    places = resolve([part]).places_of(name, summary)
    copies = Ledger().claim(summary, None, places).skips
    if not copies:
        return Once(summary)
    again = skip_of(batch, copies)
    once = summarise(batch, settings, skip=again if skip is None else again | skip, name=name)
    left_out = Counter(summary.left_out)
    left_out[REPEATED] += summary.total.masked - once.total.masked
    once = dataclasses.replace(once, left_out=dict(left_out))
    return Once(once, copies, _differing(summary, places, {row for row, _, _ in copies}))


def _differing(
    summary: Summary, places: Sequence[RowIdentity], repeated: set[int]
) -> tuple[str, ...]:
    """Return the samples whose repeated rows have other numbers than the row that counts."""
    sequences = summary.sequences
    cover = sequences.cover[np.argsort(sequences.cover[:, 0], kind="stable")]
    bounds = np.searchsorted(cover[:, 0], np.arange(len(places) + 1))
    contents: dict[str, tuple[bytes, bytes]] = {}
    found: dict[str, None] = {}
    for index in reversed(range(len(places))):
        place = places[index]
        runs = cover[bounds[index] : bounds[index + 1], 1:] + place.shift
        content = (runs.tobytes(), sequences.values[index].tobytes())
        counts = contents.setdefault(place.sample, content)
        if counts != content and int(sequences.row[index]) in repeated:
            found[sequences.samples[index]] = None
    return tuple(reversed(found))
