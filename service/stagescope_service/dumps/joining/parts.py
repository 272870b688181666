"""The parts of a step and the rows that each holds: derived from ids and shapes, without values."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Final, TypeAlias

import numpy as np

from stagescope_service.dumps.joining.rows import RecordedPart, RowIndex, rows_lacking_ranks
from stagescope_service.dumps.records import Dump, DumpContents, DumpEntry, mapping
from stagescope_service.rows.positions import has_positions, token_positions
from stagescope_service.rows.ragged import Bools, unpack
from stagescope_service.store.tensorfile import WireTensor
from stagescope_wire.batch import Gap
from stagescope_wire.batch.data import flow_index
from stagescope_wire.errors import NotFound, StagescopeError
from stagescope_wire.policy_versions import VERSION_NAMES
from stagescope_wire.schema import STAGES, Part

_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed",
)  # fmt: skip
_SECTIONS: Final = ("trajectories", "batch_inputs", "old_log_probs", "advantages", "forward_data")

_PartKey: TypeAlias = "tuple[str, str | None, int | None, Part]"
"""(stage, role, rank, part)"""
_PayloadKey: TypeAlias = "tuple[_PartKey, object, object]"
"""(part, incarnation, sequence number)"""


@dataclasses.dataclass
class DumpParts:
    """The parts of a step, in the order in which their data flow.

    Attributes:
        sides: name of a tensor -> the side on which its rows are padded, 'left' or 'right'.
        files: the files that were read, as `Batch.source` lists them.
    """

    parts: list[RecordedPart]
    rows: RowIndex
    sides: dict[str, str]
    gaps: list[Gap]
    files: list[dict[str, object]]

    def by_precedence(self) -> list[int]:
        """Return the indexes of the parts; the first part that holds a row's values wins."""
        return sorted(range(len(self.parts)), key=lambda index: _precedence(self.parts[index]))

    def strings(self) -> dict[str, tuple[str, ...]]:
        """Return the rows' texts by name; a row without one has an empty text."""
        found: dict[str, list[str]] = {}
        for part in map(self.parts.__getitem__, self.by_precedence()):
            if part.rows is None:
                continue
            for name, texts in part.texts.items():
                column = found.setdefault(name, [""] * len(self.rows))
                for row, text in zip(part.rows.tolist(), texts, strict=True):
                    column[row] = column[row] or text
        if any(part.samples is not None for part in self.parts):
            found["sample_ids"] = list(self.rows.samples)
        return {name: tuple(texts) for name, texts in found.items()}

    def meta(self, dump: Dump) -> dict[str, object]:
        """Return the metadata of the step and of each stage."""
        versions: list[object] = []
        stages: dict[str, dict[str, object]] = {}
        settings: Mapping[str, object] = {}
        for part in self.parts:
            settings = settings or mapping(part.about, "settings")
            meta, job = mapping(part.about, "meta"), mapping(part.about, "job")
            version = meta.get("policy_version", job.get("policy_version"))
            if version is not None and version not in versions:
                versions.append(version)
            if meta:
                of_stage = stages.setdefault(part.stage, dict(meta))
                if named := {**mapping(of_stage, VERSION_NAMES), **mapping(meta, VERSION_NAMES)}:
                    of_stage[VERSION_NAMES] = named
        found: dict[str, object] = {
            "settings": dict(settings), "sampling": _sampling(stages.values()), "stages": stages,
        }  # fmt: skip
        if versions:
            found["policy_version"] = versions[0] if len(versions) == 1 else versions
        return {**found, "dump": dict(dump.about)} if dump.about else found


def find_parts(dump: Dump, step: int | None, stages: Collection[str] | None) -> DumpParts:
    """Scan the entries of a step and assign their rows.

    Raises:
        NotFound: the dump has nothing of this step, or of these stages.
    """
    entries = [entry for entry in dump.entries if entry.location.step == step]
    if stages is not None:
        entries = [entry for entry in entries if entry.stage in stages]
    if not entries:
        steps = sorted({e.location.step for e in dump.entries if e.location.step is not None})
        there = sorted({entry.stage for entry in dump.entries if entry.location.step == step})
        raise NotFound(
            f"{dump.name} has nothing of step {step}" + (" in these stages" if there else ""),
            expected=f"one of {', '.join(there)}" if there else _list_steps(steps),
            advice="" if steps else "keep steps: stagescope capture --keep trajectories",
        )
    scanner = _Scanner(dump)
    for entry in entries:
        scanner.scan(entry)
    parts = scanner.newest_parts()
    gaps, rows = scanner.gaps, RowIndex()
    consumed = [part for part in parts if part.about.get("is_consumed")]
    for group in _passes(part for part in parts if part not in consumed):
        gaps += _assign(rows, group)
    for part in consumed:
        rows.select_consumed(part)
    if fragments := [str(part) for part in parts if not part.is_whole and part.span is None]:
        gaps.append(
            Gap("joined", f"{len(fragments)} parts hold pieces of samples ({fragments[0]}, ...) "
                "without the positions of their tokens (positions, or token_offset). Only these "
                "parts have their tensors")
        )  # fmt: skip
    gaps += [Gap("file", f"{each.path}: {each.message}") for each in dump.problems]
    gaps += _missing_ranks(parts)
    return DumpParts(parts, rows, scanner.sides(), gaps, scanner.files)


