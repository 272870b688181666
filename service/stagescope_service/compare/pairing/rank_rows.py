"""Files of a whole step that hold the rows of rank 0's first part, then those of its second, ...

NexRL's `old_log_probs` is such a file: it has neither ids, tokens nor a mask. That its rows have
this order is assumed only if the log-probs of the ranks' own shards agree with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stagescope.batch import Tensor, widened
from stagescope.wire.errors import StagescopeError
from stagescope_service.compare.flow import IDENTIFYING_SECTIONS
from stagescope_service.compare.pairing.contents_rows import ContentsRows
from stagescope_service.dumps.records import Dump, DumpEntry
from stagescope_service.rows.ragged import Bools, RowTensor

_SAME_ROWS_RATIO: Final = 0.5
"""Log-probs of the same rows differ by at most this share of the distance to the next row's."""


def rows_start_at(before: ContentsRows, now: ContentsRows, start: int) -> bool:
    """Return whether a shard's rows are those from `start` on in a file of the whole step.

    The file has log-probs before the update and the shard those in it: they are close for the same
    rows, and not for a row and its neighbour.
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
        if each.section in IDENTIFYING_SECTIONS
        and each.location.step == entry.location.step
        and each.location.rank is not None
    ]
    return sorted(found, key=lambda each: (each.location.rank or 0, each.location.part))


def _values(tensor: RowTensor) -> npt.NDArray[np.float64]:
    values = widened(Tensor(tensor.dtype, tensor.flat)).astype(np.float64)
    return values.reshape(-1, tensor.width or 1)
