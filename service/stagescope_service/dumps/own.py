"""This project's own files: what captures, configuration and the ring kept of payloads.

`{run}/{attempt key}/step_N/{stage}[/part]/{role}_rank{r}_{identity}_{seq}.safetensors`, one file a
payload, or the files that the catalogue lists. A payload's tensors are split into sections by
their names, one entry a section; the mask goes with each section that has tokens.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from stagescope import nonfinite
from stagescope.errors import InvalidInput, NotFound, StagescopeError
from stagescope.schema import PART_FIELDS, Part
from stagescope_service.dumps.columns import Columns, number_of, unique_samples
from stagescope_service.dumps.listing import (
    FileDump,
    Found,
    entry_order,
    files_of,
    missing_places,
    unknown,
)
from stagescope_service.dumps.msprobe_directory import operator_files
from stagescope_service.dumps.records import Entry, Place, Problem, Record
from stagescope_service.store.tensorfile import (
    Description,
    WireTensor,
    describe_file,
    map_tensors,
)

KIND: Final = "own"

_IS_LOSS: Final = ("prob_ratio", "elementwise_loss", "effective_valid")
SECTION_OF: Final[Mapping[str, str]] = {
    **dict.fromkeys(
        ("tokens", "prompts", "responses", "response_mask", "loss_mask", "rollout_log_probs",
         "rewards", "versions", "positions", "round_ids", "turn_ids", "token_offset",
         "round_offset"),
        "trajectories",
    ),
    **dict.fromkeys(("input_ids", "attention_mask", "position_ids"), "batch_inputs"),
    **dict.fromkeys(
        ("old_log_probs", "ref_log_probs", "ref_log_prob", "recomputed_log_probs"),
        "old_log_probs",
    ),
    **dict.fromkeys(("log_probs", "entropy"), "forward_data"),
    **dict.fromkeys(("values", "advantages", "returns"), "advantages"),
    **dict.fromkeys(_IS_LOSS, "is_loss"),
}  # fmt: skip
"""Name of a tensor -> section, of those that are told by their names alone."""

_WITH_IS_LOSS: Final = ("log_probs", "old_log_probs", "advantages")
"""They belong to the loss where its intermediates are in the same payload."""
_FAMILIES: Final = {
    "gradient": "gradients", "parameter": "parameters", "datum": "datums", "metric": "metrics",
}  # fmt: skip
_LOSSES: Final = frozenset({"loss", "kl", "grad_norm", "clip_fraction"})
"""Numbers of the section `loss`, beside every `..._loss`."""
_MASKS: Final = ("response_mask", "loss_mask")
_CU_SEQLENS: Final = "cu_seqlens"
_RENAMED: Final = {"ref_log_prob": "ref_log_probs"}
_OFFSETS: Final = ".row_offsets"
_FILE: Final = re.compile(r"(.{1,150})_rank(\d{1,9})_[0-9a-f]{12}_\d+\Z")
_STEP: Final = re.compile(r"step_(\d{1,18}|unknown)\Z")
_PART: Final = re.compile(r"(\d+)\.(\d+)\.(\d+)\.(\d+)\Z")


def is_own(name: str) -> bool:
    """Say whether a file's name is one of ours."""
    return name.endswith(".safetensors") and _FILE.match(Path(name).stem) is not None


def holds_own(found: Sequence[Found]) -> bool:
    """Say whether any of the files is one of ours."""
    return any(is_own(each.name) for each in found)


def open_own(path: Path, *, step: int | None = None) -> FileDump:
    """List a directory of kept files, at any height from a stage's to a run's; reads headers only.

    Args:
        path: the directory, or one file.
        step: only this step.

    Raises:
        NotFound: no such directory, or no kept file in it.
        InvalidInput: it holds several runs or attempts.
        TooLarge: more files than a dump has.
        StoreError: the disk refused.
    """
    found, problems = files_of(path)
    ours = [each for each in found if is_own(each.name)]
    known = {each.name for each in ours} | operator_files(each.name for each in found)
    problems += [unknown(each, "this project's dumps") for each in found if each.name not in known]
    if not ours:
        raise NotFound(f"{path} holds no kept tensors", expected="*.safetensors of a run's steps")
    places = ((each.path, place_in(each.path)) for each in ours)
    dump = open_files(str(path), [each for each in places if step in (None, each[1].step)])
    attempts = dump.about.get("attempts", [])
    if len(attempts) > 1:
        raise InvalidInput(
            f"{path} holds {len(attempts)} attempts: {', '.join(attempts[:5])}",
            expected="the directory of one attempt",
        )
    problems += [*dump.problems, *_missing(dump.entries)]
    return dataclasses.replace(dump, problems=problems)


