"""The route that gives a step's batch back: kept files and the rings', joined, as safetensors."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
from fastapi import APIRouter, Query
from fastapi.responses import StreamingResponse

from stagescope.batch import Batch, Gap
from stagescope.batch.file import pieces
from stagescope.render import counted
from stagescope.wire.errors import InvalidInput, NotFound, StagescopeError
from stagescope.wire.schema import PART_FIELDS, RECENT_TENSORS
from stagescope_service.api.completeness import ALL_ROWS
from stagescope_service.api.dependencies import Dependencies, Deps, Row, StepTarget
from stagescope_service.api.payload_artifacts import KEEP_ADVICE, local_file, payload_artifacts
from stagescope_service.api.requests import pattern
from stagescope_service.api.steps import stages_of
from stagescope_service.api.target import Target
from stagescope_service.dumps.joining.join import join
from stagescope_service.dumps.joining.payload_files import PayloadFile, PayloadFiles
from stagescope_service.store.tensorfile import disk_errors


class Scratch:
    """Allocates arrays in one file without a name; it is gone with the last of its arrays.

    Usage::

        with Scratch(directory) as scratch:
            array = scratch.allocate((rows, width), dtype)   # may be used after the block

    Args:
        directory: on whose disk; it is made.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        with disk_errors(directory):
            directory.mkdir(parents=True, exist_ok=True)
            self._file = tempfile.TemporaryFile(dir=directory)  # noqa: SIM115 - closed by __exit__
        self._end = 0

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()  # what is mapped stays

    def allocate(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """Return an array of zeros.

        Raises:
            StoreError: there is no room on the disk.
        """
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return np.empty(shape, dtype)
        begin, self._end = self._end, self._end + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with disk_errors(self._directory):
            # Room that is only promised would end the process when it is written.
            os.posix_fallocate(self._file.fileno(), begin, self._end - begin)
            return np.memmap(self._file, dtype, "r+", begin, shape).view(np.ndarray)


router = APIRouter(prefix="/steps/{step}", tags=["steps"])

MEDIA_TYPE: Final = "application/octet-stream"
_PIECE: Final = 4 << 20
_NAMED: Final = 20
"""Names that a gap lists."""
_Part = tuple[Any, ...]
"""(incarnation, stage, *part)."""
Numbers = Mapping[_Part, Mapping[str, float]]
_WORDS: Final = r"[^,\s]"
_FILE: Final = {"type": "string", "format": "binary", "description": "A safetensors file."}


@router.get(
    "/batch",
    response_class=StreamingResponse,
    responses={200: {"content": {MEDIA_TYPE: {"schema": _FILE}}}},
)
async def batch(
    deps: Deps,
    target: StepTarget,
    names: Annotated[
        str | None,
        Query(
            max_length=4000,
            description="Only these tensors, with commas between them.",
            json_schema_extra=pattern(_WORDS),
        ),
    ] = None,
    stages: Annotated[
        str | None,
        Query(
            max_length=4000,
            description="Only what these stages recorded, with commas between them.",
            json_schema_extra=pattern(_WORDS),
        ),
    ] = None,
) -> StreamingResponse:
    """Give the step's batch as one safetensors file: rows of every stage, rank and part.

    It is put together from the kept files and what the rings still hold, rows joined by sample id,
    bit by bit as recorded. Its metadata say where each came from, what is missing (ranks, payloads,
    tensors that were not kept) and what disagrees; `stagescope.Batch.load` reads it.
    """
    chosen = [_words(text) for text in (names, stages)]
    found = await deps.comparisons.run(batch_of, deps, target, *chosen)
    size, stream = _stream(found)
    name = f"{target.run}-{target.number}-step{_number(target)}.safetensors"
    headers = {
        "content-length": str(size),
        "content-disposition": f'attachment; filename="{name}"',
    }
    return StreamingResponse(stream, media_type=MEDIA_TYPE, headers=headers)


def batch_of(
    deps: Dependencies, target: Target, names: Sequence[str] | None, stages: Sequence[str] | None
) -> Batch:
    """Put a step's batch together.

    Raises:
        NotFound: nothing of it is kept (any more), or no such tensor or stage.
    """
    step = _number(target)
    place = deps.settings.data_path / "copies"
    with Scratch(place) as scratch, tempfile.TemporaryDirectory(dir=place) as copies:
        rows = payload_artifacts(deps, target, step)
        numbers = _scalars(deps, target)
        files, gaps = _files(deps, target, rows, numbers, Path(copies))
        if not files:
            reasons = "; ".join(gap.message for gap in gaps)
            raise NotFound(
                f"no tensors of step {step} of {target.run} are kept"
                + (reasons and f": {reasons}"),
                advice=KEEP_ADVICE,
            )
        dump = PayloadFiles(files, name=f"{target.run}@{target.number}:{step}")
        heading = {n: v for n, v in target.heading().items() if n != "also_live"}
        return join(
            dump,
            step,
            names=names,
            stages=stages,
            source=heading,
            gaps=[
                *gaps,
                *_known_gaps(deps, target, rows, names, stages),
                *_numbers_alone(numbers, rows, stages),
            ],
            allocate=scratch.allocate,
        )


def _files(
    deps: Dependencies, target: Target, rows: Sequence[Row], numbers: Numbers, copies: Path
) -> tuple[list[PayloadFile], list[Gap]]:
    found: list[PayloadFile] = []
    gaps: list[Gap] = []
    for row in rows:
        try:
            path = local_file(deps, row, copies)
        except StagescopeError as error:
            gaps.append(Gap("file", str(error)))
            continue
        logged = numbers.get(_part(row), {})
        consumed = _number(target) if row["step"] is None else None
        found.append(PayloadFile(path, row["path"], row["checksum"], row["wall"], logged, consumed))
    return found, gaps


def _part(row: Row) -> _Part:
    return (row["incarnation"], row["stage"], *(row.get(name) or 0 for name in PART_FIELDS))


def _scalars(deps: Dependencies, target: Target) -> Numbers:
    """Return the numbers of each part of a stage of a process."""
    found: dict[_Part, dict[str, float]] = {}
    for row in deps.catalogue.scalars(target.attempt_id, _number(target), limit=ALL_ROWS):
        found.setdefault(_part(row), {})[row["name"]] = row["value"]
    return found


def _numbers_alone(
    numbers: Numbers, rows: Sequence[Row], stages: Sequence[str] | None
) -> Iterator[Gap]:
    """Yield which numbers were logged by parts of which no tensor is kept: no row is theirs."""
    held = {_part(row) for row in rows}
    alone: dict[str | None, tuple[set[str], set[_Part]]] = {}
    for part, logged in numbers.items():
        if part not in held and (stages is None or part[1] in stages):
            names, parts = alone.setdefault(part[1], (set(), set()))
            names.update(logged)
            parts.add(part)
    for stage, (names, parts) in alone.items():
        shown = ", ".join(sorted(names)[:_NAMED])
        shown += f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
        by = "outside a stage" if stage is None else f"by {counted(len(parts), 'part')} of {stage}"
        yield Gap("number", f"{shown}, logged {by} with no tensor kept: step.scalars() has them")


def _known_gaps(
    deps: Dependencies,
    target: Target,
    rows: Sequence[Row],
    names: Sequence[str] | None,
    stages: Sequence[str] | None,
) -> Iterator[Gap]:
    """Yield what the catalogue knows to be missing."""
    step = _number(target)
    replaced = deps.catalogue.replaced(target.attempt_id, step)
    wanted = [
        row
        for row in deps.catalogue.payloads(target.attempt_id, step, limit=ALL_ROWS)
        if stages is None or row["stage"] in stages
        if (row["incarnation"], row["seq"]) not in replaced
    ]
    for item in stages_of(deps, target)[1].missing:
        if stages is None or item.get("stage") in stages:
            who = f"{item.get('role')} {item.get('rank')}"
            yield Gap("rank", f"{who} in {item.get('stage')}: {item.get('status')}")
    held = {(row["incarnation"], row["seq"]) for row in rows}
    for row in wanted:
        if row["state"] != "ingested" and (row["incarnation"], row["seq"]) not in held:
            who = f"{row['stage']} {row['role']} {row['rank']}"
            why = f"{row['state']}, {row['reason']}" if row["reason"] else row["state"]
            yield Gap("payload", f"what {who} recorded is not there: {why}")
    yield from _not_kept(wanted, rows, names)


def _not_kept(
    payloads: Sequence[Row], artifacts: Sequence[Row], names: Sequence[str] | None
) -> Iterator[Gap]:
    held: dict[tuple[str, int], set[str]] = {}
    for row in artifacts:
        there = held.setdefault((row["incarnation"], row["seq"]), set())
        there |= RECENT_TENSORS if row["tensors"] is None else set(row["tensors"])
    lacking: Counter[tuple[str, str]] = Counter()
    for row in payloads:
        there = held.get((row["incarnation"], row["seq"]), set())
        told = row["tensors"] if isinstance(row["tensors"], Mapping) else {}
        lacking.update((row["stage"], name) for name in set(told) - there)
    by_stage: dict[str, list[str]] = {}
    for (stage, name), _ in sorted(lacking.items()):
        if names is None or name in names:
            by_stage.setdefault(stage, []).append(name)
    for stage, missing in by_stage.items():
        yield Gap("tensor", f"{stage} recorded {', '.join(missing)}: not kept")


def _stream(batch: Batch) -> tuple[int, Iterator[bytes]]:
    whole = list(pieces(batch))

    def chunks() -> Iterator[bytes]:
        for piece in whole:
            view = memoryview(piece)
            for at in range(0, view.nbytes, _PIECE):
                yield bytes(view[at : at + _PIECE])

    return sum(memoryview(piece).nbytes for piece in whole), chunks()


def _words(text: str | None) -> list[str] | None:
    if text is None:
        return None
    found = [word for part in text.split(",") if (word := part.strip())]
    if not found:
        raise InvalidInput(f"{text!r:.100} names nothing", expected="names with commas between")
    return found


def _number(target: Target) -> int:
    assert target.step is not None
    return int(target.step["step"])
