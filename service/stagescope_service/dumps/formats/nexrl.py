"""NexRL's dump directories: self-hosted, remote API and Weaver.

`{directory}/{type}/step_{N:06d}[_rank{r}[_micro{m}]].{pt,jsonl}`, a dict a file, as NexRL 1.4's
DataDumper writes them (its Weaver service by its documentation). A training without a global step
writes step -1, `step_-00001`.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from stagescope.wire.errors import InvalidInput, InvalidTensor, NotFound
from stagescope.wire.schema import Part
from stagescope_service.dumps.formats.columns import Columns, collect_rows, flatten, name_samples
from stagescope_service.dumps.formats.content import SUFFIXES, read_content
from stagescope_service.dumps.formats.listing import (
    FileDump,
    Found,
    entry_order,
    files_of,
    is_companion,
    missing_places,
    unknown,
)
from stagescope_service.dumps.records import Entry, Place, Problem, Record
from stagescope_service.store.tensorfile import disk_errors

KIND: Final = "nexrl"
TYPES: Final[Mapping[str, str]] = {
    "trajectory": "trajectories",
    "prepared_trajectories": "trajectories",
    "batch_inputs": "batch_inputs",
    "old_log_probs": "old_log_probs",
    "forward_data": "forward_data",
    "is_loss_debug": "is_loss",
    "loss": "loss",
    "gradient": "gradients",
    "param": "parameters",
    "datums": "datums",
    "training_metrics": "metrics",
}
"""Subdirectory -> section."""

MICRO_TYPES: Final = ("batch_inputs", "forward_data", "is_loss_debug", "loss")
"""Those that have a file for each rank and microbatch."""

_NAME: Final = re.compile(r"step_(-?\d{5,18})(?:_rank(\d{1,9})(?:_micro(\d{1,9}))?)?\Z")
_TENSOR_NAMES: Final = {"ref_log_prob": "ref_log_probs", "logprobs": "log_probs"}
_TRAJECTORY_NAMES: Final = {"reward": "rewards"}
_MASKS: Final = {
    "forward_data": ("response_mask",),
    "old_log_probs": ("response_mask",),
    "is_loss_debug": ("effective_valid", "response_mask"),
    "batch_inputs": ("response_mask", "loss_mask", "attention_mask"),
}
_FILE_WORDS: Final = ("step", "rank", "micro_idx")
_BESIDE: Final = frozenset(
    {"shape", "log_probs_shape", "entropy_shape", "batch_info", "extra_info", "num_trajectories",
     "num_datums", "dtype", "norm", "mean", "std"}
)  # fmt: skip
"""What NexRL says about tensors that lie in the same file."""
_ROW_TEXTS: Final = ("group_id", "run_id", "task_id", "uid")


def place_of(name: str) -> tuple[str, Place] | None:
    """Return the type and place of a file by its name below the directory; None if it has none."""
    kind, _, file = name.rpartition("/")
    stem, dot, suffix = file.rpartition(".")
    match = _NAME.match(stem)
    if match is None or kind not in TYPES or dot + suffix not in SUFFIXES:
        return None
    step, rank, micro = match.groups()
    return kind, Place(
        step=int(step),
        rank=None if rank is None else int(rank),
        part=Part(microbatch=int(micro or 0)),
    )


def holds_nexrl(found: Sequence[Found]) -> bool:
    """Say whether any of the files is one of NexRL's."""
    return any(_is_nexrl(each) for each in found)


def _is_nexrl(found: Found) -> bool:
    return place_of(_name_of(found)) is not None


def _name_of(found: Found) -> str:
    return "/".join(found.path.parts[-2:])