def open_files(name: str, files: Iterable[tuple[Path, Place]]) -> FileDump:
    """Make a dump of files that are known, as the catalogue lists them; reads headers only.

    Args:
        name: of the dump, such as `run@attempt:step`.
        files: each with its place; what a file itself says of its place fills what is unknown.
            Of two files of one place the later written is read.
    """
    entries: dict[tuple[str, Place], Entry] = {}
    problems: list[Problem] = []
    attempts: dict[str, None] = {}
    for path, place in sorted(files, key=lambda file: _written(file[0])):
        try:
            description = describe_file(path)
        except StagescopeError as error:
            problems.append(_problem(path, place, error))
            continue
        job = _mapping(description.metadata, "job")
        if job.get("run") is not None:
            attempts[f"{job['run']}@{job.get('attempt_key')}"] = None
        place = _completed(place, job)
        for section in _sections(description):
            entry = Entry(section, place, path, path.stat().st_size, section)
            older = entries.get((section, place))
            if older is not None:
                problems.append(_superseded(older, entry))
            entries[section, place] = entry
    about = {"attempts": [*attempts]} if attempts else {}
    found = sorted(entries.values(), key=entry_order)
    return FileDump(name, KIND, found, problems, read_entry, about)


def place_in(path: Path) -> Place:
    """Return what the path of a kept file says of its place; see `store.artifacts`."""
    match = _FILE.match(path.stem)
    role, rank = (match[1], int(match[2])) if match else (None, None)
    step, stage, part = None, None, Part()
    names = path.parts[:-1]
    for at, name in enumerate(names):
        if found := _STEP.match(name):
            step = None if found[1] == "unknown" else int(found[1])
            stage = names[at + 1] if at + 1 < len(names) else None
    if names and (numbers := _PART.match(names[-1])):
        part = Part(*map(int, numbers.groups()))
    return Place(step, stage, role, rank, part)


def read_entry(entry: Entry) -> Record:
    """Read one section of one file; see `records.Dump.read`."""
    file = map_tensors(entry.path)
    tensors = _packed(file.tensors)
    meta = _mapping(file.metadata, "meta")
    sections = _split({name: wire[1] for name, wire in tensors.items()}, meta)
    names, numbers = sections.get(entry.key, ([], []))
    job = _mapping(file.metadata, "job")
    found = Columns(about={"job": dict(job)} if job else {})
    for name in names:
        tag, shape, values, _ = tensors[name]
        if shape == ():
            found.numbers[_name(name)] = number_of(tag, values)
        else:
            found.tensors[_name(name)] = tensors[name]
    found.numbers |= {name: nonfinite.number(meta[name]) for name in numbers}
    mask = _mask_of(entry.section, names, tensors)
    if mask is not None:
        found.tensors[mask] = tensors[mask]
    found.about |= {n: value for n, value in meta.items() if not _is_loss(n, value)}
    samples, groups = _strings(file.metadata, found)
    return Record(entry, found.tensors, found.numbers, samples, groups, {}, mask, found.remarks())


