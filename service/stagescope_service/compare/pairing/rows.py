"""A record's tensors by row: where each row's values lie, and which of them count.

Of a padded tensor only what its mask covers can be held against another: padding on the left, on
the right and to other widths are the same rows. Everything here is index arithmetic over whole
tensors; nothing loops over rows or tokens.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import itertools
import math
from typing import Any, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from stagescope.wire.errors import InvalidTensor
from stagescope_service.compare.flow import MASKS, NAMED, TARGETS, TEXTS, TOKENS, is_structural
from stagescope_service.compare.pairing.layout import (
    Layout,
    before_first,
    count_by_row,
    cumulative,
    same_offsets,
    spans,
    turned,
)
from stagescope_service.dumps.records import AFTER, Record

Array = npt.NDArray[Any]
Int64 = npt.NDArray[np.int64]

WHOLE: Final = ("tokens", "input_ids", TARGETS, "input_tokens")
"""Tensors of prompt and response together; of a datum its targets lie as its mask does."""
_SEQUENCES: Final = (
    "tokens", "responses", "input_ids", "prompts", "log_probs", "old_log_probs",
    "rollout_log_probs", "loss_mask", "response_mask",
)  # fmt: skip
"""Tensors whose first dimension is that of the rows, where nothing else says how many there are."""


class Extent(NamedTuple):
    """Which values of a tensor count.

    Attributes:
        kind: 'mask' (where its mask is 1), 'span' (from the first 1 to the last), 'full' (all
            that is no padding), 'row' (nothing says what is padding), 'response' (of a whole
            sequence, the span of a mask that is of its response alone).
        keep: bool of each value, or None: all.
    """

    kind: str
    keep: Array | None


class Rows:
    """The row tensors of a record; `count` is None where it has none."""

    def __init__(self, record: Record) -> None:
        record = _unshifted(_with_texts(record))
        self.record = record
        self.count = _row_count(record)
        self._layouts: dict[str, Layout | None] = {}
        self._ones: dict[str, Array] = {}
        self._spans: dict[str, Array] = {}

    @functools.cached_property
    def names(self) -> tuple[str, ...]:
        """Names of the tensors that are by row."""
        return tuple(name for name in self.record.tensors if self.layout(name) is not None)

    @property
    def has_fragments(self) -> bool:
        """Whether its rows may be fragments of samples: they say where their tokens lie."""
        return "positions" in self.names or "token_offset" in self.names

    def layout(self, name: str) -> Layout | None:
        """Return a tensor by row, None if it is not there or not by row."""
        if name not in self._layouts:
            self._layouts[name] = self._laid_out(name)
        return self._layouts[name]

    def known(self, name: str) -> Layout:
        """Return a tensor that is by row."""
        layout = self.layout(name)
        assert layout is not None, name
        return layout

    def _laid_out(self, name: str) -> Layout | None:
        tensor = self.record.tensors.get(name)
        if tensor is None or self.count is None:
            return None
        tag, shape, values, offsets = tensor
        flat = np.ascontiguousarray(values).reshape(-1)
        if offsets is not None:
            bounds = np.asarray(offsets, np.int64)
            if len(bounds) != self.count + 1:
                return None
            if bounds[0] != 0 or bounds[-1] != len(flat) or (np.diff(bounds) < 0).any():
                raise InvalidTensor(f"{self.record.entry.path}: rows of {name} overlap or lack")
            return Layout(tag, flat, bounds, None, shape)
        if not shape or shape[0] != self.count:
            return None
        width = math.prod(shape[1:])
        return Layout(tag, flat, np.arange(self.count + 1, dtype=np.int64) * width, width, shape)

    def ones(self, name: str) -> Array:
        """Return where a mask is 1, as bools in memory order."""
        if name not in self._ones:
            layout = self.known(name)
            one: Any = 0x3F80 if layout.dtype == "bfloat16" else 1
            self._ones[name] = layout.flat == one
        return self._ones[name]

    def share(self, other: Rows, name: str) -> None:
        """Take over what is known of a mask that is the same in another record."""
        self._ones[name] = other.ones(name)

    def mask_of(self, name: str) -> str | None:
        """Return the mask that is as wide as a tensor, row by row."""
        layout = self.known(name)
        candidates = dict.fromkeys(
            mask for mask in (self.record.mask, "response_mask", "loss_mask") if mask is not None
        )
        for mask in candidates:
            there = self.layout(mask)
            if there is not None and same_offsets(there, layout):
                return mask
        return None

    def extents(self, name: str) -> dict[str, Extent]:
        """Return the ways in which a tensor's values may be chosen, the most exact first."""
        layout = self.known(name)
        if layout.width == 1 and len(layout.shape) == 1:
            return {"row": Extent("row", None)}
        found: dict[str, Extent] = {}
        mask = self.mask_of(name)
        if is_structural(name) or not layout.dtype.startswith(("float", "bfloat")):
            if (full := self._full(name, layout)) is not None:
                found["full"] = full
            if mask is not None:
                found["span"] = Extent("span", self._span(mask))
            elif name in WHOLE and (ones := self._ones_at_end(layout)) is not None:
                found["response"] = Extent("response", spans(ones, layout.offsets))
        elif mask is not None:
            found["mask"] = Extent("mask", self.ones(mask))
        return found | {"row": Extent("row", None)}

    def _full(self, name: str, layout: Layout) -> Extent | None:
        if layout.width is None:
            return Extent("full", None)
        attention = self.layout("attention_mask")
        if attention is None or attention.width is None or name == "attention_mask":
            return None
        if attention.width == layout.width:
            return Extent("full", self.ones("attention_mask"))
        if name in ("prompts", "responses", "response_mask") and attention.width > layout.width:
            # The attention mask is of prompt and response, one after the other.
            both = self.ones("attention_mask").reshape(-1, attention.width)
            part = both[:, : layout.width] if name == "prompts" else both[:, -layout.width :]
            return Extent("full", np.ascontiguousarray(part).reshape(-1))
        return None

    def _ones_at_end(self, layout: Layout) -> Array | None:
        """Return where a mask of the responses alone is 1 in whole sequences, which end in them."""
        mask = self.layout("response_mask")
        if mask is None or (mask.width is None) != (layout.width is None):
            return None
        if (mask.lengths > layout.lengths).any():
            return None
        ones = np.zeros(len(layout.flat), bool)
        starts = layout.offsets[1:] - mask.lengths - mask.offsets[:-1]
        ones[np.arange(len(mask.flat)) + np.repeat(starts, mask.lengths)] = self.ones(
            "response_mask"
        )
        return ones

    def spread(self, name: str, other: Rows) -> bool:
        """Give every token of a row its one value where another record has one for each token."""
        mine, theirs = self.known(name), other.known(name)
        mask = next((each for each in MASKS if each in self.names), None)
        if len(mine.shape) > 1 or mine.width is None or theirs.width == len(theirs.shape) == 1:
            return False
        if mask is None or other.mask_of(name) is None:
            return False
        like = self.known(mask)
        flat = np.repeat(mine.flat, like.lengths)
        self._layouts[name] = Layout(mine.dtype, flat, like.offsets, like.width, like.shape)
        return True

    def _span(self, mask: str) -> Array:
        """Return which values lie from the first 1 of their row to the last."""
        if mask not in self._spans:
            self._spans[mask] = spans(self.ones(mask), self.known(mask).offsets)
        return self._spans[mask]

    def content(self) -> tuple[list[str] | None, list[str] | None]:
        """Return hashes of each row's response tokens and of its prompt tokens, None if unknown."""
        responses = prompts = None
        if "responses" in self.names:
            responses = self._hashes("responses", self._sampled("responses"))
        if "prompts" in self.names:
            prompts = self._hashes("prompts", self._best("prompts"))
        whole = next((n for n in WHOLE if n in self.names), None)
        if whole is not None and (mask := self.mask_of(whole)) is not None:
            span = self._span(mask)
            responses = responses or self._hashes(whole, span)
            if prompts is None and (full := self.extents(whole).get("full")) is not None:
                before = before_first(self.ones(mask), self.known(whole).offsets)
                prompts = self._hashes(whole, before if full.keep is None else before & full.keep)
        elif whole is not None and responses is None:
            responses = self._hashes(whole, self._best(whole))
        return responses, prompts

    def digests(self) -> list[str]:
        """Return a hash of all that counts of each row, over every tensor."""
        each = [self._hashes(name, self._best(name)) for name in sorted(self.names)]
        return ["".join(parts) for parts in zip(*each, strict=True)]

    def counted(self) -> Int64:
        """Return how many tokens of each row count, 0 where no tensor is by token."""
        mask = next((m for m in (self.record.mask, *MASKS) if m and m in self.names), None)
        if mask is None:
            return np.zeros(self.count or 0, np.int64)
        return count_by_row(self.ones(mask), self.known(mask).offsets)

    def _sampled(self, name: str) -> Array | None:
        """Return which tokens of responses the policy made, from first to last, in every format.

        Of a row without any, all that is no padding.
        """
        mask = self.mask_of(name)
        if mask is None:
            return self._best(name)
        layout = self.known(name)
        none = np.repeat(count_by_row(self.ones(mask), layout.offsets) == 0, layout.lengths)
        best = self._best(name)
        return self._span(mask) | (none if best is None else none & best)

    def _best(self, name: str) -> Array | None:
        return next(iter(self.extents(name).values())).keep

    def _hashes(self, name: str, keep: Array | None) -> list[str]:
        layout = self.known(name)
        flat, offsets = layout.flat, layout.offsets
        if name in TOKENS | MASKS and layout.dtype not in ("bfloat16", "float16"):
            flat = flat.astype(np.int64, copy=False)  # int32 and int64 ids are the same tokens
        if keep is not None:
            flat, offsets = flat[keep], cumulative(count_by_row(keep, offsets))
        data, size = flat.view(np.uint8), flat.dtype.itemsize
        bounds = (offsets * size).tolist()
        return [
            hashlib.blake2b(data[start:stop].data, digest_size=12).hexdigest()
            for start, stop in itertools.pairwise(bounds)
        ]


def _unshifted(record: Record) -> Record:
    """Return a record in which index t of every tensor is token t; see `formats.areal`."""
    said = record.about.get("alignment")
    moved = [n for n, text in said.items() if text == AFTER] if isinstance(said, dict) else []
    tensors = dict(record.tensors)
    for name in moved:
        if name in tensors:
            tag, shape, values, offsets = tensors[name]
            bounds = offsets
            if offsets is None and len(shape) == 2:
                bounds = np.arange(shape[0] + 1, dtype=np.int64) * shape[1]
            if bounds is not None:
                flat = turned(np.ascontiguousarray(values).reshape(-1), bounds)
                tensors[name] = (tag, shape, flat.reshape(values.shape), offsets)
    return dataclasses.replace(record, tensors=tensors) if moved else record


def _with_texts(record: Record) -> Record:
    """Return a record without tokens with its texts as their bytes in UTF-8."""
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


def _row_count(record: Record) -> int | None:
    if record.entry.section in NAMED:
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