def open_nexrl(path: Path, *, step: int | None = None) -> FileDump:
    """List a directory of NexRL's; nothing of its files is read.

    Args:
        path: the directory that holds `trajectory/`, `forward_data/`, ..., or one above it, or
            a single file in one of these.
        step: only this step.

    Raises:
        NotFound: no such directory, or none of its files is NexRL's.
        InvalidInput: it holds several of NexRL's dumps.
        TooLarge: more files than a dump has.
        StoreError: the disk refused.
    """
    found, problems = files_of(path.absolute())
    ours = [each for each in found if _is_nexrl(each)]
    roots = {each.path.parent.parent for each in ours}
    if len(roots) > 1:
        raise InvalidInput(
            f"{path} holds {len(roots)} dumps of NexRL's: {', '.join(sorted(map(str, roots))[:5])}",
            expected="the directory of one",
        )
    if not roots:
        raise NotFound(
            f"{path} holds no dump of NexRL's",
            expected=f"{', '.join(TYPES)} with files such as step_000000_rank0_micro0.pt",
        )
    root = roots.pop()
    names = {each.name for each in found}
    for each in found:
        below = each.path.is_relative_to(root)
        known = _is_nexrl(each) or is_companion(each, names) or each.path == root / NAME
        if below and not known:
            problems.append(unknown(each, "a NexRL dump"))
    entries, twice = _entries_of(ours)
    places = read_places(root)
    entries = [_as_it_was(entry, places) for entry in entries]
    chosen = [entry for entry in entries if step in (None, entry.place.step)]
    problems += twice
    if places and not path.is_file():
        problems += _lost(root, places, step)
    elif not path.is_file():
        problems += missing_files(root, chosen)
    return FileDump(str(path), KIND, sorted(chosen, key=entry_order), problems, read_entry)


def _entries_of(found: Iterable[Found]) -> tuple[list[Entry], list[Problem]]:
    entries: dict[tuple[str, Place], Entry] = {}
    problems: list[Problem] = []
    for each in sorted(found, key=lambda each: SUFFIXES.index(each.path.suffix)):
        placed = place_of(_name_of(each))
        assert placed is not None
        kind, place = placed
        entry = Entry(TYPES[kind], place, each.path, each.bytes, kind)
        if placed in entries:
            problems.append(_twice(each, entries[placed]))
        else:
            entries[placed] = entry
    return list(entries.values()), problems


def _as_it_was(entry: Entry, places: Mapping[str, Place]) -> Entry:
    """Return an entry of an export at the place that it had before."""
    place = places.get("/".join(entry.path.parts[-2:]))
    return entry if place is None else dataclasses.replace(entry, place=place)


def _lost(root: Path, places: Mapping[str, Place], step: int | None) -> list[Problem]:
    """Return the files that an export had and that are not there."""
    return [
        _missing(root / name, name.partition("/")[0], place)
        for name, place in places.items()
        if step in (None, place.step) and not (root / name).exists()
    ]


def _twice(found: Found, other: Entry) -> Problem:
    return Problem(
        found.path,
        "superseded",
        f"{found.name} and {other.path.name} are of one place: only {other.path.name} is read",
        other,
    )


def missing_files(root: Path, entries: Iterable[Entry]) -> list[Problem]:
    """Return the files that a step's ranks and microbatches lack where others have them.

    Ranks are numbered from 0, and every rank writes: those below the highest are expected.
    """
    steps: dict[int, dict[str, set[tuple[int, Part]]]] = defaultdict(lambda: defaultdict(set))
    suffixes: dict[str, str] = {}
    for entry in entries:
        place = entry.place
        if place.rank is not None and place.step is not None:
            steps[place.step][entry.key].add((place.rank, place.part))
            suffixes[entry.key] = entry.path.suffix
    problems: list[Problem] = []
    for step, types in steps.items():
        grid = {kind: places for kind, places in types.items() if kind in MICRO_TYPES}
        others = [{kind: places} for kind, places in types.items() if kind not in MICRO_TYPES]
        for kinds in (grid, *others):
            for kind, (rank, part) in missing_places(kinds, every_rank=True) if kinds else ():
                name = f"step_{step:06d}_rank{rank}"
                name += f"_micro{part.microbatch}" if kind in MICRO_TYPES else ""
                file = root / kind / (name + suffixes[kind])
                problems.append(_missing(file, kind, Place(step, rank=rank, part=part)))
    return problems


