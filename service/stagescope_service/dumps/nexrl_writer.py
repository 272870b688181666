"""Writes any dump in NexRL's layout, so that scripts for NexRL's files can read it.

Files and keys are those of NexRL 1.4's DataDumper and, for `is_loss_debug` and `batch_inputs`, of
its Weaver service: see `nexrl`. NexRL numbers the microbatches of a rank and has no other parts.
If a dump has several stages, epochs or mini-batches, they are numbered consecutively in that order,
the update first. `extra_info` holds the stage and part of each, the ids of its rows and the fields
of its process. `stagescope.json` holds the place of each file for `nexrl.open_nexrl`.
A file of `param` or `gradient` has one parameter. Others, and those of other stages and parts
(`name@stage.part`), are under `more`. NexRL has no file for some tensors, such as the rollout's
log-probs beside an update's. They are in a file of the same rank and microbatch, or with the old
log-probs. Values without any place are listed in `Exported.left_out`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from pathlib import Path
from typing import Final, TypeAlias, cast

import numpy as np

from stagescope_service.dumps.formats.nexrl import DTYPES, OF_JOB, write_index
from stagescope_service.dumps.formats.slime import EVAL_STAGE
from stagescope_service.dumps.joining.join import join
from stagescope_service.dumps.nexrl_forms import (
    ROLLOUT_TENSORS,
    TRAJECTORY_TENSORS,
    complete_batch,
    datum,
    lists_in,
    rows_of,
    trajectory,
)
from stagescope_service.dumps.pickles.torch_file import (
    FileTensor,
    FileValue,
    check_torch,
    save_torch_file,
)
from stagescope_service.dumps.records import (
    Dump,
    DumpContents,
    DumpEntry,
    Location,
    mapping,
    widened,
)
from stagescope_service.rows.ragged import padded
from stagescope_service.store.tensorfile import WireTensor, disk_errors
from stagescope_wire.errors import Conflict, InvalidInput, NotFound, StagescopeError
from stagescope_wire.keep import COMPANIONS
from stagescope_wire.schema import Part

FORMATS: Final = ("pt", "jsonl")
_UPDATE: Final = "actor_update"
_LOSSES: Final = ("loss", "pg_loss", "entropy_loss")
_MICRO: Final[Mapping[str, str]] = {
    "forward_data": "forward_data", "is_loss": "is_loss_debug", "batch_inputs": "batch_inputs",
}  # fmt: skip
_WITHOUT_FILE: Final = ("advantages", "other")
"""Sections that NexRL writes no file of."""
_NOT_IN_FILES: Final = (
    "numbers that were logged where no tensor is kept, if any. Only the service's catalogue has "
    "them: see `stagescope series`"
)
_Fields: TypeAlias = "dict[str, FileValue]"
_MicroKey: TypeAlias = "tuple[int, int]"
"""(rank, microbatch), as in the name of a file."""
_SHARDS: Final = {"gradients": "gradient", "parameters": "param"}


@dataclasses.dataclass
class Exported:
    """The result of an export.

    Attributes:
        files, bytes: number of files written, and their size.
        left_out: messages about everything that NexRL's layout cannot hold or that could not be
            read.
    """

    files: int = 0
    bytes: int = 0
    left_out: list[str] = dataclasses.field(default_factory=list)


def write_nexrl(dump: Dump, directory: Path, format: str = "pt") -> Exported:
    """Write a dump as `{directory}/{type}/step_{N:06d}[_rank{r}[_micro{m}]].{format}`.

    Args:
        dump: of any format; entries without a step are written as step -1, as NexRL does.
        directory: must be empty, or not exist.
        format: 'pt' (torch is needed) or 'jsonl'.

    Raises:
        InvalidInput: another format.
        Conflict: the directory is not empty.
        MissingExtra: torch is not installed.
        StoreError: the disk reported an error.
    """
    if format not in FORMATS:
        raise InvalidInput(f"format {format!r}", expected=f"one of {', '.join(FORMATS)}")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise Conflict(f"{directory} exists and is not empty", expected="a new directory")
    if format == "pt":
        check_torch()
    writer = _Writer(dump, directory, format)
    steps: dict[int | None, list[DumpEntry]] = defaultdict(list)
    for entry in dump.entries:
        steps[entry.location.step].append(entry)
    for step, entries in steps.items():
        writer.write_step(step, entries)
    write_index(directory, writer.locations)
    if dump.kind == "own":
        writer.exported.left_out.append(_NOT_IN_FILES)
    writer.exported.left_out += [problem.message for problem in dump.problems]
    return writer.exported


class _Writer:
    def __init__(self, dump: Dump, directory: Path, format: str) -> None:
        self._dump = dump
        self._directory = directory
        self._format = format
        self.exported = Exported()
        self.locations: dict[str, Location] = {}
        """Name of a file below the directory -> its place in the dump."""
        self._elsewhere: set[str] = set()
        """Names of tensors that a step's files of microbatches or its complete batch hold."""

    def write_step(self, step: int | None, entries: Sequence[DumpEntry]) -> None:
        """Write everything of one step."""
        sections: dict[str, list[DumpEntry]] = defaultdict(list)
        for entry in entries:
            sections[entry.section].append(entry)
        self._elsewhere = set()
        number = -1 if step is None else step
        micros = _micro_indices(entries)
        riders = _riders(sections)
        losses = self._write_losses(number, sections["loss"], sections["metrics"], micros)
        for section, folder in _MICRO.items():
            self._write_micro(folder, number, sections[section], micros, losses, riders)
        for section, folder in _SHARDS.items():
            self._write_shards(folder, number, sections[section])
        placed = {entry for others in riders.values() for entry in others}
        self._write_batch(step, sections, placed)
        self._write_rows(number, sections["datums"])
        self._write_trajectories(step, sections["trajectories"])
        alone = [entry for entry in sections["metrics"] if entry.location.rank is None]
        for record in self._read(alone):
            self._save("training_metrics", number, {"metrics": _metrics(record)})
        for section in _WITHOUT_FILE:
            without = [entry for entry in sections[section] if entry not in placed]
            if without:
                names = sorted(
                    {name for each in self._read(without) for name in each.tensors} - COMPANIONS
                )
                self._leave_out(
                    f"step {number}: NexRL has no file for {section} of stages without one of "
                    f"{', '.join(_MICRO)}: {', '.join(names)} ({len(without)} entries)"
                )

    def _read(self, entries: Iterable[DumpEntry]) -> Iterator[DumpContents]:
        for entry in entries:
            try:
                record = self._dump.read(entry)
            except StagescopeError as error:
                self._leave_out(str(error))
                continue
            for name, reason in mapping(record.about, "left_out").items():
                self._leave_out(f"{entry.path}: {name}: {reason}")
            for problem in record.problems:
                self._leave_out(problem.message)
            yield record

    def _leave_out(self, message: str) -> None:
        self.exported.left_out.append(message)

    def _save(
        self, folder: str, step: int, data: _Fields, *numbers: int, location: Location | None = None
    ) -> None:
        labels = ("rank", "micro")[: len(numbers)]
        name = "".join(f"_{label}{number}" for label, number in zip(labels, numbers, strict=True))
        path = self._directory / folder / f"step_{step:06d}{name}.{self._format}"
        if location is not None:
            self.locations[f"{folder}/{path.name}"] = location
        data = {"step": step, **dict(zip(("rank", "micro_idx"), numbers, strict=False)), **data}
        with disk_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            temporary = path.with_name(f".{path.name}")
            if self._format == "pt":
                save_torch_file(temporary, data)
            else:
                data = _with_dtypes(data)
                temporary.write_text(json.dumps(lists_in(data)) + "\n", encoding="utf-8")
            os.replace(temporary, path)
        self.exported.files += 1
        self.exported.bytes += path.stat().st_size

    def _write_micro(
        self,
        folder: str,
        step: int,
        entries: Sequence[DumpEntry],
        micros: Mapping[DumpEntry, int],
        losses: Mapping[_MicroKey, _Fields],
        riders: Mapping[DumpEntry, Sequence[DumpEntry]],
    ) -> None:
        for record in self._read(entries):
            tensors = _padded(record)
            for other in self._read(riders.get(record.entry, ())):
                tensors = {**_padded(other), **tensors}
                self._elsewhere |= {*other.tensors}
            data: _Fields = {name: FileTensor(wire) for name, wire in tensors.items()}
            if folder == "forward_data":
                shaped = [name for name in ("log_probs", "entropy") if name in tensors]
                data |= {f"{name}_shape": [*tensors[name][1]] for name in shaped}
            key = (record.entry.location.rank or 0, micros[record.entry])
            data |= record.numbers
            if folder == "is_loss_debug":
                if "response_mask" in data:
                    data.setdefault("effective_valid", data["response_mask"])
                if "loss" in losses.get(key, {}):
                    data.setdefault("loss", losses[key]["loss"])
            data |= _extra_info(record)
            self._save(folder, step, data, *key, location=record.entry.location)

    def _write_losses(
        self,
        step: int,
        losses: Sequence[DumpEntry],
        metrics: Sequence[DumpEntry],
        micros: Mapping[DumpEntry, int],
    ) -> Mapping[_MicroKey, _Fields]:
        found: dict[_MicroKey, _Fields] = defaultdict(dict)
        logged: dict[_MicroKey, _Fields] = defaultdict(dict)
        locations: dict[_MicroKey, Location] = {}
        ranked = [entry for entry in metrics if entry.location.rank is not None]
        for record in self._read([*losses, *ranked]):
            key = (record.entry.location.rank or 0, micros[record.entry])
            data, others = found[key], logged[key]
            for name, value in _metrics(record).items():
                short = name.rpartition("/")[2]
                is_loss = record.entry.section == "loss" and short in _LOSSES
                if is_loss and short not in data and isinstance(value, int | float):
                    data[short] = float(value)
                else:
                    others[name.removeprefix("metrics/")] = value
            data |= _extra_info(record)
            locations[key] = record.entry.location
        for key, data in sorted(found.items()):
            metrics_field: _Fields = {"metrics": logged[key]} if logged[key] else {}
            self._save("loss", step, {**metrics_field, **data}, *key, location=locations[key])
        return found

    def _write_shards(self, folder: str, step: int, entries: Sequence[DumpEntry]) -> None:
        ranks: dict[int, dict[str, WireTensor]] = defaultdict(dict)
        for record in self._read(entries):
            location = record.entry.location
            of_rank = ranks[location.rank or 0]
            stage, part = location.stage, str(location.part)
            suffix = f"{stage}.{part}" if stage else part
            for name, tensor in record.tensors.items():
                of_rank[name if name not in of_rank else f"{name}@{suffix}"] = tensor
        for rank, tensors in sorted(ranks.items()):
            if not tensors:
                continue
            name, *others = sorted(tensors)
            tensor = tensors[name]
            data: _Fields = {"param_name": name, folder: FileTensor(tensor), **_statistics(tensor)}
            if others:
                data["more"] = {other: FileTensor(tensors[other]) for other in others}
            self._save(folder, step, data, rank)

    def _write_batch(
        self,
        step: int | None,
        sections: Mapping[str, list[DumpEntry]],
        placed: Set[DumpEntry],
    ) -> None:
        """Write the complete batch of the old log-probs; see `nexrl_forms`."""
        entries = sections["old_log_probs"]
        if not entries:
            return
        records = [*self._read(entries)]
        for record in records:
            if "old_log_probs" not in record.tensors:
                self._leave_out(f"{record.entry.path}: {', '.join(record.tensors)}")
        beside: Sequence[DumpEntry] | None = sections["trajectories"]
        if placed >= {*entries}:
            beside = None  # each rank's own file has them: here they would count again
        batch = complete_batch(self._dump, step, records, beside)
        if batch is None:
            return
        for message in batch.left_out:
            self._leave_out(f"step {step}: old_log_probs: {message}")
        self._elsewhere |= {*batch.tensors}
        number = -1 if step is None else step
        self._save("old_log_probs", number, batch.fields(), location=batch.location)

    def _write_rows(self, step: int, entries: Sequence[DumpEntry]) -> None:
        datums: list[FileValue] = [
            datum(row) for record in self._read(entries) for row in rows_of(record)
        ]
        if datums:
            self._save("datums", step, {"num_datums": len(datums), "datums": datums})

    def _write_trajectories(self, step: int | None, entries: Sequence[DumpEntry]) -> None:
        number = -1 if step is None else step
        prepared = [entry for entry in entries if entry.key == "prepared_trajectories"]
        plain = [entry for entry in entries if entry.key != "prepared_trajectories"]
        for folder, chosen in (("trajectory", plain), ("prepared_trajectories", prepared)):
            found: list[_Fields] = []
            seen: set[tuple[bool, str]] = set()
            for record in self._read(chosen):
                if "tokens" not in record.tensors or not record.mask:
                    found = self._joined_trajectories(step)
                    break
                is_val = record.entry.location.stage == EVAL_STAGE
                rows = list(rows_of(record))
                names = record.samples or ("",) * len(rows)
                for name, row in zip(names, rows, strict=True):
                    if not name or (is_val, name) not in seen:
                        found.append(trajectory(row, is_val=is_val))
                    seen.add((is_val, name))
            if not found:
                continue
            data: _Fields = {"num_trajectories": len(found), "trajectories": [*found]}
            advantages: list[FileValue] = [each.pop("advantages", None) for each in found]
            if folder == "prepared_trajectories" and None not in advantages:
                data["advantages"] = advantages
            self._save(folder, number, data)

    def _joined_trajectories(self, step: int | None) -> list[_Fields]:
        """Return the trajectories of a step whose prompts and responses are separate tensors."""
        try:
            batch = join(self._dump, step)
            found = batch.as_nexrl_trajectories()
            held = {*self._elsewhere, *TRAJECTORY_TENSORS}
            dropped = [name for name in ROLLOUT_TENSORS if name in batch and name not in held]
            if dropped:
                reason = f"NexRL's trajectories do not hold {', '.join(dropped)}"
                self._leave_out(f"step {step}: {reason}")
            return found
        except NotFound as error:
            self._leave_out(f"step {step}: trajectories: {error}")
            return []


