"""NeMo-RL's `train_data_step{N}.jsonl` in its log directory: a line a sequence.

In NeMo-RL 0.6.0 `Logger.log_batched_dict_as_jsonl` writes rows one by one, each value a list of one
item. Five columns cover the whole sequence, index t is token t: `token_ids`, `token_loss_mask`,
`advantages`, `generation_logprobs` and `prev_logprobs`. They are padded to the batch's width, and
`input_lengths` has the length. The loss counts the tokens in both masks, never a sequence's first.

With `force_on_policy_ratio` (and no `seq_logprob_error_threshold`) NeMo-RL computes no
`prev_logprobs` and writes zeros. The reader leaves them out and records that. With dynamic sampling
`rewards` belong to the unfiltered batch and not to these rows; `filtered_rewards` belong to them.
`val_data_step{N}.jsonl` holds texts alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Final

from stagescope_service.dumps.formats.columns import Columns
from stagescope_service.dumps.formats.json_lines import numbered
from stagescope_service.dumps.formats.listing import FileFormat, ListedFile
from stagescope_service.dumps.formats.sequences import (
    SequenceRow,
    add_row_values,
    plain_list,
    prompt_hashes,
    read_objects,
    response_tensors,
    token_ids,
    token_mask,
    token_values,
)
from stagescope_service.dumps.pickles.torch_file import FileValue
from stagescope_service.dumps.records import DumpContents, DumpEntry, Location
from stagescope_wire.errors import InvalidTensor

STAGE: Final = "actor_compute_log_prob"

_FILE: Final = re.compile(r"train_data_step(\d{1,18})\Z")
_STREAMS: Final[Mapping[str, str]] = {
    "generation_logprobs": "rollout_log_probs",
    "prev_logprobs": "old_log_probs",
    "advantages": "advantages",
}
_PRODUCERS: Final = {
    "rollout": {"producer": "generation", "alignment": "index t is token t"},
    "old": {"producer": "policy", "alignment": "index t is token t"},
}
NOT_COMPUTED: Final = (
    "zero in every token. With force_on_policy_ratio NeMo-RL computes no prev_logprobs. The "
    "mismatch of this step is not measured"
)


def _place_of(found: ListedFile) -> Location | None:
    match = _FILE.match(found.path.stem)
    if match is None or found.path.suffix not in (".jsonl", ".json"):
        return None
    return Location(int(match[1]), STAGE)


def read_entry(entry: DumpEntry) -> DumpContents:
    """Read one file; see `records.Dump.read`."""
    lines, sequences = read_objects(entry.path).convert(lambda line: _sequence(_unlisted(line)))
    rows = [_unlisted(line) for line in lines.rows.values()]
    found = Columns()
    found.tensors |= response_tensors(sequences)
    _leave_out_zeros(found, sequences)
    rewards = "filtered_rewards" if any("filtered_rewards" in row for row in rows) else "rewards"
    for name, column in (("rewards", rewards), ("sample_loss_mask", "sample_loss_mask")):
        add_row_values(found, name, rows, column)
    uncounted = sum(not sequence.counts for sequence in sequences)
    if uncounted:
        found.about["uncounted_sequences"] = uncounted
    texts = [row.get("content") for row in rows]
    if all(isinstance(text, str) for text in texts):
        found.texts["content"] = tuple(map(str, texts))
    found.about |= {
        "alignment": "responses alone, index t is token t",
        "samples": lines.naming,
        "streams": {name: _PRODUCERS[name] for name in _PRODUCERS if _has(found, name)},
    }
    groups = prompt_hashes(sequences)
    return found.contents(
        entry,
        samples=None if lines.has_holes else numbered(groups),
        groups=groups,
        masks=["response_mask"],
        problems=lines.problems(entry),
        rows=lines.names(),
    )


def _has(found: Columns, stream: str) -> bool:
    return f"{stream}_log_probs" in found.tensors


def _unlisted(line: Mapping[str, FileValue]) -> dict[str, FileValue]:
    """Return a line without the list of one item around each value."""
    row: dict[str, FileValue] = {}
    for name, value in line.items():
        items = plain_list(value)
        row[name] = items[0] if len(items) == 1 else value
    return row


def _sequence(row: Mapping[str, FileValue]) -> SequenceRow:
    if "token_ids" not in row:
        raise InvalidTensor("it has no token_ids, which NeMo-RL writes with the masks")
    tokens = token_ids("token_ids", plain_list(row["token_ids"]))
    length = row.get("input_lengths")
    end = length if isinstance(length, int) and 0 < length <= len(tokens) else len(tokens)
    mask = token_mask("token_loss_mask", row.get("token_loss_mask"))
    # No logits score the first token: NeMo-RL's loss leaves it out.
    chosen = [one and at > 0 for at, one in enumerate(mask)]
    values: dict[str, list[float]] = {}
    for theirs, ours in _STREAMS.items():
        column = row.get(theirs)
        if column is None:
            continue
        found = token_values(theirs, plain_list(column) or [column])
        # An advantage of the sequence, where it has one for all tokens.
        values[ours] = (found * len(tokens) if len(found) == 1 else found)[:end]
    counted = token_values("sample_loss_mask", [row.get("sample_loss_mask", 1.0)])
    return SequenceRow(tokens[:end], chosen[:end], values, counts=counted[0] > 0)


def _leave_out_zeros(found: Columns, sequences: Sequence[SequenceRow]) -> None:
    name = "old_log_probs"
    values = {
        value
        for row in sequences
        if name in row.values
        for value, one in zip(row.values[name], row.mask, strict=True)
        if one
    }
    if values == {0.0}:
        del found.tensors[name]
        found.left_out[name] = NOT_COMPUTED


FORMAT: Final = FileFormat(
    kind="nemo_rl",
    layout="NeMo-RL's (train_data_stepN.jsonl with token_ids, token_loss_mask, ...)",
    title="NeMo-RL's training data",
    section="old_log_probs",
    place_of=_place_of,
    read=read_entry,
    marks=("token_loss_mask", "sample_loss_mask", "generation_logprobs"),
    peeked=1 << 20,  # the names come between long lists
)
