"""AReaL's batches, as its guide saves them: `torch.save(batch, "batch_data.pt")`.

The file holds a dict of padded tensors [rows, tokens] (or a TensorDict), or a list with one such
dict per trajectory. Four tensors cover the whole trajectory with its prompt, and index t is token
t: `input_ids`, `loss_mask`, `logprobs` and `versions`. `prox_logp` is shifted by one: index t is
token t + 1. In a file with `advantages` AReaL has already rolled the others to match. The shift of
each tensor is in `about["alignment"]`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stagescope_service.dumps.formats.columns import Columns, collect_rows
from stagescope_service.dumps.formats.content import read_shared
from stagescope_service.dumps.formats.listing import (
    FileDump,
    FileFormat,
    Format,
    ListedFile,
    saved_place,
)
from stagescope_service.dumps.formats.odd_values import (
    NamedRow,
    fitting_rows,
    left_out_problem,
    objects_in,
)
from stagescope_service.dumps.pickles.torch_file import FileTensor, FileValue
from stagescope_service.dumps.records import (
    SHIFTED_BY_ONE,
    DumpContents,
    DumpEntry,
    DumpProblem,
    Location,
)
from stagescope_wire.errors import InvalidTensor

NAMES: Final[Mapping[str, str]] = {
    "input_ids": "tokens",
    "logprobs": "rollout_log_probs",
    "prox_logp": "old_log_probs",
    "ref_logp": "ref_log_probs",
}
"""AReaL's names -> names in the record."""

_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "old_log_probs": ("prox_logp", "ref_logp"),
    "advantages": ("values", "advantages", "returns", "kl_rewards", "tot_rewards"),
}
_MARKS: Final = ("loss_mask", "logprobs", "versions")
_PER_TOKEN: Final = ("input_ids", "loss_mask", "logprobs", "prox_logp", "ref_logp")
"""Values of the tokens of a trajectory."""
_WHOLE: Final = ("input_ids", "loss_mask")
"""Those that are whole numbers."""


def _entries_of(
    found: ListedFile, location: Location, values: Sequence[str | int]
) -> list[DumpEntry]:
    if "input_ids" not in values or sum(mark in values for mark in _MARKS) < 2:
        return []
    held = [section for section, names in _SECTIONS.items() if not {*names}.isdisjoint(values)]
    place = location._replace(stage=found.path.stem)
    sections = ("trajectories", *held)
    return [DumpEntry(each, place, found.path, found.bytes, each) for each in sections]


def open_areal(path: Path, step: int | None) -> FileDump:
    """List AReaL's batches; the file's name is the stage of each where there are several."""
    dump = _FILES.open(path, step)
    if len({entry.path for entry in dump.entries}) > 1:
        return dump
    entries = [dataclasses.replace(entry, location=Location()) for entry in dump.entries]
    return dataclasses.replace(dump, entries=entries)


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read one section of a batch; see `records.Dump.read`."""
    data = read_shared(entry.path)
    listed = data if isinstance(data, list) else [data]
    objects, wrong = objects_in(listed, "trajectory")
    parts = [part for _, part in objects]
    if not parts:
        raise InvalidTensor(
            f"{entry.path} holds a {type(data).__name__}",
            expected="a dict of tensors, or a list of them",
            advice="in AReaL's single-controller mode localize the batch before it is saved",
        )
    names: set[str] = set().union(*parts)
    wanted = _names_of(entry.section, names)
    problems: Sequence[DumpProblem] = ()
    names_of_rows: list[str] = []
    if not isinstance(data, dict):
        rows: list[NamedRow] = []
        for name, part in objects:
            try:
                rows += _rows(name, {n: part[n] for n in wanted & part.keys()})
            except InvalidTensor as error:  # noqa: PERF203 - the others are still read
                wrong[name] = error.wrong
        fitted, unfit = fitting_rows(rows, per_token=_PER_TOKEN, masks=_WHOLE)
        found = collect_rows([row.values for row in fitted], names=NAMES)
        problems = left_out_problem(entry, {**wrong, **unfit}, len(rows) + len(wrong))
        names_of_rows = [row.name for row in fitted]
    else:
        found = Columns()
        chosen: list[str] = [name for name in data if name in wanted]
        for name in chosen:
            found.add(NAMES.get(name, name), data[name])
    found.about["alignment"] = _alignment(names)
    return found.contents(entry, masks=["loss_mask"], problems=problems, rows=names_of_rows)


def _names_of(section: str, names: set[str]) -> set[str]:
    elsewhere = {name for others in _SECTIONS.values() for name in others}
    if section == "trajectories":
        return names - elsewhere
    return names & {*_SECTIONS[section], "loss_mask", "attention_mask"}


def _alignment(names: set[str]) -> dict[str, str]:
    token, after = "index t is token t", SHIFTED_BY_ONE
    rolled = "advantages" in names
    found = {"tokens": token, "rollout_log_probs": token, "loss_mask": token}
    if rolled:
        found |= {"rollout_log_probs": after, "loss_mask": after, "advantages": after}
    return {**found, **({"old_log_probs": after} if "prox_logp" in names else {})}


def _rows(name: str, part: Mapping[str, FileValue]) -> Iterator[NamedRow]:
    """Yield the rows of one trajectory's dict; tensors [n, tokens] are n rows."""
    tensors = {name: value for name, value in part.items() if isinstance(value, FileTensor)}
    counts = {value.wire[1][0] for value in tensors.values() if value.wire[1]}
    if len(counts) != 1:
        raise InvalidTensor(f"tensors of a trajectory have {sorted(counts)} rows", expected="one")
    rows = counts.pop()
    for row in range(rows):
        values = {each: _row_of(value, row) for each, value in part.items()}
        tokens = values.get("input_ids", values.get("loss_mask"))
        length = tokens.wire[2].size if isinstance(tokens, FileTensor) else 0
        yield NamedRow(name if rows == 1 else f"{name}, row {row}", values, length)


def _row_of(value: FileValue, row: int) -> FileValue:
    if not isinstance(value, FileTensor) or not value.wire[1]:
        return value
    tag, shape, values, _ = value.wire
    return FileTensor((tag, shape[1:], values[row, ...], None), value.was)


_FILES: Final = FileFormat(
    kind="areal",
    layout="AReaL's saved batches (*.pt), as torch.save(batch, 'batch_data.pt') writes them",
    title="AReaL's batches",
    section="trajectories",
    place_of=saved_place,
    read=read_entry,
    peeked=400,
    entries_of=_entries_of,
)
FORMAT: Final = Format(_FILES.kind, _FILES.layout, _FILES.holds, open_areal)
