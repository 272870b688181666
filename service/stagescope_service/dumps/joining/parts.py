"""Which rows of a step each part of a dump holds: found from ids and shapes, without values."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np

from stagescope.batch import Gap
from stagescope.flow import order_of
from stagescope.wire.errors import NotFound, StagescopeError
from stagescope.wire.schema import STAGES
from stagescope_service.dumps.joining.column import Array
from stagescope_service.dumps.joining.fragments import PLACES, checksum, locations_of
from stagescope_service.dumps.joining.rows import FoundPart, Rows, lacking_ranks
from stagescope_service.dumps.records import Dump, Entry, Record
from stagescope_service.store.tensorfile import WireTensor

_SAMPLING: Final = (
    "temperature", "top_p", "top_k", "min_p", "repetition_penalty", "max_tokens", "seed",
)  # fmt: skip
_SECTIONS: Final = ("trajectories", "batch_inputs", "old_log_probs", "advantages", "forward_data")


@dataclasses.dataclass
class Found:
    """The parts of a step, in the order in which their data flow."""

    parts: list[FoundPart]
    rows: Rows
    sides: dict[str, str]
    gaps: list[Gap]
    files: list[dict[str, Any]]

    def strings(self) -> dict[str, tuple[str, ...]]:
        """Return the rows' texts; a row of which one was not said has an empty one."""
        found: dict[str, list[str]] = {}
        for part in self.parts:
            if part.rows is None:
                continue
            for name, texts in part.texts.items():
                column = found.setdefault(name, [""] * len(self.rows))
                for row, text in zip(part.rows.tolist(), texts, strict=True):
                    column[row] = column[row] or text
        if any(part.samples is not None for part in self.parts):
            found["sample_ids"] = list(self.rows.samples)
        return {name: tuple(texts) for name, texts in found.items()}

    def meta(self, dump: Dump) -> dict[str, Any]:
        """Return what was said beside the tensors: of the whole, and by stage."""
        versions: list[Any] = []
        stages: dict[str, Any] = {}
        settings: Mapping[str, Any] = {}
        for part in self.parts:
            settings = settings or part.said.get("settings") or {}
            meta = part.said.get("meta") or {}
            job = part.said.get("job") or {}
            version = meta.get("policy_version", job.get("policy_version"))
            if version is not None and version not in versions:
                versions.append(version)
            if meta:
                stages.setdefault(part.stage, dict(meta))
        found: dict[str, Any] = {
            "settings": dict(settings), "sampling": _sampling(stages.values()), "stages": stages,
        }  # fmt: skip
        if versions:
            found["policy_version"] = versions[0] if len(versions) == 1 else versions
        return {**found, "dump": dict(dump.about)} if dump.about else found


def find_parts(dump: Dump, step: int | None, stages: Collection[str] | None) -> Found:
    """Read what each entry of a step holds.

    Raises:
        NotFound: there is nothing of this step, or of these stages.
    """
    entries = [entry for entry in dump.entries if entry.place.step == step]
    if stages is not None:
        entries = [entry for entry in entries if _stage(entry) in stages]
    if not entries:
        steps = sorted({e.place.step for e in dump.entries if e.place.step is not None})
        there = sorted({_stage(entry) for entry in dump.entries if entry.place.step == step})
        raise NotFound(
            f"{dump.name} has nothing of step {step}" + (" in these stages" if there else ""),
            expected=f"one of {', '.join(there)}" if there else _few(steps),
            advice="" if steps else "keep steps: stagescope capture --keep trajectories",
        )
    scan = _Scan(dump)
    for entry in entries:
        scan.take(entry)
    parts = scan.answering()
    rows = Rows()
    consumed = [part for part in parts if part.said.get("is_consumed")]
    for group in _passes(part for part in parts if part not in consumed):
        if not rows.place(group):
            scan.gaps.append(
                Gap("joined", f"{group[0].stage} has no sample ids, and other rows than the "
                    "stages before it: its tensors are in its parts alone")
            )  # fmt: skip
        if lacking := lacking_ranks(group):
            some = ", ".join(map(rows.name, lacking[:4]))
            text = f"{group[0].stage} lacks context-parallel ranks of {len(lacking)} rows ({some})"
            scan.gaps.append(Gap("rows", f"{text}: their ends may not be there"))
    for part in consumed:
        rows.choose(part)
    if pieces := [str(part) for part in parts if not part.is_once and part.span is None]:
        scan.gaps.append(
            Gap("joined", f"{len(pieces)} parts hold pieces of samples ({pieces[0]}, ...), and not "
                "where their tokens lie (positions, or token_offset): their tensors are in these "
                "parts alone")
        )  # fmt: skip
    scan.gaps += [Gap("file", f"{each.path}: {each.message}") for each in dump.problems]
    scan.gaps += _absent(parts)
    return Found(parts, rows, scan.sides(), scan.gaps, scan.files)