def _missing(path: Path, kind: str, place: Place) -> Problem:
    if kind not in TYPES:
        raise InvalidTensor(f"{path.parent.parent / NAME} names {kind}/{path.name}")
    return Problem(
        path,
        "missing",
        f"{kind}/{path.name} is not there, though the dump has files of other ranks or "
        "microbatches of that step: look at that rank's log and disk",
        Entry(TYPES[kind], place, path, 0, kind),
    )


def read_entry(entry: Entry) -> Record:
    """Read one file; see `records.Dump.read`."""
    data = read_content(entry.path)
    if entry.path.suffix == ".jsonl":
        data = _joined(data, entry.path)
    if not isinstance(data, dict):
        raise InvalidTensor(
            f"{entry.path} holds a {type(data).__name__}", expected="a dict, as NexRL writes it"
        )
    words = {name: data.pop(name) for name in _FILE_WORDS if name in data}
    found = Columns(about={"file": words} if words else {})
    if entry.path.suffix == ".jsonl":
        found.about["dtypes"] = "not known: JSON has one kind of whole and one of other numbers"
    for name in _BESIDE.intersection(data):
        found.add_about(name, data.pop(name))
    return _READERS.get(entry.key, _read_tensors)(entry, data, found)


def _joined(lines: list[Any], path: Path) -> Any:
    if len(lines) == 1:
        return lines[0]
    if not lines or not all(isinstance(each, dict) and "trajectories" in each for each in lines):
        raise InvalidTensor(f"{path} holds {len(lines)} lines", expected="one, as NexRL writes it")
    rows = [row for line in lines for row in line["trajectories"]]
    return {**lines[0], "trajectories": rows, "num_trajectories": len(rows)}


def _read_tensors(entry: Entry, data: dict[str, Any], found: Columns) -> Record:
    metrics = data.pop("metrics", None)
    if isinstance(metrics, dict):
        data |= flatten(metrics, "metrics/")
    for name, value in data.items():
        found.add(_TENSOR_NAMES.get(name, name), value)
    masks = _MASKS.get(entry.key, ())
    mask = next((name for name in masks if name in found.tensors), None)
    samples = _said_samples(found)
    return Record(entry, found.tensors, found.numbers, samples, mask=mask, about=found.remarks())


def _said_samples(found: Columns) -> tuple[str, ...] | None:
    """Return the sample_uids that our own export says beside the rows; NexRL says none."""
    for name in ("extra_info", "batch_info"):
        said = found.about.get(name)
        names = said.get("sample_ids") if isinstance(said, dict) else None
        if isinstance(names, list) and all(isinstance(each, str) for each in names):
            rows = {wire[1][0] for wire in found.tensors.values() if wire[1]}
            return tuple(names) if rows == {len(names)} else None
    return None


def _read_metrics(entry: Entry, data: dict[str, Any], found: Columns) -> Record:
    metrics = data.pop("metrics", None)
    for name, value in flatten(metrics if isinstance(metrics, dict) else {}).items():
        found.add(name, value)
    return Record(entry, found.tensors, found.numbers, about=found.remarks())


def _read_parameter(entry: Entry, data: dict[str, Any], found: Columns) -> Record:
    name = str(data.pop("param_name", entry.key))
    found.add(name, data.pop(entry.key, None))
    more = data.pop("more", None)  # of our own export: NexRL's files have one
    for other, value in {**data, **(more if isinstance(more, dict) else {})}.items():
        found.add(other, value)
    return Record(entry, found.tensors, found.numbers, about=found.remarks())


