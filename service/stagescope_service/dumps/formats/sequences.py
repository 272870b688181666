"""Rows of whole sequences, prompt included, as the responses that other formats have.

NeMo-RL and prime-rl write every per-token value for the whole sequence: index t is token t. A
response begins at the first token that the mask selects; the prompt is before it. Statistics need
`response_mask` as wide as the streams, and samples pair with samples of formats that have only
responses.
"""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np

from stagescope_service.dumps.formats.columns import Columns
from stagescope_service.dumps.formats.content import read_content
from stagescope_service.dumps.formats.json_lines import ObjectLines, read_object_lines
from stagescope_service.dumps.formats.odd_values import OddValue, number_in, value_in_words
from stagescope_service.dumps.pickles.torch_file import FileTensor, FileValue
from stagescope_service.rows.ragged import cumulative
from stagescope_service.store.tensorfile import WireTensor
from stagescope_wire.errors import InvalidTensor

NAN: Final = float("nan")
_INT64: Final = 1 << 63
_INTEGERS: Final = frozenset({"tokens", "responses", "prompts", "response_mask", "loss_mask"})


@dataclasses.dataclass
class SequenceRow:
    """One sequence: its tokens, which of them are the model's, and values of each token.

    Attributes:
        tokens: the whole sequence, without padding.
        mask: which tokens are the model's; as long.
        values: values by name in the record; as long.
        counts: whether the loss counts this sequence.

    Raises:
        InvalidTensor: a value has another length.
    """

    tokens: list[int]
    mask: list[bool]
    values: dict[str, list[float]]
    counts: bool = True

    def __post_init__(self) -> None:
        counts = {name: len(values) for name, values in self.values.items()}
        for name, count in {"the mask": len(self.mask), **counts}.items():
            if count != len(self.tokens):
                raise InvalidTensor(
                    f"{name} of a sequence has {count} values, and the sequence "
                    f"{len(self.tokens)} tokens",
                    expected="one value for each token",
                )

    @property
    def begin(self) -> int:
        """Index of the response's first token; without a model token there is no response."""
        return self.mask.index(True) if True in self.mask else len(self.tokens)

    @property
    def prompt(self) -> list[int]:
        """The tokens before the response."""
        return self.tokens[: self.begin]


def response_tensors(rows: Sequence[SequenceRow]) -> dict[str, WireTensor]:
    """Return ragged tensors of the rows: whole `tokens`, `prompts`, and the rest of the responses.

    The mask of a sequence that the loss does not count is 0.
    """
    begins = [row.begin for row in rows]
    pairs = [*zip(rows, begins, strict=True)]
    masks = [[int(one and row.counts) for one in row.mask[begin:]] for row, begin in pairs]
    found: dict[str, WireTensor] = {
        "tokens": _ragged("tokens", [row.tokens for row in rows]),
        "prompts": _ragged("prompts", [row.tokens[:begin] for row, begin in pairs]),
        "responses": _ragged("responses", [row.tokens[begin:] for row, begin in pairs]),
        "response_mask": _ragged("response_mask", masks),
    }
    for name in dict.fromkeys(name for row in rows for name in row.values):
        columns = [row.values.get(name) or [NAN] * len(row.tokens) for row in rows]
        found[name] = _ragged(name, [c[begin:] for c, begin in zip(columns, begins, strict=True)])
    return found


def row_values(values: Iterable[FileValue], *, whole: bool = False) -> WireTensor:
    """Return one number per row, NaN if missing; with `whole` int64 if none is missing."""
    found, missing = numbers(values)
    array = np.array(found, np.int64 if whole and not missing else np.float64)
    return str(array.dtype), array.shape, array, None


def read_objects(path: Path) -> ObjectLines:
    """Read a file with an object in each line, or a converted one.

    Raises:
        NotFound, InvalidTensor, StoreError: as `read_object_lines`.
    """
    if path.suffix == ".jsonl":
        return read_object_lines(path)
    lines = plain_list(read_content(path))
    rows = {number: line for number, line in enumerate(lines, 1) if isinstance(line, dict)}
    if not rows or len(rows) != len(lines):
        raise InvalidTensor(f"{path} holds lines that are no objects", expected="objects")
    return ObjectLines(path, rows)


def prompt_hashes(rows: Sequence[SequenceRow]) -> tuple[str, ...]:
    """Return a hash of each row's prompt, which is its group."""
    prompts = (np.array(row.prompt, np.int64).tobytes() for row in rows)
    return tuple(hashlib.blake2b(prompt, digest_size=6).hexdigest() for prompt in prompts)


def plain_list(value: FileValue) -> list[FileValue]:
    """Return a list as a list, also where a converted file has it as an array; [] for no list."""
    if isinstance(value, FileTensor):
        found: list[FileValue] = value.wire[2].tolist()
        return found
    return value if isinstance(value, list) else []


def numbers(values: Iterable[FileValue]) -> tuple[list[float], int]:
    """Return numbers in which a missing one is nan, and how many were missing."""
    found = [NAN if (value := number_in(each)) is None else value for each in values]
    return found, sum(value != value for value in found)


def token_values(name: str, values: Sequence[FileValue]) -> list[float]:
    """Return a sequence's value per token, NaN for a null.

    Raises:
        InvalidTensor: a value is no number; the message follows the line's name.
    """
    for at, value in enumerate(values):
        if value is not None and number_in(value) is None:
            raise InvalidTensor(f"{name} holds no number at index {at}: {value_in_words(value)}")
    return numbers(values)[0]


def token_mask(name: str, value: FileValue) -> list[bool]:
    """Return which tokens a mask selects; [] without one.

    Raises:
        InvalidTensor: a value is neither 0 nor 1.
    """
    values = plain_list(value)
    for at, each in enumerate(values):
        if not isinstance(each, bool | int | float) or each not in (0, 1):
            raise InvalidTensor(f"{name} holds no 0 or 1 at index {at}: {value_in_words(each)}")
    return [bool(each) for each in values]


def token_ids(name: str, values: Sequence[FileValue]) -> list[int]:
    """Return a sequence's token ids.

    Raises:
        InvalidTensor: an id is no whole number of 64 bits.
    """
    for at, value in enumerate(token_values(name, values)):
        if not (value.is_integer() and abs(value) < _INT64):
            raise InvalidTensor(f"{name} holds no token id at index {at}: {value}")
    return [int(value) for value in values if isinstance(value, int | float)]


def add_row_values(
    found: Columns,
    name: str,
    rows: Sequence[Mapping[str, FileValue]],
    column: str,
    *,
    whole: bool = False,
) -> None:
    """Add one number per row; other values become NaN and are listed in `found.odd`."""
    values = [row.get(column) for row in rows]
    found.odd += [
        OddValue(row, column, value_in_words(value))
        for row, value in enumerate(values)
        if value is not None and number_in(value) is None
    ]
    found.tensors[name] = row_values(values, whole=whole)


def _ragged(name: str, rows: Sequence[Sequence[float]]) -> WireTensor:
    dtype = np.int64 if name in _INTEGERS else np.float64
    flat = np.array([value for row in rows for value in row], dtype)
    return str(flat.dtype), flat.shape, flat, cumulative(np.array([*map(len, rows)], np.int64))
