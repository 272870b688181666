"""Reads a batch from files alone, in any process: without a service and without a catalogue."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Final

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.own_file import PayloadFile, PayloadFiles
from stagescope_service.dumps.joining.join import Selection, join
from stagescope_service.store.artifacts import file_checksum
from stagescope_service.store.ring import RingKey
from stagescope_service.store.tensorfile import describe_file
from stagescope_wire.batch import Batch, Gap
from stagescope_wire.errors import InvalidInput, NotFound

_STEP: Final = re.compile(r"step_(-?\d+|unknown)\Z")


def read_batch(
    path: str | Path,
    step: int | None = None,
    *,
    run: str | None = None,
    attempt_key: str | None = None,
    names: Collection[str] | None = None,
    stages: Collection[str] | None = None,
) -> Batch:
    """Return one step as a batch, from files alone.

    Args:
        path: a batch's file, a service's data_dir, a directory in it (of a run, an attempt, a step,
            a node's ring), or a dump of another project (see `discover`).
        step: which step; optional if there is only one.
        run, attempt_key: which ones, if the directory holds several; default: the only run, and
            its attempt that wrote last.
        names: only these tensors; default: all but parameters and gradients.
        stages: only these.

    Raises:
        NotFound: no such file or directory, or nothing of this step in it; lists what there is.
        InvalidInput: several runs or steps, and none was selected.
        InvalidTensor: a file that is damaged.
    """
    source = Path(path)
    if not source.exists():
        raise NotFound(f"there is no file or directory {source}")
    is_tensors = source.suffix == ".safetensors"
    if is_tensors and "stagescope_batch" in describe_file(source).metadata:
        return Batch.load(source)
    kept = list(_files(source)) if source.is_dir() else [source] * is_tensors
    if not kept:
        return _read_foreign(source, step, names, stages)
    files = [path for path in kept if step is None or _step_of(path) in (None, str(step))]
    dump = PayloadFiles((PayloadFile(file) for file in files), name=str(source))
    chosen, attempt, gaps = _select_attempt(dump, run, attempt_key)
    if step is None:
        step = _only_step(dump, chosen)
    of_step = [
        PayloadFile(entry.path, checksum=f"sha256:{file_checksum(entry.path)}")
        for entry in dump.entries
        if entry.path in chosen and entry.location.step == step
    ]
    selected = PayloadFiles(of_step, name=str(source))
    if stepless := sum(entry.location.step is None for entry in dump.entries):
        reason = "only a service knows which of their samples a step consumed"
        gaps.append(Gap("payload", f"{stepless} files are of rollouts without a step: {reason}"))
    gaps += [Gap("file", f"{problem.path}: {problem.message}") for problem in dump.problems]
    if not of_step:
        there = sorted({found for path in kept if (found := _step_of(path))})
        raise NotFound(
            f"{source} has no kept files of step {step}",
            expected=f"one of {', '.join(there[:8])}" if there else "",
            advice="keep a step by init(keep=...), stagescope capture --keep, or a pin; the ring "
            "holds the last steps only",
        )
    return join(selected, step, Selection(names, stages), source=attempt, gaps=gaps)


def _read_foreign(
    path: Path, step: int | None, names: Collection[str] | None, stages: Collection[str] | None
) -> Batch:
    """Return a step of a dump that another project wrote."""
    dump = open_dump(path, step=step)
    steps = sorted({e.location.step for e in dump.entries if e.location.step is not None})
    if step is None and len(steps) > 1:
        raise _several_steps(dump.name, steps)
    only = steps[0] if step is None and steps else step
    return join(dump, only, Selection(names, stages))


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*.safetensors")):
        if not path.name.startswith(".") and path.is_file():
            yield path


def _step_of(path: Path) -> str | None:
    """Return the step that a path names; None if only the file's metadata have it."""
    try:
        key = RingKey.parse(path.stem)
        return "unknown" if key.step is None else str(key.step)
    except ValueError:
        found = (_STEP.match(parent.name) for parent in path.parents)
        return next((match[1] for match in found if match), None)


def _select_attempt(
    dump: PayloadFiles, run: str | None, attempt_key: str | None
) -> tuple[set[Path], dict[str, object], list[Gap]]:
    """Return the files of one attempt, its identity, and a gap that names the other attempts."""
    jobs = {
        path: job
        for path, job in dump.jobs.items()
        if run in (None, job.get("run")) and attempt_key in (None, job.get("attempt_key"))
    }
    runs = sorted({str(job.get("run")) for job in jobs.values()})
    if len(runs) > 1:
        raise InvalidInput(f"{dump.name} holds {len(runs)} runs", expected=f"run= one of {runs}")
    newest: dict[str, float] = {}
    for path, job in jobs.items():
        key = str(job.get("attempt_key"))
        newest[key] = max(newest.get(key, 0.0), path.stat().st_mtime)
    if not newest:
        return set(), {"run": run, "attempt_key": attempt_key}, []
    key = max(newest, key=lambda key: newest[key])
    others = sorted(set(newest) - {key})
    gaps = [Gap("attempt", f"attempt {key} answers; there are {', '.join(others)}")]
    chosen = {path for path, job in jobs.items() if str(job.get("attempt_key")) == key}
    attempt: dict[str, object] = {"run": runs[0], "attempt_key": key}
    ids = {jobs[path].get("attempt_id") for path in chosen} - {None}
    if len(ids) == 1:
        attempt["attempt_id"] = ids.pop()
    return chosen, attempt, gaps if others else []


def _only_step(dump: PayloadFiles, chosen: set[Path]) -> int | None:
    found = {entry.location.step for entry in dump.entries if entry.path in chosen}
    steps = sorted(step for step in found if step is not None)
    if len(steps) > 1:
        raise _several_steps(dump.name, steps)
    return steps[0] if steps else None


def _several_steps(name: str, steps: Sequence[int]) -> InvalidInput:
    shown = ", ".join(map(str, steps[:8]))
    return InvalidInput(f"{name} holds {len(steps)} steps", expected=f"step= one of {shown}")