def _assign(rows: RowIndex, group: Sequence[RecordedPart]) -> list[Gap]:
    """Assign the rows of a pass; return what cannot be aligned or is missing."""
    gaps: list[Gap] = []
    stage = group[0].stage
    if not rows.assign(group):
        gaps.append(
            Gap("joined", f"{stage} has no sample ids, and other rows than the stages before it. "
                "Only its parts have its tensors")
        )  # fmt: skip
    if lacking := rows_lacking_ranks(group):
        some = ", ".join(map(rows.name, lacking[:4]))
        text = f"{stage} lacks context-parallel ranks of {len(lacking)} rows ({some})"
        gaps.append(Gap("rows", f"{text}: their ends may be missing"))
    return gaps


class _Scanner:
    """Reads each entry once and collects ids, shapes and metadata."""

    def __init__(self, dump: Dump) -> None:
        self.gaps: list[Gap] = []
        self.files: list[dict[str, object]] = []
        self._dump = dump
        self._parts: dict[_PayloadKey, RecordedPart] = {}
        self._edges: dict[str, list[int]] = {}
        self._leading: set[int] = set()

    def scan(self, entry: DumpEntry) -> None:
        """Add an entry to its part."""
        location = entry.location
        try:
            record = self._dump.read(entry)
        except StagescopeError as error:
            self.gaps.append(Gap("file", f"{entry.location}: {error}"))
            return
        about = record.about
        self._add_file(entry, about)
        job = mapping(about, "job")
        part_key = (entry.stage, location.role, location.rank, location.part)
        payload_key = (part_key, job.get("incarnation"), job.get("seq"))
        part = self._parts.setdefault(payload_key, RecordedPart(*part_key))
        part.entries.append(entry)
        data_rank = job.get("data_rank")
        part.data_rank = data_rank if isinstance(data_rank, int) else location.rank
        part.numbers |= record.numbers
        part.about = {**about, **part.about}
        self._add_rows(part, record)
        for name, reason in mapping(about, "left_out").items():
            self.gaps.append(Gap("tensor", f"{part} left out {name}: {reason}"))
        for problem in record.problems:
            gap = Gap("file", problem.message)
            if gap not in self.gaps:
                self.gaps.append(gap)

    def _add_file(self, entry: DumpEntry, about: Mapping[str, object]) -> None:
        location = entry.location
        path = str(about.get("path") or entry.path)
        if not any(file["path"] == path for file in self.files):
            self.files.append({
                "path": path, "bytes": entry.bytes, "checksum": about.get("checksum"),
                "stage": entry.stage, "role": location.role, "rank": location.rank,
                "part": str(location.part),
            })  # fmt: skip

    def _add_rows(self, part: RecordedPart, record: DumpContents) -> None:
        tensors = unpack(record.tensors)
        texts = dict(record.row_texts)
        if record.groups is not None:
            texts["group_ids"] = record.groups
        count = _count_rows(record, tensors)
        if part.count and count and count != part.count:
            self.gaps.append(
                Gap("joined", f"{part} holds {part.count} and {count} rows: only the first are")
            )
            return
        part.count = part.count or count
        if record.samples is not None and len(record.samples) != count:
            ids = f"{len(record.samples)} sample ids for {count} rows"
            self.gaps.append(Gap("joined", f"{part} has {ids}: its rows are joined by position"))
        else:
            part.samples = part.samples or record.samples
        part.texts |= {name: each for name, each in texts.items() if len(each) == count}
        placed = has_positions(tensors)
        if part.context_ranks > 1 and not placed:
            part.checksum = _checksum(part.checksum, tensors)
        if placed and (tokens := token_positions(tensors, count)) is not None:
            part.span = max(part.span or 0, tokens.span)
        for name, (tag, shape, values, offsets) in tensors.items():
            if offsets is not None and len(offsets) == count + 1:
                width = int(np.diff(offsets).max(initial=0))
                part.shapes.setdefault(name, (tag, (count, width, *shape[1:])))
            elif offsets is None and count and shape[:1] == (count,):
                part.shapes.setdefault(name, (tag, shape))
            is_mask = name in ("response_mask", "attention_mask") and not placed
            if is_mask and offsets is None and len(shape) == 2:
                self._add_edges(name, values.reshape(shape) != 0, tensors.get("responses"))

    def _add_edges(self, name: str, mask: Bools, responses: WireTensor | None) -> None:
        leading = mask.cumsum(axis=1) == 0
        trailing = mask[:, ::-1].cumsum(axis=1) == 0
        some = mask.any(axis=1)
        edges = self._edges.setdefault(name, [0, 0])
        edges[0] += int(leading[some].sum())
        edges[1] += int(trailing[some].sum())
        if responses is not None and responses[3] is None and responses[1] == mask.shape:
            self._leading |= set(np.unique(responses[2].reshape(mask.shape)[leading]).tolist())

    def sides(self) -> dict[str, str]:
        """Return the side on which tensors are padded: prompts on the left, others by a mask.

        A response may begin with tokens of the environment. Its padding is on the left only if all
        leading tokens are the same and more than the trailing ones.
        """
        side = self._side("response_mask") if len(self._leading) == 1 else "right"
        found = {name: side for part in self._parts.values() for name in part.shapes}
        if "prompts" not in found:
            inputs = ("attention_mask", "input_ids", "position_ids")
            found |= dict.fromkeys(inputs, self._side("attention_mask"))
        return {**found, "prompts": "left"}

    def _side(self, name: str) -> str:
        leading, trailing = self._edges.get(name, (0, 0))
        return "left" if leading > trailing else "right"

    def newest_parts(self) -> list[RecordedPart]:
        """Return the parts in order; if work was reported twice, return the newer report."""
        newest: dict[_PartKey, RecordedPart] = {}
        for key, part in sorted(self._parts.items(), key=lambda item: _written_at(item[1])):
            if key[0] in newest:
                self.gaps.append(Gap("disagrees", f"{part} was recorded twice: the newer counts"))
            newest[key[0]] = part
        return sorted(newest.values(), key=_sort_key)