def _read_rows(entry: Entry, data: dict[str, Any], found: Columns) -> Record:
    is_datums = entry.key == "datums"
    rows = data.pop("datums" if is_datums else "trajectories", None)
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise InvalidTensor(f"{entry.path} holds no list of {entry.key}", expected="dicts in it")
    flat = [_flat_row(row) for row in rows]
    found.join(collect_rows(flat, names={} if is_datums else _TRAJECTORY_NAMES))
    for name, value in data.items():
        if not isinstance(value, list) or any(item != [] for item in value):
            found.add(name, value)  # NexRL writes an empty list a row where it has no advantages
    mask = "loss_fn_inputs/loss_mask" if is_datums else "loss_mask"
    groups, samples = name_samples(flat, found)
    return Record(
        entry, found.tensors, found.numbers, samples, groups, found.texts,
        mask if mask in found.tensors else None, found.remarks(),
    )  # fmt: skip


def _flat_row(row: dict[str, Any]) -> dict[str, Any]:
    extra = row.get("extra_fields")
    if isinstance(extra, dict):
        row = {**extra, **{name: value for name, value in row.items() if name != "extra_fields"}}
    texts = {name: str(row[name]) for name in _ROW_TEXTS if row.get(name) is not None}
    return flatten({**row, **texts})


_Reader = Callable[[Entry, dict[str, Any], Columns], Record]
_READERS: Final[Mapping[str, _Reader]] = {
    "trajectory": _read_rows,
    "prepared_trajectories": _read_rows,
    "datums": _read_rows,
    "training_metrics": _read_metrics,
    "param": _read_parameter,
    "gradient": _read_parameter,
}


NAME: Final = "stagescope.json"
_VERSION: Final = 1
_MOST_BYTES: Final = 64 << 20


def write_places(directory: Path, places: Mapping[str, Place]) -> None:
    """Write what each file is, by its name below the directory, whole or not at all.

    Raises:
        StoreError: the disk refused.
    """
    files = {
        name: {"step": place.step, "stage": place.stage, "role": place.role, "rank": place.rank,
               "part": [*_numbers(place.part)]}
        for name, place in sorted(places.items())
    }  # fmt: skip
    path = directory / NAME
    with disk_errors(path):
        directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{NAME}")
        temporary.write_text(json.dumps({"version": _VERSION, "files": files}), encoding="utf-8")
        os.replace(temporary, path)


def read_places(directory: Path) -> dict[str, Place]:
    """Return what `write_places` wrote; nothing where the directory is no export.

    Raises:
        InvalidTensor: the file is damaged, or of a version that is not known.
        StoreError: the disk refused.
    """
    path = directory / NAME
    with disk_errors(path):
        if not path.is_file():
            return {}
        if path.stat().st_size > _MOST_BYTES:
            raise InvalidTensor(f"{path} is too large", expected=f"at most {_MOST_BYTES} bytes")
        text = path.read_bytes()
    try:
        said = json.loads(text)
        if said["version"] != _VERSION:
            raise InvalidTensor(f"{path} has version {said['version']!r}", expected=str(_VERSION))
        return {str(name): _place(about) for name, about in said["files"].items()}
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidTensor(f"{path} cannot be read: {error!r:.200}") from error


def _place(said: Mapping[str, Any]) -> Place:
    numbers = [said["step"], said["rank"], *said["part"]]
    texts = [said["stage"], said["role"]]
    if len(said["part"]) != 4 or not all(type(each) is int for each in said["part"]):
        raise ValueError(f"part {said['part']!r}")
    if not all(each is None or type(each) is int for each in numbers):
        raise ValueError(f"numbers {numbers!r}")
    if not all(each is None or isinstance(each, str) for each in texts):
        raise ValueError(f"names {texts!r}")
    stage, role = texts
    return Place(said["step"], stage, role, said["rank"], Part(*said["part"]))


def _numbers(part: Part) -> tuple[int, int, int, int]:
    return part.occurrence, part.epoch, part.minibatch, part.microbatch
