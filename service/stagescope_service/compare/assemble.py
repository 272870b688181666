"""From the pieces of all shards to one result a tensor, with its verdict."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stagescope_service.compare import flow
from stagescope_service.compare.pairing.index import RUN, SAMPLE
from stagescope_service.compare.pairing.pieces import Piece
from stagescope_service.compare.pairing.token_alignment import (
    COMPARED,
    LENGTHS_DIFFER,
    TOKENS_DIFFER,
    Location,
)
from stagescope_service.compare.results import PlaceResult, TensorResult, Verdict
from stagescope_service.compare.tolerances import NoiseFloor, Tolerances, is_noise
from stagescope_service.statistics.pairwise import Pairwise

PAIRED: Final = ("compared", "tokens differ", "lengths differ")
"""What becomes of trajectories that both sides have."""


def assemble(
    pieces: Iterable[Piece],
    tolerances: Tolerances,
    floor: NoiseFloor | None,
    *,
    unmatched: str = "",
) -> tuple[TensorResult, ...]:
    """Return a result for each tensor, by step and in the order of the flow.

    Args:
        pieces: of all shards.
        tolerances: what is allowed.
        floor: what log-probs are apart from themselves.
        unmatched: why rows that are known by their place alone cannot be compared, if so.
    """
    grouped: dict[tuple[Any, str, str], list[Piece]] = collections.defaultdict(list)
    for piece in pieces:
        grouped[piece.places[0].step, piece.section, piece.name].append(piece)
    results = [
        _tensor(step, section, name, each, tolerances, floor, unmatched)
        for (step, section, name), each in grouped.items()
    ]
    return tuple(sorted(results, key=_order))


def with_totals(
    tensors: Sequence[TensorResult], alone: Mapping[int | None, Collection[str]]
) -> tuple[tuple[TensorResult, ...], int]:
    """Return tensors that say of how many trajectories theirs are, and how many there are at all.

    Args:
        tensors: of all steps.
        alone: step -> trajectories that one side alone has.
    """
    paired: dict[int | None, int] = {}
    for tensor in tensors:
        rows = sum(tensor.samples.get(name, 0) for name in PAIRED)
        paired[tensor.step] = max(rows, paired.get(tensor.step, 0))
    total = {step: count + len(alone.get(step, ())) for step, count in paired.items()}
    told = tuple(
        dataclasses.replace(t, samples={**t.samples, "total": total[t.step]}) if t.samples else t
        for t in tensors
    )
    return told, sum(total.values())


def heaviest(verdicts: Iterable[Verdict]) -> Verdict:
    """Return the verdict of all of them; of none it is `same`."""
    return max(verdicts, key=lambda verdict: verdict.weight, default=Verdict.SAME)


def _order(result: TensorResult) -> tuple[Any, ...]:
    step = -1 if result.step is None else result.step
    return (step, flow.order(result.section, result.name))


def _tensor(
    step: int | None,
    section: str,
    name: str,
    pieces: list[Piece],
    tolerances: Tolerances,
    floor: NoiseFloor | None,
    unmatched: str,
) -> TensorResult:
    pieces.sort(key=_place_order)
    places = tuple(
        PlaceResult(_verdict(piece, tolerances, floor, unmatched), piece) for piece in pieces
    )
    once = _without_replicas(pieces)
    found = Pairwise.union([piece.found for piece in once])
    verdict = heaviest(each.verdict for each in places)
    largest = max(
        (piece for piece in once if piece.largest is not None),
        key=lambda piece: piece.found.max_abs, default=None,
    )  # fmt: skip
    samples = _samples(once)
    return TensorResult(
        step, section, name, flow.station(section, name), verdict,
        _reason(verdict, found, pieces, samples, unmatched), found,
        tolerances.of(section, name, pieces[0].dtypes), places,
        first=_first(places, verdict), largest=None if largest is None else largest.largest,
        samples=samples,
    )  # fmt: skip


def _verdict(
    piece: Piece, tolerances: Tolerances, floor: NoiseFloor | None, unmatched: str
) -> Verdict:
    if piece.unproven and _differs(piece):
        return Verdict.NOT_COMPARABLE
    if piece.shapes_differ:
        return Verdict.DIFFERENT
    by_place = piece.rows is not None and piece.key not in (SAMPLE, RUN)
    if unmatched and by_place and not flow.is_structural(piece.name) and not _is_sampled(piece):
        return Verdict.NOT_COMPARABLE
    found, states = piece.found, None if piece.rows is None else piece.rows.states
    if flow.is_structural(piece.name) and states is not None and (states == LENGTHS_DIFFER).any():
        return Verdict.DIFFERENT
    if found.unequal_count:
        tolerance = tolerances.of(piece.section, piece.name, piece.dtypes)
        if not is_noise(found, tolerance, floor, piece.name):
            return Verdict.DIFFERENT
    if states is not None and len(states):
        compared = (states == COMPARED).any()
        if not compared or (states == LENGTHS_DIFFER).any():
            return Verdict.NOT_COMPARABLE
    return Verdict.WITHIN_NOISE if found.unequal_count else Verdict.SAME


def _differs(piece: Piece) -> bool:
    states = None if piece.rows is None else piece.rows.states
    apart = states is not None and bool((states != COMPARED).any())
    return bool(piece.shapes_differ or piece.found.unequal_count or apart)


def _is_sampled(piece: Piece) -> bool:
    return piece.section in flow.SAMPLING


def _without_replicas(pieces: Sequence[Piece]) -> list[Piece]:
    """Leave out pieces all of whose samples were there before at the same part of the step."""
    seen: dict[tuple[Any, ...], set[str]] = collections.defaultdict(set)
    kept = []
    for piece in pieces:
        if piece.rows is None or piece.fragments or piece.key not in (SAMPLE, RUN):
            kept.append(piece)
            continue
        place = piece.places[0]
        unit = (place.step, place.stage, place.part.occurrence, place.part.epoch)
        labels = piece.rows.labels
        if not labels or not seen[unit].issuperset(labels):
            kept.append(piece)
            seen[unit].update(labels)
    return kept


def _samples(pieces: Sequence[Piece]) -> dict[str, int]:
    """Count trajectories, each once however many passes and fragments of it were compared."""
    tables = [piece.rows for piece in pieces if piece.rows is not None]
    if not tables:
        return {}
    states = np.concatenate([table.states for table in tables])
    unequal = np.concatenate([table.numbers[:, 1] for table in tables]) > 0
    labels = [label for table in tables for label in table.labels]
    seen = {label: at for at, label in enumerate(dict.fromkeys(labels))}
    # Most often each is there once, in this order.
    of_row = np.arange(len(labels))
    if len(seen) < len(labels):
        of_row = np.fromiter(map(seen.__getitem__, labels), np.int64)

    def trajectories(rows: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
        there = np.zeros(len(seen), bool)
        there[of_row[rows]] = True
        return there

    tokens, lengths = trajectories(states == TOKENS_DIFFER), trajectories(states == LENGTHS_DIFFER)
    return {
        "compared": int((trajectories(states == COMPARED) & ~tokens & ~lengths).sum()),
        "unequal": int(trajectories(unequal).sum()),
        "tokens differ": int(tokens.sum()),
        "lengths differ": int((lengths & ~tokens).sum()),
    }


def _first(places: Sequence[PlaceResult], verdict: Verdict) -> Location | None:
    """Return where the first place of this verdict has its first pair over the tolerance."""
    for each in places:
        if each.verdict is verdict and verdict is not Verdict.SAME:
            location = each.piece.over or each.piece.unequal
            if location is not None:
                return location
    return None


def _place_order(piece: Piece) -> tuple[Any, ...]:
    place = piece.places[0]
    known = (-1 if place.step is None else place.step, place.part, place.stage or "")
    return (*known, place.role or "", -1 if place.rank is None else place.rank)


def _reason(
    verdict: Verdict,
    found: Pairwise,
    pieces: Sequence[Piece],
    samples: dict[str, int],
    unmatched: str,
) -> str:
    words = []
    if found.unequal_count:
        words.append(f"{found.unequal_count} of {found.pairs} values differ")
        if found.over_count != found.unequal_count:
            words.append(f"{found.over_count} by more than is allowed")
    if found.disagreeing_non_finite:
        words.append(
            f"{found.disagreeing_non_finite} disagree in being NaN or infinite, and distances are "
            "those of the finite pairs"
        )
    elif found.agreeing_non_finite:
        words.append(f"{found.agreeing_non_finite} are the same NaN or infinity on both sides")
    for state in ("tokens differ", "lengths differ"):
        if samples.get(state):
            total = sum(samples[name] for name in PAIRED)
            words.append(f"the {state} in {samples[state]} of {total} samples")
    words += dict.fromkeys(piece.problem for piece in pieces if piece.problem)
    if verdict is Verdict.NOT_COMPARABLE:
        words += dict.fromkeys(p.unproven for p in pieces if p.unproven and _differs(p))
    if verdict is Verdict.NOT_COMPARABLE and unmatched and not words:
        words.append(unmatched)
    if verdict is Verdict.DIFFERENT and not words:
        # Replicas count once: what differs may be the others of them.
        words.append("ranks or parts that hold the same samples differ among themselves")
    if not found.pairs and not words:
        words.append("no values")
    return "; ".join(words)