class _Scan:
    def __init__(self, dump: Dump) -> None:
        self.gaps: list[Gap] = []
        self.files: list[dict[str, Any]] = []
        self._dump = dump
        self._parts: dict[tuple[Any, ...], FoundPart] = {}
        self._edges: dict[str, list[int]] = {}
        self._leading: set[int] = set()

    def take(self, entry: Entry) -> None:
        """Note what an entry holds."""
        place = entry.place
        try:
            record = self._dump.read(entry)
        except StagescopeError as error:
            self.gaps.append(Gap("file", f"{place}: {error}"))
            return
        said = record.about
        self._note_file(entry, said)
        job = said.get("job") or {}
        payload = (job.get("incarnation"), job.get("seq"))
        key = (_stage(entry), place.role, place.rank, place.part, payload)
        part = self._parts.setdefault(key, FoundPart(*key[:4]))
        part.entries.append(entry)
        part.data_rank = job["data_rank"] if job.get("data_rank") is not None else place.rank
        part.numbers |= record.numbers
        part.said = {**said, **part.said}
        self._note_rows(part, record)
        for name, why in (said.get("left_out") or {}).items():
            self.gaps.append(Gap("tensor", f"{part} left out {name}: {why}"))

    def _note_file(self, entry: Entry, said: Mapping[str, Any]) -> None:
        place = entry.place
        path = str(said.get("path") or entry.path)
        if not any(file["path"] == path for file in self.files):
            self.files.append({
                "path": path, "bytes": entry.bytes, "checksum": said.get("checksum"),
                "stage": _stage(entry), "role": place.role, "rank": place.rank,
                "part": str(place.part),
            })  # fmt: skip

    def _note_rows(self, part: FoundPart, record: Record) -> None:
        tensors = part.unpacked(record)
        texts = dict(record.row_texts)
        if record.groups is not None:
            texts["group_ids"] = record.groups
        count = _count(record, tensors)
        if part.count and count and count != part.count:
            self.gaps.append(
                Gap("joined", f"{part} holds {part.count} and {count} rows: only the first are")
            )
            return
        part.count = part.count or count
        if record.samples is not None and len(record.samples) != count:
            ids = f"{len(record.samples)} sample ids for {count} rows"
            self.gaps.append(Gap("joined", f"{part} has {ids}: its rows are joined by place"))
        else:
            part.samples = part.samples or record.samples
        part.texts |= {name: each for name, each in texts.items() if len(each) == count}
        is_placed = not PLACES.isdisjoint(tensors)
        if part.context_ranks > 1 and not is_placed:
            part.digest = checksum(part.digest, tensors)
        if is_placed and (spots := locations_of(tensors, count)) is not None:
            part.span = max(part.span or 0, spots.span)
        for name, (tag, shape, values, offsets) in tensors.items():
            if offsets is not None and len(offsets) == count + 1:
                width = int(np.diff(offsets).max(initial=0))
                part.shapes.setdefault(name, (tag, (count, width, *shape[1:])))
            elif offsets is None and count and shape[:1] == (count,):
                part.shapes.setdefault(name, (tag, shape))
            is_mask = name in ("response_mask", "attention_mask") and not is_placed
            if is_mask and offsets is None and len(shape) == 2:
                self._note_edges(name, values.reshape(shape) != 0, tensors.get("responses"))

    def _note_edges(self, name: str, there: Array, responses: WireTensor | None) -> None:
        leading = there.cumsum(axis=1) == 0
        trailing = there[:, ::-1].cumsum(axis=1) == 0
        some = there.any(axis=1)
        edges = self._edges.setdefault(name, [0, 0])
        edges[0] += int(leading[some].sum())
        edges[1] += int(trailing[some].sum())
        if responses is not None and responses[3] is None and responses[1] == there.shape:
            self._leading |= set(np.unique(responses[2].reshape(there.shape)[leading]).tolist())

    def sides(self) -> dict[str, str]:
        """Return the side on which tensors are padded: prompts on the left, others by a mask.

        A response may begin with tokens of the environment: only where all that leads is one token
        and more than what trails it is padding.
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

    def answering(self) -> list[FoundPart]:
        """Return the parts in order; of a work that was reported twice the newer."""
        newest: dict[tuple[Any, ...], FoundPart] = {}
        for key, part in sorted(self._parts.items(), key=lambda item: _wall(item[1])):
            before = newest.get(key[:4])
            if before is not None:
                self.gaps.append(Gap("disagrees", f"{part} was recorded twice: the newer counts"))
            newest[key[:4]] = part
        return sorted(newest.values(), key=_order)


def _wall(part: FoundPart) -> float:
    told = part.said.get("wall")
    if told is not None:
        return float(told)
    return max(entry.path.stat().st_mtime for entry in part.entries)


def _order(part: FoundPart) -> tuple[Any, ...]:
    """Stages as a step has them, passes in order; the first of replicas first."""
    known = (*STAGES, *_SECTIONS)
    at = known.index(part.stage) if part.stage in known else len(known)
    return (
        at, part.stage, part.part.occurrence, part.part.epoch, part.role or "",
        part.data_rank or 0, part.rank or 0, part.part,
    )  # fmt: skip


def _passes(parts: Iterable[FoundPart]) -> list[list[FoundPart]]:
    found: dict[tuple[Any, ...], list[FoundPart]] = {}
    for part in parts:
        if part.count:
            one = (part.stage, part.role, part.part.occurrence, part.part.epoch)
            found.setdefault(one, []).append(part)
    return list(found.values())


def _absent(parts: Iterable[FoundPart]) -> list[Gap]:
    """Name ranks of a role that are in some of its stages and not in others."""
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


def _count(record: Record, tensors: Mapping[str, WireTensor]) -> int:
    """Return the rows: as many as there are sample ids, unless no tensor has so many."""
    if record.samples is not None:
        count = len(record.samples)
        rows = {_rows_of(each) for each in tensors.values() if each[1] or each[3] is not None}
        if rows and count not in rows:
            return _count(dataclasses.replace(record, samples=None), tensors)
        return count
    named = [*([record.mask] if record.mask else ()), *sorted(tensors, key=order_of)]
    for name in named:
        if tensors[name][1] or tensors[name][3] is not None:
            return _rows_of(tensors[name])
    return 0


def _rows_of(wire: WireTensor) -> int:
    _, shape, _, offsets = wire
    return len(offsets) - 1 if offsets is not None else shape[0]


def _stage(entry: Entry) -> str:
    return entry.place.stage or entry.section


def _few(steps: Sequence[int]) -> str:
    shown = ", ".join(map(str, steps[:8])) + (", ..." if len(steps) > 8 else "")
    return f"step {shown}" if steps else ""


def _sampling(said: Iterator[Any] | Collection[Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for meta in said:
        nested = [meta.get(name) for name in ("sampling", "sampling_params")]
        for each in (meta, *(item for item in nested if isinstance(item, Mapping))):
            for name in _SAMPLING:
                if each.get(name) is not None:
                    found.setdefault(name, each[name])
    return found
