"""The kept files on one node's disk: written, listed, deleted. No Ray in here."""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, cast

from stagescope_service.core.findings import NOT_KEPT, finding
from stagescope_service.core.instructions import IngestJob, PayloadKey, PayloadWork
from stagescope_service.statistics.payload import Payload
from stagescope_service.store.artifacts import (
    confine,
    file_checksum,
    is_kept_path,
    kept_path,
    step_directory,
)
from stagescope_service.store.contract import Put
from stagescope_service.store.kept import Kept, bytes_of, read_kept, write_kept
from stagescope_service.store.ring import DEFAULT_RESERVE
from stagescope_service.store.tensorfile import WireTensor, disk_errors
from stagescope_wire.errors import Forbidden, StagescopeError, StoreError
from stagescope_wire.keep import kept_sections
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import PART_FIELDS, Part

_OF_TEXTS: Final = "trajectories"
"""The section of texts without a tensor."""
_ORDERS: Final = ("keep", "no_room")


class FileJob(PayloadWork):
    """The work of a kept file, from its own metadata."""

    run: str
    attempt_key: str
    incarnation: str
    seq: int


class KeptDescription(NamedTuple):
    """A kept file: its row of `artifacts`, and the attempt that it names."""

    row: JsonObject
    run: str
    attempt_key: str


class Keeper:
    """Writes the kept files of one node.

    Args:
        data_dir: directory of the attempts' files.
        node_id: this node's id.
        reserve_bytes: left free on the disk for the catalogue and other programs.
    """

    def __init__(self, data_dir: Path, node_id: str, reserve_bytes: int = DEFAULT_RESERVE) -> None:
        self.data_dir = data_dir
        self.node_id = node_id
        self.reserve_bytes = reserve_bytes
        self.not_kept = 0
        """Payloads that could not be kept, since the start."""
        self.reason = ""
        """Why the last one could not be kept; empty if it was kept."""

    def keep(self, key: PayloadKey, job: IngestJob, payload: Payload) -> Iterator[Put]:
        """Keep the requested parts of a payload; yield its row, or the problem."""
        words = frozenset(job.get("keep") or ())
        scalars = job.get("scalars") or {}
        sections = kept_sections(words, job.get("stage"), payload.tensors, scalars)
        if not sections and payload.strings and _OF_TEXTS in words:
            sections = {_OF_TEXTS: []}  # texts alone, such as generations without a score
        if not sections:
            return
        names = {name for held in sections.values() for name in held}
        tensors = {name: t for name, t in payload.tensors.items() if name in names}
        about = plain_job(key, job, "scalars")
        kept = Kept(tensors, sections, dict(scalars), payload.strings, payload.meta, about)
        try:
            row = self._write(key, job, kept)
        except (StagescopeError, OSError, ValueError, TypeError) as error:
            self.not_kept += 1
            self.reason = str(error)
            yield self._refusal(job)
            return
        self.reason = ""
        yield row

    def _write(self, key: PayloadKey, job: IngestJob, kept: Kept) -> Put:
        part = Part.of_columns(job)
        directory = step_directory(
            self.data_dir, job["run"], job["attempt_key"], job["step"], job["stage"], part
        )
        path = kept_path(directory, job["role"], job["rank"], key.incarnation, key.seq)
        self._check_room(bytes_of(kept), job)
        written = write_kept(path, kept)
        return artifact_row(
            key, job, "kept", self.node_id, path, written.bytes,
            checksum=written.checksum, sections=kept.sections, tensors=tensor_specs(kept.tensors),
        )  # fmt: skip

    def _check_room(self, needed: int, job: IngestJob) -> None:
        if no_room := job.get("no_room"):
            raise StoreError(no_room)
        with disk_errors(self.data_dir):
            self.data_dir.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.data_dir).free
        if free < needed + self.reserve_bytes:
            raise StoreError(
                f"the disk of {self.data_dir} has {free} bytes free, and {self.reserve_bytes} must "
                f"stay free: {needed} bytes do not fit"
            )

    def _refusal(self, job: IngestJob) -> Put:
        reported = finding(
            NOT_KEPT,
            f"requested data was not kept: {self.reason}",
            run=job["run"],
            attempt_id=job["attempt_id"],
            wall=time.time(),
            severity="error",
            evidence={"node_id": self.node_id, "not_kept": self.not_kept, "step": job["step"]},
            advice="free space on the disk of data_dir, raise STAGESCOPE_KEPT_BYTES, or unpin "
            "steps. Statistics are complete. The service keeps data again when there is room",
        )
        return Put("findings", {**reported.row, "over_wall": None})


