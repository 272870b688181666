"""The tensors of a record by row, which of their values count, and the rows of whole ranks.

Only the values under a padded tensor's mask can be compared. Padding on the left, on the right or
to another width does not change the rows. This is index arithmetic over whole tensors, without a
loop over rows or tokens.

Files of a whole step may hold the rows of rank 0's first part, then those of its second, and so
on. NexRL's `old_log_probs` is such a file: it has neither ids, tokens nor a mask. This order of
rows is assumed only if the log-probs of the ranks' own shards agree with it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope_service.compare import flow
from stagescope_service.compare.flow import MASKS, TARGETS, TEXTS, TOKENS, is_structural
from stagescope_service.dumps.records import SHIFTED_BY_ONE, Dump, DumpContents, DumpEntry
from stagescope_service.rows.positions import has_positions
from stagescope_service.rows.ragged import (
    Bools,
    Int64,
    RowTensor,
    before_first,
    count_by_row,
    hash_rows,
    row_tensor,
    same_offsets,
    shift_right,
    slice_indexes,
    spans,
)
from stagescope_service.statistics.token_batch import mask_bits
from stagescope_wire.batch import Tensor, widened
from stagescope_wire.errors import StagescopeError

WHOLE_SEQUENCES: Final = ("tokens", "input_ids", TARGETS, "input_tokens")
"""Tensors of prompt and response together; the mask of a datum is aligned with its targets."""
_SEQUENCES: Final = (
    "tokens", "responses", "input_ids", "prompts", "log_probs", "old_log_probs",
    "rollout_log_probs", "loss_mask", "response_mask",
)  # fmt: skip
"""Tensors whose first dimension is the number of rows, where nothing else gives it."""

_BORROWED: Final = "mask of other files"
"""Name of the mask that other files have for a record's rows."""


class RowExtent(NamedTuple):
    """Which values of a tensor count.

    Attributes:
        kind: 'mask' (where its mask is 1), 'span' (from the first 1 to the last), 'full' (all but
            padding) or 'row' (all, since padding is unknown). In a whole sequence whose mask covers
            its response alone, 'response' is the span of that mask.
        keep: bool of each value, None = all.
    """

    kind: str
    keep: Bools | None


