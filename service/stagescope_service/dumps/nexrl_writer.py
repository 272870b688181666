"""Writes any dump in NexRL's layout, so that scripts for NexRL's files can read it.

Files and keys are those of NexRL 1.4's DataDumper and, for `is_loss_debug` and `batch_inputs`, of
its Weaver service: see `nexrl`. NexRL numbers the microbatches of a rank and has no other parts.
If a dump has several stages, epochs or mini-batches, they are numbered consecutively in that order,
those of the update first; `extra_info` holds the stage and part of each and the sample_uids of its
rows, and `stagescope.json` the place of each file, which `nexrl.open_nexrl` reads. A file of
`param` or `gradient` is of one parameter; further ones, and those of further stages and parts
(`name@stage.part`), are under `more`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypeAlias

import numpy as np

from stagescope.wire.errors import Conflict, InvalidInput, NotFound, StagescopeError
from stagescope.wire.schema import Part
from stagescope.wire.tensorfile import Array
from stagescope_service.dumps.formats.nexrl import write_index
from stagescope_service.dumps.formats.nexrl_rows import (
    TRAJECTORY_TENSORS,
    datum,
    lists_in,
    rows_of,
    trajectory,
    values_of,
    widened,
)
from stagescope_service.dumps.formats.slime import EVAL_STAGE
from stagescope_service.dumps.joining.join import join
from stagescope_service.dumps.pickles.torch_file import (
    FileTensor,
    FileValue,
    check_torch,
    save_torch_file,
)
from stagescope_service.dumps.records import Dump, DumpContents, DumpEntry, Location, mapping
from stagescope_service.rows.ragged import cumulative, padded
from stagescope_service.store.tensorfile import WireTensor, disk_errors

FORMATS: Final = ("pt", "jsonl")
_UPDATE: Final = "actor_update"
_LOSSES: Final = ("loss", "pg_loss", "entropy_loss")
_MICRO: Final[Mapping[str, str]] = {
    "forward_data": "forward_data", "is_loss": "is_loss_debug", "batch_inputs": "batch_inputs",
}  # fmt: skip
_ROLLOUT_TENSORS: Final = ("rollout_log_probs", "round_ids", "turn_ids", "versions")
_NOT_IN_FILES: Final = (
    "numbers that were logged where no tensor is kept, if any: they are in the service's "
    "catalogue alone, not in these files (stagescope series)"
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
        raise Conflict(f"{directory} is there and not empty", expected="a new directory")
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

    def write_step(self, step: int | None, entries: Sequence[DumpEntry]) -> None:
        """Write everything of one step."""
        sections: dict[str, list[DumpEntry]] = defaultdict(list)
        for entry in entries:
            sections[entry.section].append(entry)
        number = -1 if step is None else step
        micros = _micro_indices(entries)
        losses = self._write_losses(number, sections["loss"], sections["metrics"], micros)
        for section, folder in _MICRO.items():
            self._write_micro(folder, number, sections[section], micros, losses)
        for section, folder in _SHARDS.items():
            self._write_shards(folder, number, sections[section])
        self._write_old_log_probs(number, sections["old_log_probs"])
        self._write_rows(number, sections["datums"])
        self._write_trajectories(step, sections["trajectories"])
        alone = [entry for entry in sections["metrics"] if entry.location.rank is None]
        for record in self._read(alone):
            self._save("training_metrics", number, {"metrics": _metrics(record)})
        for section in ("advantages", "other"):
            if sections[section]:
                count = len(sections[section])
                self._leave_out(f"step {number}: NexRL has no file for {section} ({count} entries)")

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
        """Write a file; `numbers` are the rank and the microbatch, as far as it has them."""
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
    ) -> None:
        for record in self._read(entries):
            tensors = _padded(record)
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
        """Write the losses of each rank and microbatch, and the other numbers that it logged."""
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

    def _write_old_log_probs(self, step: int, entries: Sequence[DumpEntry]) -> None:
        """Write the complete batch as one tensor: each sample once, rows padded on the right.

        The mask of the values that count is written with it, if it is known for all rows.
        """
        masks: list[Array] = []
        rows: list[Array] = []
        tags: set[str] = set()
        samples: list[str] = []
        seen: set[str] = set()
        locations: list[Location] = []
        for record in self._read(entries):
            if "old_log_probs" not in record.tensors:
                self._leave_out(f"{record.entry.path}: {', '.join(record.tensors)}")
                continue
            tensor = record.tensors["old_log_probs"]
            tags.add(tensor[0])
            locations.append(record.entry.location)
            recorded = record.tensors.get("response_mask")
            mask = [] if recorded is None else values_of(recorded)
            for row, values in enumerate(values_of(tensor)):
                sample = record.samples[row] if record.samples else ""
                if not sample or sample not in seen:
                    rows.append(values)
                    masks += mask[row : row + 1]
                    samples.append(sample)
                seen.add(sample)
        if not rows:
            return
        if len(tags) > 1:
            self._leave_out(f"step {step}: old_log_probs of several dtypes: {', '.join(tags)}")
            return
        offsets = cumulative([*map(len, rows)])
        values = padded(np.concatenate(rows), offsets, "right")
        data: _Fields = {"old_log_probs": FileTensor(_as_wire(tags.pop(), values))}
        if [*map(len, masks)] == [*map(len, rows)]:
            counted = padded(np.concatenate(masks), offsets, "right").astype(np.int64)
            data["response_mask"] = FileTensor(_as_wire("int64", counted))
        info: _Fields = {"batch_size": len(rows)}
        if all(samples):
            info["sample_ids"] = [*samples]
        data |= {"shape": [*values.shape], "batch_info": info}
        self._save("old_log_probs", step, data, location=_shared_place(locations))

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
            dropped: set[str] = set()
            for record in self._read(chosen):
                if "tokens" not in record.tensors or not record.mask:
                    found = self._joined_trajectories(step)
                    break
                dropped.update(name for name in record.tensors if name not in TRAJECTORY_TENSORS)
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
            if dropped:
                reason = f"NexRL's trajectories do not hold {', '.join(sorted(dropped))}"
                self._leave_out(f"step {number}: {reason}")

    def _joined_trajectories(self, step: int | None) -> list[_Fields]:
        """Return the trajectories of a step whose prompts and responses are separate tensors."""
        try:
            batch = join(self._dump, step)
            dropped = [name for name in _ROLLOUT_TENSORS if name in batch]
            if dropped:
                reason = f"NexRL's trajectories do not hold {', '.join(dropped)}"
                self._leave_out(f"step {step}: {reason}")
            return batch.as_nexrl_trajectories()
        except NotFound as error:
            self._leave_out(f"step {step}: trajectories: {error}")
            return []


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


def _shared_place(locations: Sequence[Location]) -> Location | None:
    """Return the stage of a complete batch's rows as a place; None if unknown or not unique."""
    first = locations[0]
    if first.stage is None or any(each.stage != first.stage for each in locations):
        return None
    part = Part(first.part.occurrence, first.part.epoch)
    return Location(first.step, first.stage, part=part)


def _metrics(record: DumpContents) -> _Fields:
    lists = {name: lists_in(FileTensor(wire)) for name, wire in record.tensors.items()}
    return {**record.numbers, **lists}


def _extra_info(record: DumpContents) -> _Fields:
    """Return the `extra_info` of NexRL's own files, with sample_uids, stage and part added."""
    info = record.about.get("extra_info")
    found: _Fields = dict(info) if isinstance(info, dict) else {}
    if record.samples is not None:
        found["sample_ids"] = list(record.samples)
    location = record.entry.location
    if location.stage is not None:
        found |= {"stage": location.stage, "part": str(location.part)}
    return {"extra_info": found} if found else {}


def _padded(record: DumpContents) -> dict[str, WireTensor]:
    """Return the tensors of a record, ragged rows padded on the right with 0."""
    return {
        name: wire if wire[3] is None else _as_wire(wire[0], padded(wire[2], wire[3], "right"))
        for name, wire in record.tensors.items()
    }


def _as_wire(tag: str, values: Array) -> WireTensor:
    return tag, values.shape, values, None


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
