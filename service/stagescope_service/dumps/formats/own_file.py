"""One of this project's own files, read: a section of it, or the whole as it was handed over.

`store.kept` says what its metadata hold; files of the ring have no `sections` and are read alike.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping
from typing import Any, Final

import numpy as np

from stagescope.wire import nonfinite
from stagescope.wire.errors import InvalidTensor
from stagescope.wire.keep import family, sections_of
from stagescope.wire.schema import PART_FIELDS, Part
from stagescope_service.dumps.formats.columns import Columns, number_of, unique_samples
from stagescope_service.dumps.records import SECTIONS, Entry, Place, Record
from stagescope_service.store.tensorfile import WireTensor, map_tensors

ROW_OFFSETS: Final = ".row_offsets"

_RENAMED: Final = {"ref_log_prob": "ref_log_probs"}
_MASKS: Final = ("response_mask", "loss_mask")
OF_ROWS: Final = (
    "trajectories", "batch_inputs", "old_log_probs", "forward_data", "advantages", "is_loss",
    "other",
)  # fmt: skip
_FAMILIES: Final = ("parameter/*", "gradient/*", "datums/*")
_IDS: Final = ("sample_ids", "group_ids")
_CU_SEQLENS: Final = "cu_seqlens"


def read_section(entry: Entry) -> Record:
    """Read one section of one file; see `records.Dump.read`."""
    file = map_tensors(entry.path)
    tensors, metadata = _packed(file.tensors), file.metadata
    sections = sections_in(metadata, tensors)
    names = sections.get(entry.section, [])
    scalars = mapping(metadata, "scalars")
    found = Columns(about=_about(metadata))
    for name in names:
        if name in scalars:
            found.numbers[name] = nonfinite.number(scalars[name])
        elif name in tensors and tensors[name][1] == ():
            found.numbers[name_in_record(name)] = number_of(tensors[name][0], tensors[name][2])
        elif name in tensors:
            found.tensors[name_in_record(name)] = tensors[name]
    samples, groups = None, None
    if entry.section in OF_ROWS:
        samples, groups = _ids(metadata, found)
    return Record(
        entry, found.tensors, found.numbers, samples, groups,
        _texts(metadata, entry.section, sections), mask_in(entry.section, found.tensors),
        found.remarks(),
    )  # fmt: skip


def read_whole(entry: Entry) -> Record:
    """Read a whole file: every tensor under the name with which it was handed over.

    `about` has `meta`, `job` and `settings` as they were said; see `records.Dump.read`.
    """
    file = map_tensors(entry.path)
    said, job = file.metadata, mapping(file.metadata, "job")
    strings = _strings(said)
    scalars = nonfinite.numbers(mapping(said, "scalars"))
    return Record(
        entry,
        file.tensors,
        numbers={name: v for name, v in scalars.items() if type(v) in (int, float)},
        samples=strings.pop("sample_ids", None),
        groups=strings.pop("group_ids", None),
        row_texts=strings,
        mask="response_mask" if "response_mask" in file.tensors else None,
        about={
            "meta": mapping(said, "meta"),
            "settings": mapping(said, "settings") or mapping(job, "settings"),
            "job": job,
        },
    )


def place_of(job: object) -> Place:
    """Return where a file says that it was made.

    Raises:
        InvalidTensor: it does not say it.
    """
    if not isinstance(job, Mapping):
        raise InvalidTensor("it does not say of which work it is")
    counts = [job.get(name) or 0 for name in PART_FIELDS]
    numbers = ("step", "rank", "data_rank", "attempt_id", "seq")
    whole = [*counts, *(job.get(name) for name in numbers)]
    texts = [job.get(name) for name in ("stage", "role", "incarnation")]
    if any(type(number) not in (int, type(None)) for number in whole) or any(
        not isinstance(text, str | None) for text in texts
    ):
        raise InvalidTensor(
            f"it says {str(dict(job))[:200]} of its work", expected="names and ints"
        )
    return Place(job.get("step"), texts[0], texts[1], job.get("rank"), Part(*counts))


def completed(place: Place, job: Mapping[str, Any]) -> Place:
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


def sections_in(metadata: Mapping[str, Any], names: Iterable[str]) -> dict[str, list[str]]:
    """Return section -> names of tensors and numbers, as the file says it, else by its stage."""
    said = metadata.get("sections")
    if isinstance(said, dict) and all(isinstance(held, list) for held in said.values()):
        return {str(n): [*map(str, held)] for n, held in said.items() if n in SECTIONS}
    stage = mapping(metadata, "job").get("stage")
    return sections_of(stage, names, mapping(metadata, "scalars"))


def _about(metadata: Mapping[str, Any]) -> dict[str, Any]:
    meta, job = dict(mapping(metadata, "meta")), dict(mapping(metadata, "job"))
    shards = {
        name_in_record(name): {"global_shape": place.get("shape"), "offset": place.get("offset")}
        for name, place in mapping(meta, "shards").items()
        if isinstance(place, dict)
    }
    said = {"meta": meta, "job": job, "shards": shards}
    return {name: value for name, value in said.items() if value}


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


def mask_in(section: str, names: Container[str]) -> str | None:
    """Return which of some tensors is the mask of a section's."""
    masks = ("effective_valid", *_MASKS) if section == "is_loss" else _MASKS
    return next((mask for mask in masks if mask in names), None)


def name_in_record(name: str) -> str:
    """Return the name in the record: of a parameter its own, `#n` from the second update on."""
    first, slash, rest = name.partition("/")
    if not slash or family(name) not in _FAMILIES:
        return _RENAMED.get(name, name)
    if first == "datums":
        return rest.replace(".", "/")
    number = first.partition(".")[2]
    return f"{rest}#{number}" if number else rest


def _ids(
    metadata: Mapping[str, Any], found: Columns
) -> tuple[tuple[str, ...] | None, tuple[str, ...] | None]:
    ids, groups = (_strings(metadata).get(name) for name in _IDS)
    return None if ids is None else unique_samples(ids, found), groups


def _texts(
    metadata: Mapping[str, Any], section: str, sections: Iterable[str]
) -> dict[str, tuple[str, ...]]:
    """Return the texts of rows: datums have theirs, the first section of rows all others."""
    first = next((each for each in sections if each in OF_ROWS), None)
    found: dict[str, tuple[str, ...]] = {}
    for name, texts in _strings(metadata).items():
        of_datums = name.startswith("datums/")
        mine = section == "datums" if of_datums else section == first
        if mine and name not in _IDS:
            found[name_in_record(name)] = texts
    return found


def mapping(metadata: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return what metadata say under a name; nothing where that is no mapping."""
    found = metadata.get(name)
    return found if isinstance(found, dict) else {}


def _strings(metadata: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    return {
        str(name): tuple(map(str, texts))
        for name, texts in mapping(metadata, "strings").items()
        if isinstance(texts, list)
    }