def _riders(sections: Mapping[str, Sequence[DumpEntry]]) -> dict[DumpEntry, list[DumpEntry]]:
    """Return the entries without their own file, by the file of the same place that holds them.

    So the export keeps everything of a place: both streams, and the advantages that an update got.
    """
    files: dict[Location, DumpEntry] = {}
    for section in _MICRO:
        for entry in sections.get(section, ()):
            files.setdefault(entry.location, entry)
    found: dict[DumpEntry, list[DumpEntry]] = defaultdict(list)
    for section in (*_WITHOUT_FILE, "old_log_probs", "trajectories"):
        for entry in sections.get(section, ()):
            file = files.get(entry.location)
            if file is not None and file.path == entry.path:
                found[file].append(entry)
    return found


def _micro_indices(entries: Iterable[DumpEntry]) -> dict[DumpEntry, int]:
    """Return the micro_idx of each entry that has one; see the module's docstring."""

    def part_key(entry: DumpEntry) -> tuple[bool, str, bool, str, Part]:
        location = entry.location
        role, stage = location.role or "", location.stage or ""
        return (role not in ("", "actor"), role, stage not in ("", _UPDATE), stage, location.part)

    chosen = [entry for entry in entries if entry.section in (*_MICRO, "loss", "metrics")]
    keys = sorted({part_key(entry) for entry in chosen})
    minibatches = {(*key[:4], key[4]._replace(microbatch=0)) for key in keys}
    if len(minibatches) <= 1:
        return {entry: entry.location.part.microbatch for entry in chosen}
    indices = {key: index for index, key in enumerate(keys)}
    return {entry: indices[part_key(entry)] for entry in chosen}


