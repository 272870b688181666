"""A step's payload files, joined into one batch."""

from __future__ import annotations

import math
import mmap
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.core.instructions import PayloadKey
from stagescope_service.dumps.formats.own_file import PayloadFile, holds_sample, open_payloads
from stagescope_service.dumps.joining.join import Selection, join
from stagescope_service.store.tables import ArtifactRow, PayloadRow, ScalarRow
from stagescope_service.store.tensorfile import disk_errors
from stagescope_service.views.kept import KEEP_ADVICE, local_file, payload_artifacts
from stagescope_service.views.reading.completeness import ALL_ROWS, rows_removed
from stagescope_service.views.reading.dependencies import Dependencies
from stagescope_service.views.reading.target import Target
from stagescope_service.views.steps.listing import progress_of
from stagescope_wire.batch import Batch, Gap
from stagescope_wire.batch.file import pieces
from stagescope_wire.errors import NotFound, StagescopeError
from stagescope_wire.links import Link
from stagescope_wire.render import counted
from stagescope_wire.schema import Part
from stagescope_wire.tensors import RECENT_TENSORS


class Scratch:
    """Allocates arrays in one unnamed file, which is deleted with the last of its arrays.

    Usage::

        with Scratch(directory) as scratch:
            array = scratch.allocate((rows, width), dtype)   # stays valid after the block

    Args:
        directory: of the file; it is created.
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
        self._file.close()  # mapped arrays stay valid

    def allocate(
        self, shape: tuple[int, ...], dtype: np.dtype[np.generic]
    ) -> npt.NDArray[Any]:  # as `dumps.joining` takes it
        """Return an array of zeros.

        Raises:
            StoreError: there is no room on the disk.
        """
        size = math.prod(shape) * dtype.itemsize
        if not size:
            return np.empty(shape, dtype)
        begin, self._end = self._end, self._end + -(-size // mmap.PAGESIZE) * mmap.PAGESIZE
        with disk_errors(self._directory):
            # Without the space on disk, writing to the mapping would kill the process (SIGBUS).
            os.posix_fallocate(self._file.fileno(), begin, self._end - begin)
            return np.memmap(self._file, dtype, "r+", begin, shape).view(np.ndarray)


_NAMES_LISTED: Final = 20
"""Names that a gap lists."""


class _PartKey(NamedTuple):
    """A part of a stage of a process."""

    incarnation: str
    stage: str | None
    part: Part


Numbers = Mapping[_PartKey, Mapping[str, float]]
"""Scalars by name of each part."""


def batch_of(
    deps: Dependencies,
    target: Target,
    selection: Selection,
    *,
    sample: str | None = None,
    payload: PayloadKey | None = None,
    artifacts: Sequence[ArtifactRow] | None = None,
    described: bool = True,
) -> Batch:
    """Return a step's batch.

    Args:
        deps: find and fetch the files.
        target: the step.
        selection: which tensors and stages.
        sample: read only the files that hold this sample, by its id; None: all.
        payload: read only this payload; None: all.
        artifacts: the step's payload files; None: they are looked up.
        described: with the numbers and the gaps that the catalogue lists.

    Raises:
        NotFound: none of its tensors are kept, or no such tensor or stage.
    """
    step = target.step_number
    if artifacts is None:
        artifacts = payload_artifacts(deps, target, step)
    directory = deps.settings.data_path / "copies"
    with Scratch(directory) as scratch, tempfile.TemporaryDirectory(dir=directory) as copies:
        artifacts = [row for row in artifacts if payload in (None, _payload_key(row))]
        found, gaps = _local_files(deps, artifacts, Path(copies))
        if sample is not None:
            there, found = found, [each for each in found if holds_sample(each[1], sample)]
            if there and not found:
                raise NotFound(
                    f"what is kept of step {step} has no sample {sample!r:.200}",
                    expected="the sample_uid of one of its samples",
                    see=(Link.to_step("samples", step),),
                )
        if not found:
            removed = rows_removed(target.step_row)
            texts = [gap.message for gap in gaps[:1]]  # the others say the same of other files
            texts += [f"the same holds for {len(gaps) - 1} more files"] if len(gaps) > 1 else []
            reasons = "; ".join([*texts, *([removed] if removed else [])])
            raise NotFound(
                f"no tensors of step {step} of {target.run} are kept"
                + (reasons and f": {reasons}"),
                advice=KEEP_ADVICE,
            )
        numbers = _scalars(deps, target) if described else {}
        if described:
            gaps += _catalogue_gaps(deps, target, artifacts, selection)
            gaps += _gaps_of_numbers(numbers, artifacts, selection)
        files = [_payload_file(target, row, path, numbers) for row, path in found]
        dump = open_payloads(files, f"{target.run}@{target.number}:{step}")
        heading = {
            n: v for n, v in target.heading().items() if n not in ("also_live", "display_name")
        }
        return join(
            dump,
            step,
            selection,
            source=heading,
            gaps=gaps,
            allocate=scratch.allocate,
        )


def _local_files(
    deps: Dependencies, artifacts: Sequence[ArtifactRow], copies: Path
) -> tuple[list[tuple[ArtifactRow, Path]], list[Gap]]:
    """Return the artifacts with their files, and a gap for each that cannot be read."""
    files: list[tuple[ArtifactRow, Path]] = []
    gaps: list[Gap] = []
    for row in artifacts:
        try:
            path = local_file(deps, row, copies)
        except StagescopeError as error:
            gaps.append(Gap("file", str(error)))
            continue
        files.append((row, path))
    return files, gaps


def _payload_file(target: Target, row: ArtifactRow, path: Path, numbers: Numbers) -> PayloadFile:
    logged = numbers.get(_part_key(row), {})
    consumed = target.step_number if row["step"] is None else None
    return PayloadFile(path, row["path"], row["checksum"], row["wall"], logged, consumed)


def _part_key(row: ArtifactRow | ScalarRow) -> _PartKey:
    return _PartKey(row["incarnation"], row["stage"], Part.of_columns(row))


def _payload_key(row: ArtifactRow | PayloadRow) -> PayloadKey:
    return PayloadKey(row["incarnation"], row["seq"])


def _scalars(deps: Dependencies, target: Target) -> Numbers:
    """Return the scalars of each part."""
    numbers: dict[_PartKey, dict[str, float]] = {}
    for row in deps.catalogue.scalars(target.attempt_id, target.step_number, limit=ALL_ROWS):
        numbers.setdefault(_part_key(row), {})[row["name"]] = row["value"]
    return numbers


def _gaps_of_numbers(
    numbers: Numbers, artifacts: Sequence[ArtifactRow], selection: Selection
) -> Iterator[Gap]:
    """Yield the numbers of parts without a kept tensor, which belong to no row of the batch."""
    kept = {_part_key(row) for row in artifacts}
    by_stage: dict[str | None, tuple[set[str], int]] = {}
    for part, logged in numbers.items():
        if part not in kept and selection.has_stage(part.stage):
            names, count = by_stage.get(part.stage, (set(), 0))
            by_stage[part.stage] = (names | logged.keys(), count + 1)
    for stage, (names, count) in by_stage.items():
        listed = ", ".join(sorted(names)[:_NAMES_LISTED])
        omitted = len(names) - _NAMES_LISTED
        listed += f" and {omitted} more" if omitted > 0 else ""
        by = "outside a stage" if stage is None else f"by {counted(count, 'part')} of {stage}"
        yield Gap("number", f"{listed}, logged {by} with no tensor kept: step.scalars() has them")


def _catalogue_gaps(
    deps: Dependencies, target: Target, artifacts: Sequence[ArtifactRow], selection: Selection
) -> Iterator[Gap]:
    """Yield the gaps that the catalogue lists: missing ranks, payloads and tensors."""
    step = target.step_number
    replaced = deps.catalogue.replaced(target.attempt_id, step)
    payloads = [
        row
        for row in deps.catalogue.payloads(target.attempt_id, step, limit=ALL_ROWS)
        if selection.has_stage(row["stage"]) and _payload_key(row) not in replaced
    ]
    for each in progress_of(deps, target)[1].missing:
        if selection.has_stage(each["stage"]):
            rank = f"{each['role']} {each['rank']}"
            yield Gap("rank", f"{rank} in {each['stage']}: {each['status']}")
    if (removed := rows_removed(target.step_row)) is not None:
        yield Gap("payload", f"what was lost and which numbers were logged is unknown: {removed}")
    kept = {_payload_key(row) for row in artifacts}
    for row in payloads:
        if row["state"] != "ingested" and _payload_key(row) not in kept:
            sender = f"{row['stage']} {row['role']} {row['rank']}"
            reason = f"{row['state']}, {row['reason']}" if row["reason"] else row["state"]
            yield Gap("payload", f"what {sender} recorded is not there: {reason}")
    yield from _gaps_of_tensors(payloads, artifacts, selection)


def _gaps_of_tensors(
    payloads: Sequence[PayloadRow], artifacts: Sequence[ArtifactRow], selection: Selection
) -> Iterator[Gap]:
    """Yield the recorded tensors that are in no file."""
    kept: dict[PayloadKey, set[str]] = {}
    for file in artifacts:
        tensors = kept.setdefault(_payload_key(file), set())
        tensors |= RECENT_TENSORS if file["tensors"] is None else set(file["tensors"])
    missing: set[tuple[str, str]] = set()
    for row in payloads:
        lacking = set(row["tensors"] or ()) - kept.get(_payload_key(row), set())
        missing |= {(row["stage"], name) for name in lacking}
    by_stage: dict[str, list[str]] = {}
    for stage, name in sorted(missing):
        if selection.names is None or name in selection.names:
            by_stage.setdefault(stage, []).append(name)
    for stage, names in by_stage.items():
        yield Gap("tensor", f"{stage} recorded {', '.join(names)}: not kept")


_CHUNK: Final = 4 << 20


def open_stream(batch: Batch) -> tuple[int, Iterator[bytes]]:
    """Return the bytes of a batch's file, in chunks, and how many they are."""
    buffers = [memoryview(piece) for piece in pieces(batch)]

    def chunks() -> Iterator[bytes]:
        for view in buffers:
            for begin in range(0, view.nbytes, _CHUNK):
                yield bytes(view[begin : begin + _CHUNK])

    return sum(view.nbytes for view in buffers), chunks()
