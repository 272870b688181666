"""A batch straight from files, in any process: no service, no engine, no catalogue."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope.batch import Batch, Gap
from stagescope.wire.errors import InvalidInput, NotFound
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.joining.join import join
from stagescope_service.dumps.joining.payload_files import PayloadFile, PayloadFiles
from stagescope_service.store.artifacts import file_checksum
from stagescope_service.store.ring import RingKey
from stagescope_service.store.tensorfile import describe_file

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
        path: a batch's file; a service's data_dir, or any directory in it: of a run, an attempt, a
            step, a node's ring; or a dump that another project wrote (see `discover`).
        step: which step; may be left out where there is one.
        run, attempt_key: whose, where the directory holds several; default: the one run there is,
            and its attempt that wrote last.
        names: only these tensors; default: all but parameters and gradients.
        stages: only these.

    Raises:
        NotFound: no such file or directory, or nothing of this step in it; says what there is.
        InvalidInput: several runs or steps, and none was chosen.
        InvalidTensor: a file that is damaged.
    """
    place = Path(path)
    if not place.exists():
        raise NotFound(f"there is no file or directory {place}")
    is_tensors = place.suffix == ".safetensors"
    if is_tensors and "stagescope_batch" in describe_file(place).metadata:
        return Batch.load(place)
    ours = list(_files(place)) if place.is_dir() else [place] * is_tensors
    if not ours:
        return _of_others(place, step, names, stages)
    files = [path for path in ours if step is None or _step_of(path) in (None, str(step))]
    dump = PayloadFiles((PayloadFile(file) for file in files), name=str(place))
    chosen, told, gaps = _choose(dump, run, attempt_key)
    if step is None:
        step = _only_step(dump, chosen)
    of_step = [
        PayloadFile(entry.path, checksum=f"sha256:{file_checksum(entry.path)}")
        for entry in dump.entries
        if entry.path in chosen and entry.place.step == step
    ]
    answering = PayloadFiles(of_step, name=str(place))
    if stepless := sum(entry.place.step is None for entry in dump.entries):
        said = "only a service knows which of their samples a step consumed"
        gaps.append(Gap("payload", f"{stepless} files are of rollouts without a step: {said}"))
    gaps += [Gap("file", f"{problem.path}: {problem.message}") for problem in dump.problems]
    if not of_step:
        there = sorted({found for path in ours if (found := _step_of(path))})
        raise NotFound(
            f"{place} has no kept files of step {step}",
            expected=f"one of {', '.join(there[:8])}" if there else "",
            advice="keep a step by init(keep=...), stagescope capture --keep, or a pin; the ring "
            "holds the last steps only",
        )
    return join(answering, step, names=names, stages=stages, source=told, gaps=gaps)


def _of_others(
    place: Path, step: int | None, names: Collection[str] | None, stages: Collection[str] | None
) -> Batch:
    """Return a step of a dump that another project wrote."""
    dump = open_dump(place, step=step)
    steps = sorted({e.place.step for e in dump.entries if e.place.step is not None})
    if step is None and len(steps) > 1:
        raise _several_steps(dump.name, steps)
    return join(dump, steps[0] if step is None and steps else step, names=names, stages=stages)


def _files(directory: Path) -> Iterator[Path]:
    for path in sorted(directory.rglob("*.safetensors")):
        if not path.name.startswith(".") and path.is_file():
            yield path


def _step_of(path: Path) -> str | None:
    """Return the step that a path names; None where only the file itself knows."""
    try:
        key = RingKey.parse(path.stem)
        return "unknown" if key.step is None else str(key.step)
    except ValueError:
        found = (_STEP.match(parent.name) for parent in path.parents)
        return next((match[1] for match in found if match), None)


def _choose(
    dump: PayloadFiles, run: str | None, attempt_key: str | None
) -> tuple[set[Path], dict[str, Any], list[Gap]]:
    """Return the files of one attempt, whose they are, and what else there is."""
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
    told = {"run": runs[0], "attempt_key": key, **_numbered(jobs, chosen)}
    return chosen, told, gaps if others else []


def _numbered(jobs: Mapping[Path, Mapping[str, Any]], chosen: set[Path]) -> dict[str, Any]:
    ids = {jobs[path].get("attempt_id") for path in chosen} - {None}
    return {"attempt_id": ids.pop()} if len(ids) == 1 else {}


def _only_step(dump: PayloadFiles, chosen: set[Path]) -> int | None:
    found = {entry.place.step for entry in dump.entries if entry.path in chosen}
    steps = sorted(step for step in found if step is not None)
    if len(steps) > 1:
        raise _several_steps(dump.name, steps)
    return steps[0] if steps else None


def _several_steps(name: str, steps: Sequence[int]) -> InvalidInput:
    shown = ", ".join(map(str, steps[:8]))
    return InvalidInput(f"{name} holds {len(steps)} steps", expected=f"step= one of {shown}")
