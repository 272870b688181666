"""NexRL's dump directories: self-hosted, remote API and Weaver.

`{directory}/{type}/step_{N:06d}[_rank{r}[_micro{m}]].{pt,jsonl}`, a dict a file, as NexRL 1.4's
DataDumper writes them (its Weaver service by its documentation). A training without a global step
writes step -1, `step_-00001`.

NexRL's file names have a rank and a microbatch only. In an export of this project
(`nexrl_writer`), `stagescope.json` beside the directories records the place of each file, so that
an export can be compared with its source. NexRL's scripts ignore that file.
"""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal, TypeAlias

from stagescope_service.dumps.formats.columns import (
    Columns,
    RowIds,
    collect_rows,
    flatten,
    name_samples,
)
from stagescope_service.dumps.formats.content import SUFFIXES, read_content
from stagescope_service.dumps.formats.json_lines import read_object_lines
from stagescope_service.dumps.formats.listing import (
    FileDump,
    Format,
    ListedFile,
    file_dump,
    files_of,
    is_companion,
    missing_parts,
    unknown_file,
)
from stagescope_service.dumps.formats.odd_values import (
    NamedRow,
    fitting_rows,
    left_out_problem,
    objects_in,
)
from stagescope_service.dumps.pickles.torch_file import FileTensor, FileValue
from stagescope_service.dumps.records import (
    DumpContents,
    DumpEntry,
    DumpProblem,
    Location,
    mapping,
)
from stagescope_service.store.tensorfile import disk_errors
from stagescope_wire.errors import InvalidInput, InvalidTensor, NotFound
from stagescope_wire.schema import Part

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
"""Types that have a file for each rank and microbatch."""

_NAME: Final = re.compile(r"step_(-?\d{5,18})(?:_rank(\d{1,9})(?:_micro(\d{1,9}))?)?\Z")
_TENSOR_NAMES: Final = {"ref_log_prob": "ref_log_probs", "logprobs": "log_probs"}
_TRAJECTORY_NAMES: Final = {"reward": "rewards", "logprobs": "rollout_log_probs"}
_MASKS: Final = {
    "forward_data": ("response_mask",),
    "old_log_probs": ("response_mask",),
    "is_loss_debug": ("effective_valid", "response_mask"),
    "batch_inputs": ("response_mask", "loss_mask", "attention_mask"),
}
_FILE_FIELDS: Final = ("step", "rank", "micro_idx")
_METADATA: Final = frozenset(
    {"shape", "log_probs_shape", "entropy_shape", "batch_info", "extra_info", "num_trajectories",
     "num_datums", "dtype", "norm", "mean", "std"}
)  # fmt: skip
"""NexRL's metadata about the tensors of the same file."""
OF_JOB: Final = ("policy_version", "data_rank", "layout", "settings")
"""Fields in an export about the process that recorded a file."""
DTYPES: Final = "dtypes"
"""Key in `extra_info` and `batch_info` of exports as JSON: the dtype of each tensor."""
_OF_EXPORTS: Final = ("meta", "job")
"""Metadata of this project in `extra_info` and `batch_info` of its exports."""
_PER_TOKEN: Final = ("tokens", "loss_mask", "logprobs")
"""Values of the tokens of a trajectory, by their names in the file."""
_WHOLE: Final = ("tokens", "loss_mask")
"""Those that are whole numbers."""
_ROW_TEXTS: Final = ("group_id", "run_id", "task_id", "uid")


def place_of_file(name: str) -> tuple[str, Location] | None:
    """Return the type and place in a file's name below the directory; None for other names."""
    kind, _, file = name.rpartition("/")
    stem, dot, suffix = file.rpartition(".")
    match = _NAME.match(stem)
    if match is None or kind not in TYPES or dot + suffix not in SUFFIXES:
        return None
    step, rank, micro = match.groups()
    return kind, Location(
        step=int(step),
        rank=None if rank is None else int(rank),
        part=Part(microbatch=int(micro or 0)),
    )


def _is_nexrl(found: ListedFile) -> bool:
    return place_of_file(_name_of(found)) is not None


def _name_of(found: ListedFile) -> str:
    return "/".join(found.path.parts[-2:])


