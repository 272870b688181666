"""Lists of responses beside padded log-probs: the mask says on which side the rows are padded."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from stagescope_wire.tensorfile import WireTensor

_IDS = "responses"
_MASK = "response_mask"


def with_padded_responses(tensors: Mapping[str, WireTensor]) -> dict[str, WireTensor]:
    """Return the tensors with `responses` padded by 0 as the mask [rows, tokens] is.

    The responses may begin at the first column, or end at the last one. In exactly one of the two
    cases the model's tokens must lie inside the responses. Otherwise nothing changes.
    """
    found = dict(tensors)
    mask, ids = tensors.get(_MASK), tensors.get(_IDS)
    if mask is None or ids is None or ids[3] is None or mask[3] is not None or len(mask[1]) != 2:
        return found
    (rows, width), flat, offsets = mask[1], ids[2].reshape(-1), ids[3].reshape(-1)
    lengths = np.diff(offsets)[:, None]
    is_whole = len(offsets) == rows + 1 and offsets[0] == 0 and offsets[-1] == flat.size
    if not is_whole or mask[2].size != rows * width or (lengths < 0).any():
        return found
    on, column = mask[2].reshape(rows, width) != 0, np.arange(width)
    from_first, to_last = column < lengths, column >= width - lengths
    sides = [side for side in (from_first, to_last) if not (on & ~side).any()]
    if (lengths > width).any() or not sides or not np.array_equal(sides[0], sides[-1]):
        return found
    padded = np.zeros((rows, width), flat.dtype)
    padded[sides[0]] = flat
    found[_IDS] = (ids[0], (rows, width), padded, None)
    return found
