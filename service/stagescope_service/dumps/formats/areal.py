"""AReaL's batches, as its guide saves them: `torch.save(batch, "batch_data.pt")`.

The file holds a dict of padded tensors [rows, tokens] (or a TensorDict), or a list with one such
dict per trajectory. Four tensors cover the whole trajectory with its prompt, and index t is token
t: `input_ids`, `loss_mask`, `logprobs` and `versions`. `prox_logp` is shifted by one: index t is
token t + 1. In a file with `advantages` AReaL has already rolled the others to match. The shift of
each tensor is in `about["alignment"]`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from stagescope_service.dumps.formats.columns import Columns, collect_rows, odd_problem
from stagescope_service.dumps.formats.content import first_values, read_shared
from stagescope_service.dumps.formats.fitting import (
    NamedRow,
    fitting_rows,
    left_out_problem,
    objects_in,
)
from stagescope_service.dumps.formats.listing import (
    FileDump,
    ListedFile,
    file_dump,
    files_of,
    is_companion,
    is_saved,
    unrecognized_file,
)
from stagescope_service.dumps.pickles.torch_file import FileTensor, FileValue
from stagescope_service.dumps.records import (
    SHIFTED_BY_ONE,
    DumpContents,
    DumpEntry,
    DumpProblem,
    Location,
)
from stagescope_wire.errors import InvalidTensor, NotFound

KIND: Final = "areal"

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
_PEEKED: Final = 400


def is_areal(values: Sequence[str | int]) -> bool:
    """Return whether a file is a batch of AReaL's, by the first values in it."""
    return "input_ids" in values and sum(mark in values for mark in _MARKS) > 1


def holds_areal(found: Sequence[ListedFile]) -> bool:
    """Return whether any of the files is AReaL's."""
    return any(is_areal(first_values(each.path, _PEEKED)) for each in found if is_saved(each))


def open_areal(path: Path, *, step: int | None = None) -> FileDump:
    """List a saved batch of AReaL's, or a directory of them.

    Args:
        path: the file or directory.
        step: a batch has no step, so any step finds nothing.

    Raises:
        NotFound: no such path, or no batch of AReaL's in it.
        TooLarge: more than `listing.MAX_FILES` files.
        StoreError: the disk reported an error.
    """
    found, problems = files_of(path)
    names = {each.name for each in found}
    batches: dict[ListedFile, Sequence[str | int]] = {}
    for each in found:
        values = first_values(each.path, _PEEKED) if is_saved(each) else []
        if is_areal(values):
            batches[each] = values
        elif not is_companion(each, names):
            problems.append(unrecognized_file(each, "AReaL's batches"))
    entries = [
        DumpEntry(section, Location(stage=each.path.stem if len(batches) > 1 else None), each.path,
              each.bytes, section)
        for each, values in batches.items()
        for section in _sections_of(values)
    ]  # fmt: skip
    if not entries:
        raise NotFound(
            f"{path} holds no batch of AReaL's",
            expected="what torch.save(batch, 'batch_data.pt') wrote: input_ids, loss_mask, ...",
        )
    return file_dump(path, KIND, entries, problems, read_entry, step=step)


def _sections_of(values: Sequence[str | int]) -> list[str]:
    others = [
        section for section, names in _SECTIONS.items() if any(name in values for name in names)
    ]
    return ["trajectories", *others]


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
    if not isinstance(data, dict):
        rows: list[NamedRow] = []
        for name, part in objects:
            try:
                rows += _rows(name, {n: part[n] for n in wanted & part.keys()})
            except InvalidTensor as error:  # noqa: PERF203 - the others are still read
                wrong[name] = error.wrong
        fitted, unfit = fitting_rows(rows, per_token=_PER_TOKEN, masks=_WHOLE)
        found = collect_rows([row.values for row in fitted], names=NAMES)
        problems = [
            *left_out_problem(entry, {**wrong, **unfit}, len(rows) + len(wrong)),
            *odd_problem(found, entry, [row.name for row in fitted]),
        ]
    else:
        found = Columns()
        chosen: list[str] = [name for name in data if name in wanted]
        for name in chosen:
            found.add(NAMES.get(name, name), data[name])
    found.about["alignment"] = _alignment(names)
    mask = "loss_mask" if "loss_mask" in found.tensors else None
    return DumpContents(
        entry,
        found.tensors,
        found.numbers,
        row_texts=found.texts,
        mask=mask,
        about=found.metadata(),
        problems=problems,
    )


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