def open_nexrl(path: Path, step: int | None) -> FileDump:
    """List a directory of NexRL's, or one above it, or a file in it, without reading files."""
    found, problems = files_of(path.absolute())
    nexrl_files = [each for each in found if _is_nexrl(each)]
    roots = {each.path.parent.parent for each in nexrl_files}
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
        recognized = _is_nexrl(each) or is_companion(each, names) or each.path == root / INDEX_NAME
        if below and not recognized:
            problems.append(unknown_file(each, "a NexRL dump"))
    entries, duplicates = _entries_of(nexrl_files)
    index = read_index(root)
    names_of = {entry: "/".join(entry.path.parts[-2:]) for entry in entries}
    entries = [
        dataclasses.replace(entry, location=index.get(name, entry.location))
        for entry, name in names_of.items()
    ]
    chosen = [entry for entry in entries if step in (None, entry.location.step)]
    problems += duplicates
    if index and not path.is_file():
        problems += _missing_indexed(root, index, step)
    elif not path.is_file():
        problems += missing_files(root, chosen)
    return file_dump(path, KIND, chosen, problems, read_entry, step)


def _entries_of(found: Iterable[ListedFile]) -> tuple[list[DumpEntry], list[DumpProblem]]:
    entries: dict[tuple[str, Location], DumpEntry] = {}
    problems: list[DumpProblem] = []
    for each in sorted(found, key=lambda each: SUFFIXES.index(each.path.suffix)):
        key = place_of_file(_name_of(each))
        assert key is not None
        kind, location = key
        if key in entries:
            problems.append(_duplicate(each, entries[key]))
        else:
            entries[key] = DumpEntry(TYPES[kind], location, each.path, each.bytes, kind)
    return list(entries.values()), problems


def _missing_indexed(
    root: Path, index: Mapping[str, Location], step: int | None
) -> list[DumpProblem]:
    return [
        _missing(root / name, name.partition("/")[0], location)
        for name, location in index.items()
        if step in (None, location.step) and not (root / name).exists()
    ]


def _duplicate(found: ListedFile, other: DumpEntry) -> DumpProblem:
    return DumpProblem(
        found.path,
        "superseded",
        f"{found.name} and {other.path.name} are of the same step, rank and microbatch. Only "
        f"{other.path.name} is read",
        other,
    )


def missing_files(root: Path, entries: Iterable[DumpEntry]) -> list[DumpProblem]:
    """Return the files that some ranks and microbatches of a step lack and others have.

    Ranks are numbered from 0, and every rank writes: all ranks below the highest are expected.
    """
    steps: dict[int, dict[str, set[tuple[int, Part]]]] = defaultdict(lambda: defaultdict(set))
    suffixes: dict[str, str] = {}
    for entry in entries:
        location = entry.location
        if location.rank is not None and location.step is not None:
            steps[location.step][entry.key].add((location.rank, location.part))
            suffixes[entry.key] = entry.path.suffix
    problems: list[DumpProblem] = []
    for step, types in steps.items():
        grid = {kind: parts for kind, parts in types.items() if kind in MICRO_TYPES}
        others = [{kind: parts} for kind, parts in types.items() if kind not in MICRO_TYPES]
        for kinds in (grid, *others):
            for kind, (rank, part) in missing_parts(kinds, every_rank=True) if kinds else ():
                name = f"step_{step:06d}_rank{rank}"
                name += f"_micro{part.microbatch}" if kind in MICRO_TYPES else ""
                file = root / kind / (name + suffixes[kind])
                problems.append(_missing(file, kind, Location(step, rank=rank, part=part)))
    return problems