class ContentsRows:
    """The row tensors of a record; `count` is None if it has none."""

    def __init__(
        self, record: DumpContents, find_mask: Callable[[ContentsRows], Bools | None] | None = None
    ) -> None:
        """Index a record.

        Args:
            record: the record.
            find_mask: reads from other files where a mask of these rows is 1; see `borrow_mask`.
        """
        record = _unshifted(_with_texts_as_tokens(record))
        self._find_mask = find_mask
        self.record = record
        self.count = _row_count(record)
        self._tensors: dict[str, RowTensor | None] = {}
        self._ones: dict[str, Bools] = {}
        self._spans: dict[str, Bools] = {}

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors by row."""
        return tuple(name for name in self.record.tensors if self.find(name) is not None)

    @property
    def has_fragments(self) -> bool:
        """Whether its rows may be fragments of samples: they give the positions of their tokens."""
        return has_positions(self.names)

    def find(self, name: str) -> RowTensor | None:
        """Return a tensor by row, None if it is absent or not by row."""
        if name not in self._tensors:
            tensor, path, found = self.record.tensors.get(name), self.record.entry.path, None
            if tensor is not None and self.count is not None:
                found = row_tensor(tensor, self.count, f"{path}: rows of {name}")
            self._tensors[name] = found
        return self._tensors[name]

    def tensor(self, name: str) -> RowTensor:
        """Return a tensor that is known to be by row."""
        tensor = self.find(name)
        assert tensor is not None, name
        return tensor

    def ones(self, name: str) -> Bools:
        """Return where a mask is 1, as bools in memory order; cached."""
        if name not in self._ones:
            tensor = self.tensor(name)
            bits, one = mask_bits(tensor.flat, tensor.dtype)
            self._ones[name] = bits == one
        return self._ones[name]

    def share_ones(self, other: ContentsRows, name: str) -> None:
        """Reuse the cached bools of a mask that is equal in another record."""
        self._ones[name] = other.ones(name)

    def borrow_mask(self, name: str) -> None:
        """Find a mask in other files for a padded tensor that has none here."""
        tensor, find_mask = self.tensor(name), self._find_mask
        if find_mask is None or tensor.width is None or self.mask_of(name) is not None:
            return
        self._find_mask = None
        ones = find_mask(self)
        if ones is not None and len(ones) == len(tensor.flat):
            self._tensors[_BORROWED] = tensor._replace(dtype="bool", flat=ones)
            self._ones[_BORROWED] = ones

    def mask_of(self, name: str) -> str | None:
        """Return the name of a mask whose rows are as long as a tensor's, None without one."""
        tensor = self.tensor(name)
        for mask in (self.record.mask, "response_mask", "loss_mask", _BORROWED):
            mask_tensor = None if mask is None else self.find(mask)
            if mask_tensor is not None and same_offsets(mask_tensor, tensor):
                return mask
        return None

    def extents(self, name: str) -> dict[str, RowExtent]:
        """Return the extents of a tensor that are known, by kind, the most exact first."""
        tensor = self.tensor(name)
        if tensor.width == 1 and len(tensor.shape) == 1:
            return {"row": RowExtent("row", None)}
        found: dict[str, RowExtent] = {}
        mask = self.mask_of(name)
        if is_structural(name) or not tensor.dtype.startswith(("float", "bfloat")):
            if (full := self._full(name, tensor)) is not None:
                found["full"] = full
            if mask is not None:
                found["span"] = RowExtent("span", self._span(mask))
            elif name in WHOLE_SEQUENCES and (ones := self._response_ones(tensor)) is not None:
                found["response"] = RowExtent("response", spans(ones, tensor.offsets))
        elif mask is not None:
            found["mask"] = RowExtent("mask", self.ones(mask))
        return found | {"row": RowExtent("row", None)}

    def _full(self, name: str, tensor: RowTensor) -> RowExtent | None:
        if tensor.width is None:
            return RowExtent("full", None)
        attention = self.find("attention_mask")
        if attention is None or attention.width is None or name == "attention_mask":
            return None
        if attention.width == tensor.width:
            return RowExtent("full", self.ones("attention_mask"))
        if name in ("prompts", "responses", "response_mask") and attention.width > tensor.width:
            # The attention mask covers the prompt and then the response.
            both = self.ones("attention_mask").reshape(-1, attention.width)
            part = both[:, : tensor.width] if name == "prompts" else both[:, -tensor.width :]
            return RowExtent("full", np.ascontiguousarray(part).reshape(-1))
        return None

    def _response_ones(self, tensor: RowTensor) -> Bools | None:
        """Return where a mask of the responses is 1 in whole sequences, which end with them."""
        mask = self.find("response_mask")
        if mask is None or (mask.width is None) != (tensor.width is None):
            return None
        if (mask.lengths > tensor.lengths).any():
            return None
        ones = np.zeros(len(tensor.flat), bool)
        starts = tensor.offsets[1:] - mask.lengths
        ones[slice_indexes(starts, mask.lengths)] = self.ones("response_mask")
        return ones

    def repeat_by_token(self, name: str, other: ContentsRows) -> bool:
        """Repeat one value a row for each token, if another record has a value for each token."""
        tensor, of_other = self.tensor(name), other.tensor(name)
        mask = next((each for each in MASKS if each in self.names), None)
        if (
            len(tensor.shape) > 1
            or tensor.width is None
            or of_other.width == len(of_other.shape) == 1
        ):
            return False
        if mask is None or other.mask_of(name) is None:
            return False
        like = self.tensor(mask)
        flat = np.repeat(tensor.flat, like.lengths)
        self._tensors[name] = RowTensor(tensor.dtype, flat, like.offsets, like.width, like.shape)
        return True

    def _span(self, mask: str) -> Bools:
        """Return which values lie from the first 1 of their row to the last; cached."""
        if mask not in self._spans:
            self._spans[mask] = spans(self.ones(mask), self.tensor(mask).offsets)
        return self._spans[mask]

    def content_hashes(self) -> tuple[list[str] | None, list[str] | None]:
        """Return a hash of each row's response tokens and of its prompt tokens, None if unknown."""
        responses = prompts = None
        if "responses" in self.names:
            responses = self._hashes("responses", self._sampled("responses"))
        if "prompts" in self.names:
            prompts = self._hashes("prompts", self._best_keep("prompts"))
        whole_sequence = next((n for n in WHOLE_SEQUENCES if n in self.names), None)
        if whole_sequence is not None and (mask := self.mask_of(whole_sequence)) is not None:
            span = self._span(mask)
            responses = responses or self._hashes(whole_sequence, span)
            if prompts is None and (full := self.extents(whole_sequence).get("full")) is not None:
                before = before_first(self.ones(mask), self.tensor(whole_sequence).offsets)
                prompts = self._hashes(
                    whole_sequence, before if full.keep is None else before & full.keep
                )
        elif whole_sequence is not None and responses is None:
            responses = self._hashes(whole_sequence, self._best_keep(whole_sequence))
        return responses, prompts

    def row_hashes(self) -> list[str]:
        """Return a hash of each row over all values that count, of every tensor."""
        each = [self._hashes(name, self._best_keep(name)) for name in sorted(self.names)]
        return ["".join(parts) for parts in zip(*each, strict=True)]

    def token_counts(self) -> Int64:
        """Return the number of tokens of each row that count, 0 where no tensor is by token."""
        mask = next((m for m in (self.record.mask, *MASKS) if m and m in self.names), None)
        if mask is None:
            return np.zeros(self.count or 0, np.int64)
        return count_by_row(self.ones(mask), self.tensor(mask).offsets)

    def _sampled(self, name: str) -> Bools | None:
        """Return which tokens of responses the policy made, from the first to the last.

        In a row without any, return all tokens except padding.
        """
        mask = self.mask_of(name)
        if mask is None:
            return self._best_keep(name)
        tensor = self.tensor(name)
        none = np.repeat(count_by_row(self.ones(mask), tensor.offsets) == 0, tensor.lengths)
        best = self._best_keep(name)
        return self._span(mask) | (none if best is None else none & best)

    def _best_keep(self, name: str) -> Bools | None:
        return next(iter(self.extents(name).values())).keep

    def _hashes(self, name: str, keep: Bools | None) -> list[str]:
        tensor = self.tensor(name)
        flat = tensor.flat
        if name in TOKENS | MASKS and tensor.dtype not in ("bfloat16", "float16"):
            flat = flat.astype(np.int64, copy=False)  # int32 and int64 ids are the same tokens
        return hash_rows(flat, tensor.offsets, keep)


