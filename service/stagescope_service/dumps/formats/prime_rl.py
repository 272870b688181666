"""prime-rl's token exports: `token_exports/step_{N}/rank_{R}.jsonl`, one line per sequence.

Checked with prime-rl 0.8.0 (`enable_token_export`) and with its form of May 2026
(`experimental.token_export`), which also has `rewards` and `training_mode`. Per-token values cover
the whole sequence with its prompt, without padding, and index t is token t. A null is a number that
is not finite: the reader counts it and returns NaN. A column of nulls alone is one that prime-rl
did not compute: the reader leaves it out.

The update's own forward passes compute `trainer_logprobs`: all micro-steps of a step use the
weights that the step began with. The marker `STABLE` in a step's directory means that every rank
has written its file. Forms without it never write one.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from stagescope_service.dumps.formats.columns import Columns
from stagescope_service.dumps.formats.listing import FileDump, FileFormat, Format, ListedFile
from stagescope_service.dumps.formats.odd_values import OddValue, number_in, value_in_words
from stagescope_service.dumps.formats.sequences import (
    NAN,
    SequenceRow,
    add_row_values,
    numbers,
    plain_list,
    prompt_hashes,
    read_objects,
    response_tensors,
    row_values,
    token_ids,
    token_mask,
    token_values,
)
from stagescope_service.dumps.pickles.torch_file import FileValue
from stagescope_service.dumps.records import DumpContents, DumpEntry, DumpProblem, Location
from stagescope_wire.errors import InvalidTensor

STAGE: Final = "actor_update"
STABLE: Final = "STABLE"

_FILE: Final = re.compile(r"step_(\d{1,18})/rank_(\d{1,9})\.jsonl?\Z")
_SCHEMA: Final = 1
_NAMES: Final[Mapping[str, str]] = {
    "inference_logprobs": "rollout_log_probs",
    "trainer_logprobs": "log_probs",
}
_TOKENS: Final = ("token_ids", "loss_mask", "position_ids", "rewards")
_PER_ROW: Final = ("micro_step", "micro_sequence_idx", "export_sequence_idx")
_TEXTS: Final = ("env_name", "training_mode")
_STREAMS: Final = {
    "rollout": {"producer": "inference", "alignment": "index t is token t"},
    "current": {"producer": "trainer", "alignment": "index t is token t"},
}


def _place_of(found: ListedFile) -> Location | None:
    match = _FILE.search("/".join(found.path.absolute().parts[-2:]))
    return None if match is None else Location(int(match[1]), STAGE, "actor", int(match[2]))


def open_prime_rl(path: Path, step: int | None) -> FileDump:
    """List token exports; a step without its marker is a problem if other steps have one."""
    dump = _FILES.open(path, step)
    problems = [each for each in dump.problems if each.path.name != STABLE]
    return dataclasses.replace(dump, problems=[*problems, *_unstable(dump.entries)])


def _unstable(entries: Sequence[DumpEntry]) -> list[DumpProblem]:
    """Return the steps without the marker, where other steps of their directory have it."""
    steps = {entry.path.parent: entry for entry in entries}
    found: list[DumpProblem] = []
    for directory, entry in sorted(steps.items()):
        others = any(directory.parent.glob(f"step_*/{STABLE}"))
        if others and not (directory / STABLE).exists():
            found.append(
                DumpProblem(
                    directory / STABLE,
                    "missing",
                    f"{directory.name} has no {STABLE}, but other steps have one. Ranks were still "
                    "writing, or the training ended before. The files that exist are read",
                    entry,
                )
            )
    return found


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read one rank's file of a step; see `records.Dump.read`."""
    lines = read_objects(entry.path)
    rows = [*lines.rows.values()]
    versions = {str(row.get("schema_version")) for row in rows}
    if versions != {str(_SCHEMA)}:
        raise InvalidTensor(
            f"{entry.path} has schema version {', '.join(sorted(versions))}", expected=str(_SCHEMA)
        )
    found = Columns()
    nulls: dict[str, int] = {}
    columns = _columns_of(rows, found)
    lines, sequences = lines.convert(lambda row: _sequence(row, columns, nulls))
    rows = [*lines.rows.values()]
    found.tensors |= response_tensors(sequences)
    for name in _PER_ROW:
        add_row_values(found, name, rows, name, whole=True)
    _add_rewards(found, rows)
    for name in _TEXTS:
        if any(row.get(name) is not None for row in rows):
            found.texts[name] = tuple(str(row.get(name) or "") for row in rows)
    if nulls:
        found.about["null_values"] = nulls
    found.about |= {
        "alignment": "responses alone, index t is token t",
        "dtypes": "float32 in prime-rl; JSON has one kind of whole and one of other numbers",
        "streams": {
            stream: fields
            for stream, fields in _STREAMS.items()
            if ("log_probs" if stream == "current" else f"{stream}_log_probs") in found.tensors
        },
    }
    groups = prompt_hashes(sequences)
    # Packing decides the order of a prompt's sequences, so it differs from run to run: samples pair
    # by their content.
    return found.contents(
        entry,
        groups=groups,
        masks=["response_mask"],
        problems=lines.problems(entry),
        rows=lines.names(),
    )


def _columns_of(rows: Sequence[Mapping[str, FileValue]], found: Columns) -> dict[str, str]:
    """Return the per-token columns, theirs -> ours, without those that are null throughout."""
    columns: dict[str, str] = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        lists = [row.get(name) for row in rows]
        if name in _TOKENS or not any(each == [] or plain_list(each) for each in lists):
            continue
        if all(value is None for each in lists for value in plain_list(each)):
            found.left_out[_NAMES.get(name, name)] = "null in every token: prime-rl has none"
            continue
        columns[name] = _NAMES.get(name, name)
    return columns


def _sequence(
    row: Mapping[str, FileValue], columns: Mapping[str, str], nulls: dict[str, int]
) -> SequenceRow:
    tokens = token_ids("token_ids", plain_list(row.get("token_ids")))
    mask = token_mask("loss_mask", row.get("loss_mask"))
    values: dict[str, list[float]] = {}
    for theirs, ours in columns.items():
        items = plain_list(row.get(theirs))
        if not items:
            continue
        values[ours] = token_values(theirs, items)
        of_model = [item for item, one in zip(items, mask, strict=False) if one]
        if lacking := sum(item is None for item in of_model):
            nulls[ours] = nulls.get(ours, 0) + lacking
    return SequenceRow(tokens, mask, values)


def _add_rewards(found: Columns, rows: Sequence[Mapping[str, FileValue]]) -> None:
    """Add the sequence's reward, which the older form repeats at each of its tokens."""
    rewards: list[float] = []
    for at, row in enumerate(rows):
        items = plain_list(row.get("rewards"))
        odd = next((each for each in items if each is not None and number_in(each) is None), None)
        if odd is not None:
            found.odd.append(OddValue(at, "rewards", value_in_words(odd)))
        values, _ = numbers(items)
        rewards.append(next((value for value in values if value == value), NAN))
    if any(reward == reward for reward in rewards):
        found.tensors["rewards"] = row_values(rewards)


_FILES: Final = FileFormat(
    kind="prime_rl",
    layout="prime-rl's (token_exports/step_N/rank_R.jsonl, as enable_token_export writes them)",
    title="prime-rl's token exports",
    section="forward_data",
    place_of=_place_of,
    read=read_entry,
    marks=("schema_version", "micro_step", "token_ids"),
)
FORMAT: Final = Format(_FILES.kind, _FILES.layout, _FILES.holds, open_prime_rl)
