"""Compare two or three dumps: everything that any of them has, with a verdict."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Sequence

from stagescope.errors import InvalidInput
from stagescope.render import counted
from stagescope_service.compare.assemble import heaviest
from stagescope_service.compare.mappers import Mapper, threads
from stagescope_service.compare.results import Comparison, PairResult, SideResult, Verdict
from stagescope_service.compare.running import Progress
from stagescope_service.compare.tolerances import Tolerances
from stagescope_service.compare.two import TwoSides
from stagescope_service.dumps.records import Dump
from stagescope_service.statistics import pairwise

_log = logging.getLogger("stagescope.compare")


def compare(
    sides: Sequence[Dump],
    *,
    tolerances: Tolerances | None = None,
    mapper: Mapper | None = None,
    progress: Progress | None = None,
) -> Comparison:
    """Hold two or three dumps against each other.

    Every rank, part and trajectory that a side has counts; rows pair by sample, not by place; of
    padded rows what their masks cover. Files that are missing, damaged or refused are findings.
    Memory is bounded by two shards for each task that the mapper runs at a time.

    Args:
        sides: two or three; the first is held against each other one, then these two.
        tolerances: what counts as noise; see `tolerances`.
        mapper: where shards are compared; threads of this process by default.
        progress: told (tasks done, tasks known so far).

    Raises:
        InvalidInput: other than two or three sides.
    """
    if not 2 <= len(sides) <= 3:
        raise InvalidInput(f"{counted(len(sides), 'side')} given", expected="two or three")
    pairwise.warm(_log_compiling)  # before threads ask for it at once
    began = time.monotonic()
    run = mapper if mapper is not None else threads()
    told = progress if progress is not None else _silent
    pairs, read = [], 0
    for at in itertools.combinations(range(len(sides)), 2):
        two = TwoSides((sides[at[0]], sides[at[1]]), tolerances or Tolerances(), run, told)
        pairs.append(two.run((at[0], at[1])))
        read += two.bytes
    verdict, reason = _overall(pairs)
    return Comparison(
        tuple(map(_side, sides)), tuple(pairs), verdict, reason, read, time.monotonic() - began
    )


def _overall(pairs: Sequence[PairResult]) -> tuple[Verdict, str]:
    shared = [pair for pair in pairs if not pair.shares_nothing]
    if not shared:
        return Verdict.NOT_COMPARABLE, "; ".join(dict.fromkeys(pair.reason for pair in pairs))
    verdict = heaviest(pair.verdict for pair in shared)
    return verdict, next(pair.reason for pair in shared if pair.verdict is verdict)


def _side(dump: Dump) -> SideResult:
    places = [entry.place for entry in dump.entries]
    files = {(entry.path, entry.place): entry.bytes for entry in dump.entries}
    return SideResult(
        name=dump.name, kind=dump.kind, entries=len(places), bytes=sum(files.values()),
        steps=tuple(sorted({place.step for place in places if place.step is not None})),
        ranks=tuple(sorted({place.rank for place in places if place.rank is not None})),
        parts=tuple(map(str, sorted({place.part for place in places}))),
        sections=tuple(dict.fromkeys(entry.section for entry in dump.entries)),
        about=dict(dump.about),
    )  # fmt: skip


def _log_compiling() -> None:
    _log.info("compiling the loops of comparisons, once for an installation")


def _silent(done: int, known: int) -> None:
    """Tell nobody."""