def _unshifted(record: DumpContents) -> DumpContents:
    """Return a record in which index t of every tensor is token t; see `SHIFTED_BY_ONE`."""
    alignment = record.about.get("alignment")
    if not isinstance(alignment, dict):
        return record
    tensors = dict(record.tensors)
    for name, (tag, shape, values, offsets) in record.tensors.items():
        bounds = offsets
        if offsets is None and len(shape) == 2:
            bounds = np.arange(shape[0] + 1, dtype=np.int64) * shape[1]
        if bounds is not None and alignment.get(name) == SHIFTED_BY_ONE:
            flat = shift_right(np.ascontiguousarray(values).reshape(-1), bounds)
            tensors[name] = (tag, shape, flat.reshape(values.shape), offsets)
    return dataclasses.replace(record, tensors=tensors)


def _with_texts_as_tokens(record: DumpContents) -> DumpContents:
    """Return a record; if it has texts and no tokens, their UTF-8 bytes replace tokens."""
    if not record.row_texts or any(name in TOKENS for name in record.tensors):
        return record
    tensors = dict(record.tensors)
    for name, texts in record.row_texts.items():
        if name in TEXTS:
            rows = [text.encode("utf-8", "surrogatepass") for text in texts]
            flat = np.frombuffer(b"".join(rows), np.uint8)
            offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
            tensors.setdefault(TEXTS[name], ("uint8", flat.shape, flat, offsets))
    return dataclasses.replace(record, tensors=tensors)


def _row_count(record: DumpContents) -> int | None:
    if record.entry.section in flow.NAMED_SECTIONS:
        return None
    for texts in (record.samples, record.groups, *record.row_texts.values()):
        if texts is not None:
            return len(texts)
    ragged = [offsets for *_, offsets in record.tensors.values() if offsets is not None]
    if ragged:
        return len(ragged[0]) - 1
    for name in (record.mask, *_SEQUENCES):
        if name is not None and name in record.tensors and len(record.tensors[name][1]) >= 2:
            return record.tensors[name][1][0]
    return None


_SAME_ROWS_RATIO: Final = 0.5
"""Log-probs of the same rows differ by at most this share of the distance to the next row's."""


def rows_start_at(before: ContentsRows, now: ContentsRows, start: int) -> bool:
    """Return whether a shard's rows are those from `start` on in a file of the whole step.

    The file has log-probs from before the update, the shard has log-probs from the update. They are
    close for the same rows, and not for a row and its neighbour.
    """
    old, new = before.find("old_log_probs"), now.find("log_probs")
    mask = None if new is None else now.mask_of("log_probs")
    if old is None or new is None or mask is None or old.width is None or old.width != new.width:
        return False
    count = now.count or 0
    if count < 2 or not 0 <= start <= (before.count or 0) - count:
        return False
    ones = now.ones(mask).reshape(count, -1)
    if not ones.any():
        return False
    old_values = _values(old)[start : start + count]
    new_values = _values(new)
    with np.errstate(invalid="ignore"):
        distance = np.abs(old_values - new_values)[ones].mean()
        shifted = np.abs(np.roll(old_values, 1, axis=0) - new_values)[ones].mean()
    return bool(distance < _SAME_ROWS_RATIO * shifted)


def mask_of_ranks(dump: Dump, entry: DumpEntry, before: ContentsRows) -> Bools | None:
    """Return where the masks of the ranks' shards are 1, for each value of a file of a whole step.

    None if a shard cannot be read or has no mask, or if the rows are in another order.
    """
    ones: list[Bools] = []
    start = 0
    for shard in _shards_of_ranks(dump, entry):
        try:
            now = ContentsRows(dump.read(shard))
        except (OSError, StagescopeError):  # said where the shard itself is compared
            return None
        if not rows_start_at(before, now, start):
            return None
        mask = now.mask_of("log_probs")
        assert mask is not None
        ones.append(now.ones(mask))
        start += now.count or 0
    return np.concatenate(ones) if start and start == before.count else None


def _shards_of_ranks(dump: Dump, entry: DumpEntry) -> Sequence[DumpEntry]:
    found = [
        each
        for each in dump.entries
        if each.section in flow.IDENTIFYING_SECTIONS
        and each.location.step == entry.location.step
        and each.location.rank is not None
    ]
    return sorted(found, key=lambda each: (each.location.rank or 0, each.location.part))


def _values(tensor: RowTensor) -> npt.NDArray[np.float64]:
    values = widened(Tensor(tensor.dtype, tensor.flat)).astype(np.float64)
    return values.reshape(-1, tensor.width or 1)