def _written(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except OSError:
        return 0.0


def _mapping(metadata: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = metadata.get(name)
    return found if isinstance(found, dict) else {}


def _completed(place: Place, job: Mapping[str, Any]) -> Place:
    """Fill what is unknown of a place by what the file says."""

    def said(name: str, kind: type) -> Any:
        value = job.get(name)
        return value if type(value) is kind else None

    numbers = [job.get(name) or 0 for name in PART_FIELDS]
    whole = all(type(number) is int and number >= 0 for number in numbers)
    return Place(
        step=said("step", int) if place.step is None else place.step,
        stage=place.stage or said("stage", str),
        role=place.role or said("role", str),
        rank=said("rank", int) if place.rank is None else place.rank,
        part=Part(*numbers) if place.part == Part() and whole else place.part,
    )


def _is_loss(name: str, value: Any) -> bool:
    value = nonfinite.number(value)
    is_number = isinstance(value, float | int) and not isinstance(value, bool)
    return is_number and (name in _LOSSES or name.endswith("_loss"))


def _section(name: str, names: Container[str]) -> str:
    if name in _WITH_IS_LOSS and any(other in names for other in _IS_LOSS):
        return "is_loss"
    if "/" in name and (family := name.partition("/")[0].partition(".")[0]) in _FAMILIES:
        return _FAMILIES[family]
    return SECTION_OF.get(name, "loss" if name in _LOSSES or name.endswith("_loss") else "other")


def _split(
    shapes: Mapping[str, tuple[int, ...]], meta: Mapping[str, Any]
) -> dict[str, tuple[list[str], list[str]]]:
    """Return section -> names of its tensors, names of its numbers in the metadata."""
    found: dict[str, tuple[list[str], list[str]]] = {}
    for name in shapes:
        found.setdefault(_section(name, shapes), ([], []))[0].append(name)
    losses = [name for name, value in meta.items() if _is_loss(name, value)]
    if losses:
        found.setdefault("loss", ([], []))[1].extend(losses)
    return found


def _sections(description: Description) -> list[str]:
    shapes = {name: shape for name, (_, shape) in description.shapes.items()}
    companions = {name + _OFFSETS for name in shapes} | {_CU_SEQLENS}
    shapes = {name: shape for name, shape in shapes.items() if name not in companions}
    return list(_split(shapes, _mapping(description.metadata, "meta")))


def _packed(tensors: Mapping[str, WireTensor]) -> dict[str, WireTensor]:
    """Give the tensors of a packed payload the row offsets that `cu_seqlens` tells."""
    found = dict(tensors)
    offsets = found.pop(_CU_SEQLENS, None)
    if offsets is None or offsets[2].size == 0:
        return found
    rows = offsets[2].reshape(-1).astype(np.int64)
    for name, (tag, shape, values, own) in found.items():
        if own is None and shape == (int(rows[-1]),):
            found[name] = (tag, shape, values, rows)
    return found


def _name(name: str) -> str:
    """Return the name in the record: of a parameter its own, `#n` from the second update on."""
    family, slash, rest = name.partition("/")
    family, _, number = family.partition(".")
    if not slash or family not in _FAMILIES:
        return _RENAMED.get(name, name)
    return f"{rest}#{number}" if number else rest


def _mask_of(section: str, names: list[str], tensors: Mapping[str, WireTensor]) -> str | None:
    masks = ("effective_valid", *_MASKS) if section == "is_loss" else _MASKS
    if section in ("gradients", "parameters", "loss", "metrics"):
        return None
    shapes = {tensors[name][1] for name in names}
    return next((m for m in masks if m in tensors and tensors[m][1] in shapes), None)


def _strings(
    metadata: Mapping[str, Any], found: Columns
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    strings = _mapping(metadata, "strings")
    ids, groups = strings.get("sample_ids"), strings.get("group_ids")
    samples = unique_samples(list(map(str, ids)), found) if isinstance(ids, list) else None
    return samples, tuple(map(str, groups)) if isinstance(groups, list) else None


def _problem(path: Path, place: Place, error: StagescopeError) -> Problem:
    kind = "missing" if isinstance(error, NotFound) else "damaged"
    return Problem(path, kind, str(error), Entry("other", place, path))


def _superseded(older: Entry, newer: Entry) -> Problem:
    return Problem(
        older.path,
        "superseded",
        f"{older.path.name} and {newer.path.name} are both of {newer.place}: the later written, "
        f"{newer.path.name}, is read",
        older,
    )


def _missing(entries: Iterable[Entry]) -> list[Problem]:
    kinds: dict[tuple[Any, ...], dict[str, dict[tuple[int, Part], Entry]]] = {}
    for entry in entries:
        place = entry.place
        if place.rank is not None:
            work = (place.step, place.stage, place.role)
            of_section = kinds.setdefault(work, {}).setdefault(entry.section, {})
            of_section[place.rank, place.part] = entry
    problems: list[Problem] = []
    for sections in kinds.values():
        seen = {section: set(places) for section, places in sections.items()}
        for section, (rank, part) in missing_places(seen):
            like = next(iter(sections[section].values()))
            place = like.place._replace(rank=rank, part=part)
            path = like.path.with_name(f"{place.role}_rank{rank}")
            entry = Entry(section, place, path, 0, section)
            problems.append(Problem(path, "missing", f"{place} has no {section} here", entry))
    return problems