def _missing(path: Path, kind: str, location: Location) -> DumpProblem:
    if kind not in TYPES:
        raise InvalidTensor(f"{path.parent.parent / INDEX_NAME} names {kind}/{path.name}")
    return DumpProblem(
        path,
        "missing",
        f"{kind}/{path.name} does not exist, but the dump has files of other ranks or "
        "microbatches of that step. Look at that rank's log and disk",
        DumpEntry(TYPES[kind], location, path, 0, kind),
    )


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read one file; see `records.Dump.read`."""
    problems: Sequence[DumpProblem] = ()
    data: FileValue
    if entry.path.suffix == ".jsonl":
        lines = read_object_lines(entry.path)
        data, problems = _join_lines([*lines.rows.values()], entry.path), lines.problems(entry)
    else:
        data = read_content(entry.path)
    if not isinstance(data, dict):
        raise InvalidTensor(
            f"{entry.path} holds a {type(data).__name__}", expected="a dict, as NexRL writes it"
        )
    fields = {name: data.pop(name) for name in _FILE_FIELDS if name in data}
    found = Columns(about={"file": fields} if fields else {})
    if entry.path.suffix == ".jsonl":
        found.about["dtypes"] = "not known: JSON has one kind of whole and one of other numbers"
    for name in _METADATA.intersection(data):
        found.add_about(name, data.pop(name))
    record = _READERS.get(entry.key, _read_tensors)(entry, data, found)
    return dataclasses.replace(record, problems=[*problems, *record.problems])


def _join_lines(lines: Sequence[dict[str, FileValue]], path: Path) -> FileValue:
    if len(lines) == 1:
        return lines[0]
    batches = [each for each in lines if "trajectories" in each]
    if len(batches) != len(lines):
        raise InvalidTensor(f"{path} holds {len(lines)} lines", expected="one, as NexRL writes it")
    rows: list[FileValue] = []
    for batch in batches:
        found = batch["trajectories"]
        rows += found if isinstance(found, list) else [found]
    return {**batches[0], "trajectories": rows, "num_trajectories": len(rows)}


def _read_tensors(entry: DumpEntry, data: dict[str, FileValue], found: Columns) -> DumpContents:
    metrics = data.pop("metrics", None)
    if isinstance(metrics, dict):
        data |= flatten(metrics, "metrics/")
    for name, value in data.items():
        found.add(_TENSOR_NAMES.get(name, name), value)
    samples, groups = _row_ids(found, "sample_ids"), _row_ids(found, "group_ids")
    for name in ("extra_info", "batch_info"):
        info = mapping(found.about, name)
        found.about |= {key: info[key] for key in _OF_EXPORTS if isinstance(info.get(key), dict)}
        found.restore_dtypes(mapping(info, DTYPES))
    masks = _MASKS.get(entry.key, ())
    return found.contents(entry, samples=samples, groups=groups, masks=masks)


def _row_ids(found: Columns, name: str) -> RowIds:
    """Return ids in the metadata of this project's exports; NexRL writes none."""
    for place in ("extra_info", "batch_info"):
        names = mapping(found.about, place).get(name)
        if isinstance(names, list) and all(isinstance(each, str) for each in names):
            rows = {wire[1][0] for wire in found.tensors.values() if wire[1]}
            return tuple(names) if rows == {len(names)} else None
    return None


def _read_metrics(entry: DumpEntry, data: dict[str, FileValue], found: Columns) -> DumpContents:
    metrics = data.pop("metrics", None)
    for name, value in flatten(metrics if isinstance(metrics, dict) else {}).items():
        found.add(name, value)
    return found.contents(entry)


def _read_parameter(entry: DumpEntry, data: dict[str, FileValue], found: Columns) -> DumpContents:
    name = str(data.pop("param_name", entry.key))
    found.add(name, data.pop(entry.key, None))
    more = data.pop("more", None)  # of this project's exports: NexRL's files have one parameter
    for other, value in {**data, **(more if isinstance(more, dict) else {})}.items():
        found.add(other, value)
    return found.contents(entry)