def tensor_specs(tensors: Mapping[str, WireTensor]) -> dict[str, list[Json]]:
    """Return name -> [dtype, shape, rows or None], in the catalogue's form."""
    return {
        name: [tag, list(shape), None if offsets is None else len(offsets) - 1]
        for name, (tag, shape, _, offsets) in tensors.items()
    }


def artifact_row(
    key: PayloadKey,
    job: PayloadWork,
    kind: str,
    node_id: str,
    path: Path,
    size: int,
    **columns: Json,
) -> Put:
    """Return the row of a payload's file on a node, with further `columns`."""
    return Put(
        "artifacts",
        {
            "artifact_id": f"{kind}/{key.incarnation}/{key.seq}",
            **key._asdict(),
            **work_of(job),
            "kind": kind,
            "node_id": node_id,
            "path": str(path),
            "bytes": size,
            "checksum": None,
            "wall": time.time(),
            "deleted_wall": None,
            **columns,
        },
    )


def work_of(job: PayloadWork) -> dict[str, Json]:
    """Return the columns of a payload's rank and work."""
    names = ("attempt_id", "step", "policy_version", "stage", "role", "rank", *PART_FIELDS)
    fields: JsonObject = job
    return {name: fields.get(name) for name in names}


def plain_job(key: PayloadKey, job: IngestJob, *but: str) -> dict[str, Json]:
    """Return a file's own metadata: its run, attempt and work, and the payload's identity."""
    reported = {name: value for name, value in job.items() if name not in (*_ORDERS, *but)}
    return {**reported, **key._asdict()}


_STAGES: Final = ("*/*/step_*/*", "*/*/step_*/*/*")
_UNFINISHED_SECONDS: Final = 3600.0
"""Seconds after which an unfinished file is abandoned."""


def find(data_dir: Path) -> list[str]:
    """Return the kept files below data_dir; files that a crash left unfinished are removed."""
    found = []
    for path in _in_stages(data_dir):
        if path.suffix == ".tmp" and path.name.startswith("."):
            with contextlib.suppress(OSError):
                if time.time() - path.stat().st_mtime > _UNFINISHED_SECONDS:
                    path.unlink()
        elif is_kept_path(path):
            found.append(str(path))
    return found


def _in_stages(data_dir: Path) -> Iterator[Path]:
    for stage in _STAGES:
        for suffix in ("*.safetensors", ".*.tmp"):
            yield from data_dir.glob(f"{stage}/{suffix}")


def describe(paths: Sequence[str], node_id: str) -> list[KeptDescription]:
    """Return the row and the job of each file that can be read."""
    found = []
    for path in map(Path, paths):
        with contextlib.suppress(StagescopeError, OSError, KeyError, TypeError, ValueError):
            found.append(_describe(path, node_id))
    return found


def _describe(path: Path, node_id: str) -> KeptDescription:
    kept = read_kept(path)
    job = _job(kept.job)
    stat = path.stat()
    key = PayloadKey(job["incarnation"], job["seq"])
    put = artifact_row(
        key, job, "kept", node_id, path, stat.st_size,
        wall=stat.st_mtime, checksum=f"sha256:{file_checksum(path)}", sections=kept.sections,
        tensors=tensor_specs(kept.tensors),
    )  # fmt: skip
    return KeptDescription(put.row, job["run"], job["attempt_key"])


def _job(job: JsonObject) -> FileJob:
    """Return a file's own metadata, if it has the right types."""
    texts = ("run", "attempt_key", "role", "stage", "incarnation")
    if not all(isinstance(job[name], str) for name in texts):
        raise TypeError(f"a job of {dict(job)!r:.200}")
    numbers = ("rank", "seq", "step", "policy_version", *PART_FIELDS)
    wrong = [name for name in numbers if type(job.get(name)) not in (int, type(None))]
    if wrong or not isinstance(job["seq"], int):
        raise TypeError(f"a job of {dict(job)!r:.200}")
    return cast("FileJob", dict(job))


def discard(data_dir: Path, paths: Sequence[str]) -> list[str]:
    """Delete kept files and directories that become empty; return the files that are gone."""
    gone = []
    for name in paths:
        with contextlib.suppress(OSError, Forbidden):
            path = confine(name, [data_dir])
            if not is_kept_path(path):
                continue
            path.unlink(missing_ok=True)
            gone.append(name)
            tidy(path.parent, data_dir)
    return gone


def tidy(directory: Path, data_dir: Path) -> None:
    """Remove empty directories, from the stage's part up to the step."""
    with contextlib.suppress(OSError):
        while directory.resolve() != data_dir.resolve():
            directory.rmdir()
            if directory.name.startswith("step_"):
                return
            directory = directory.parent