def _metrics(record: DumpContents) -> _Fields:
    lists = {name: lists_in(FileTensor(wire)) for name, wire in record.tensors.items()}
    return {**record.numbers, **lists}


def _extra_info(record: DumpContents) -> _Fields:
    """Return the `extra_info` of NexRL's own files, with ids, metadata, stage and part added."""
    info = record.about.get("extra_info")
    found: _Fields = dict(info) if isinstance(info, dict) else {}
    if record.samples is not None:
        found["sample_ids"] = list(record.samples)
    if record.groups is not None:
        found["group_ids"] = list(record.groups)
    job = mapping(record.about, "job")
    kept = {"meta": mapping(record.about, "meta"), "job": {n: job[n] for n in OF_JOB if n in job}}
    found |= {name: cast("FileValue", dict(values)) for name, values in kept.items() if values}
    location = record.entry.location
    if location.stage is not None:
        found |= {"stage": location.stage, "part": str(location.part)}
    return {"extra_info": found} if found else {}


def _with_dtypes(data: _Fields) -> _Fields:
    tags: _Fields = {n: each.wire[0] for n, each in data.items() if isinstance(each, FileTensor)}
    name = next((each for each in ("extra_info", "batch_info") if each in data), None)
    info = None if name is None else data[name]
    if name is None or not isinstance(info, dict):
        return data
    return {**data, name: {**info, DTYPES: tags}}


def _padded(record: DumpContents) -> dict[str, WireTensor]:
    found = dict(record.tensors)
    for name, (tag, _, values, offsets) in record.tensors.items():
        if offsets is not None:
            rows = padded(values, offsets, "right")
            found[name] = (tag, rows.shape, rows, None)
    return found


def _statistics(tensor: WireTensor) -> _Fields:
    """Return NexRL's metadata of a parameter; the numbers are computed in float64."""
    tag, shape, _, _ = tensor
    values = widened(tensor).astype(np.float64).reshape(-1)
    return {
        "shape": list(shape),
        "dtype": f"torch.{tag}",
        "norm": float(np.linalg.norm(values)),
        "mean": float(values.mean()) if values.size else math.nan,
        "std": float(values.std(ddof=1)) if values.size > 1 else math.nan,
    }