def _read_rows(entry: DumpEntry, data: dict[str, FileValue], found: Columns) -> DumpContents:
    is_datums = entry.key == "datums"
    rows = data.pop("datums" if is_datums else "trajectories", None)
    objects, wrong = objects_in(rows if isinstance(rows, list) else [None], "row")
    if not isinstance(rows, list) or (wrong and not objects):
        raise InvalidTensor(f"{entry.path} holds no list of {entry.key}", expected="dicts in it")
    fitted, unfit = fitting_rows(
        [_named_row(name, _flat_row(row)) for name, row in objects],
        per_token=() if is_datums else _PER_TOKEN,
        masks=_WHOLE,
    )
    flat = [row.values for row in fitted]
    problems = left_out_problem(entry, {**wrong, **unfit}, len(rows))
    found.merge(collect_rows(flat, names={} if is_datums else _TRAJECTORY_NAMES))
    for name, value in data.items():
        if not isinstance(value, list) or any(item != [] for item in value):
            found.add(name, value)  # NexRL writes an empty list a row if there are no advantages
    mask = "loss_fn_inputs/loss_mask" if is_datums else "loss_mask"
    groups, samples = name_samples(flat, found)
    return found.contents(
        entry,
        samples=samples,
        groups=groups,
        masks=[mask],
        problems=problems,
        rows=[row.name for row in fitted],
    )


def _named_row(name: str, row: dict[str, FileValue]) -> NamedRow:
    tokens = row.get("tokens")
    length = tokens.wire[2].size if isinstance(tokens, FileTensor) else 0
    length = len(tokens) if isinstance(tokens, list) else length
    return NamedRow(name, row, length)


def _flat_row(row: dict[str, FileValue]) -> dict[str, FileValue]:
    extra = row.get("extra_fields")
    if isinstance(extra, dict):
        row = {**extra, **{name: value for name, value in row.items() if name != "extra_fields"}}
    texts = {name: str(row[name]) for name in _ROW_TEXTS if row.get(name) is not None}
    return flatten({**row, **texts})


_Reader: TypeAlias = Callable[[DumpEntry, dict[str, FileValue], Columns], DumpContents]
_READERS: Final[Mapping[str, _Reader]] = {
    "trajectory": _read_rows,
    "prepared_trajectories": _read_rows,
    "datums": _read_rows,
    "training_metrics": _read_metrics,
    "param": _read_parameter,
    "gradient": _read_parameter,
}


INDEX_NAME: Final = "stagescope.json"
_MAX_INDEX_BYTES: Final = 64 << 20


def write_index(directory: Path, locations: Mapping[str, Location]) -> None:
    """Write the place of each file, by its name below the directory, atomically.

    Raises:
        StoreError: the disk reported an error.
    """
    files = {name: location._asdict() for name, location in sorted(locations.items())}
    path = directory / INDEX_NAME
    with disk_errors(path):
        directory.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{INDEX_NAME}")
        temporary.write_text(json.dumps({"version": 1, "files": files}), encoding="utf-8")
        os.replace(temporary, path)


@dataclasses.dataclass(frozen=True)
class _IndexedPlace:
    step: int | None
    stage: str | None
    role: str | None
    rank: int | None
    part: tuple[int, int, int, int]


@dataclasses.dataclass(frozen=True)
class _Index:
    version: Literal[1]
    files: dict[str, _IndexedPlace]


def read_index(directory: Path) -> dict[str, Location]:
    """Return the places that `write_index` wrote; empty if the directory is not an export.

    Raises:
        InvalidTensor: the file is damaged, or of an unknown version.
        StoreError: the disk reported an error.
    """
    path = directory / INDEX_NAME
    with disk_errors(path):
        if not path.is_file():
            return {}
        if path.stat().st_size > _MAX_INDEX_BYTES:
            most = f"at most {_MAX_INDEX_BYTES} bytes"
            raise InvalidTensor(f"{path} is too large", expected=most)
        text = path.read_bytes()
    import pydantic  # a third of a second that only exports need

    from stagescope_service.refusals import expected_of, name_of

    try:
        found = pydantic.TypeAdapter(_Index).validate_json(text, strict=True)
    except pydantic.ValidationError as error:
        wrong = error.errors()[0]
        raise InvalidTensor(
            f"{path} cannot be read: {name_of(wrong) or 'it'} has another form",
            expected=expected_of(wrong),
            advice="write it again with `stagescope export`",
        ) from error
    return {
        name: Location(place.step, place.stage, place.role, place.rank, Part(*place.part))
        for name, place in found.files.items()
    }


FORMAT: Final = Format(
    KIND,
    "NexRL's (forward_data/step_000000_rank0_micro0.pt)",
    lambda found: any(map(_is_nexrl, found)),
    open_nexrl,
)