def _written_at(part: RecordedPart) -> float:
    wall = part.about.get("wall")
    if isinstance(wall, int | float):
        return float(wall)
    return max(entry.path.stat().st_mtime for entry in part.entries)


def _sort_key(part: RecordedPart) -> tuple[object, ...]:
    """Order stages as a step has them, then passes; the first of replicas first."""
    stages = (*STAGES, *_SECTIONS)
    stage = stages.index(part.stage) if part.stage in stages else len(stages)
    return (
        stage, part.stage, part.part.occurrence, part.part.epoch, part.role or "",
        part.data_rank or 0, part.rank or 0, part.part,
    )  # fmt: skip


def _precedence(part: RecordedPart) -> tuple[object, ...]:
    """Order parts so that the same values of a row count as in the statistics.

    A rank's last record in a stage comes first, except values that an update may have changed
    (`PartRecord.precedence`).
    """
    stage, number = _sort_key(part)[:2], part.part
    moves = "log_probs" in part.shapes
    return (
        *stage, number.epoch, number.occurrence if moves else -number.occurrence, part.role or "",
        part.data_rank or 0, part.rank or 0, -number.minibatch, -number.microbatch,
    )  # fmt: skip


def _passes(parts: Iterable[RecordedPart]) -> list[list[RecordedPart]]:
    found: dict[tuple[str, str | None, int, int], list[RecordedPart]] = {}
    for part in parts:
        if part.count:
            pass_key = (part.stage, part.role, part.part.occurrence, part.part.epoch)
            found.setdefault(pass_key, []).append(part)
    return list(found.values())


def _missing_ranks(parts: Iterable[RecordedPart]) -> list[Gap]:
    stages: dict[tuple[str, str], set[int]] = {}
    roles: dict[str, set[int]] = {}
    for part in parts:
        if part.rank is not None and part.role is not None:
            stages.setdefault((part.stage, part.role), set()).add(part.rank)
            roles.setdefault(part.role, set()).add(part.rank)
    return [
        Gap("rank", f"{stage} has nothing of {role} {', '.join(map(str, sorted(absent)))}")
        for (stage, role), ranks in stages.items()
        if (absent := roles[role] - ranks)
    ]


def _count_rows(record: DumpContents, tensors: Mapping[str, WireTensor]) -> int:
    """Return the number of rows: the number of sample ids, unless no tensor has as many rows."""
    if record.samples is not None:
        count = len(record.samples)
        rows = {_rows_of(each) for each in tensors.values() if each[1] or each[3] is not None}
        if rows and count not in rows:
            return _count_rows(dataclasses.replace(record, samples=None), tensors)
        return count
    candidates = [*([record.mask] if record.mask else ()), *sorted(tensors, key=flow_index)]
    for name in candidates:
        if tensors[name][1] or tensors[name][3] is not None:
            return _rows_of(tensors[name])
    return 0


def _checksum(before: str, tensors: Mapping[str, WireTensor]) -> str:
    """Return a hash of tensors that continues the hash `before`; replicas have the same."""
    found = hashlib.blake2b(before.encode(), digest_size=12)
    for name in sorted(tensors):
        found.update(name.encode())
        found.update(np.ascontiguousarray(tensors[name][2]).view(np.uint8).data)
    return found.hexdigest()


def _rows_of(wire: WireTensor) -> int:
    _, shape, _, offsets = wire
    return len(offsets) - 1 if offsets is not None else shape[0]


def _list_steps(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
    return f"step {shown}" if steps else ""


def _sampling(metas: Iterable[Mapping[str, object]]) -> dict[str, object]:
    found: dict[str, object] = {}
    for meta in metas:
        nested = (mapping(meta, "sampling"), mapping(meta, "sampling_params"))
        for values in (meta, *nested):
            for name in _SAMPLING:
                if values.get(name) is not None:
                    found.setdefault(name, values[name])
    return found
