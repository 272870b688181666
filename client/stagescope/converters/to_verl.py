"""A batch as verl's DataProto."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from stagescope.converters.to_torch import tensor_of, tensors
from stagescope.wire.errors import MissingExtra

try:
    from verl import DataProto  # pyright: ignore[reportMissingImports]
except ImportError as error:
    raise MissingExtra(
        "this conversion needs verl, which is not installed", advice="pip install verl"
    ) from error

if TYPE_CHECKING:
    from stagescope.batch import Batch


def dataproto(batch: Batch) -> DataProto:
    """Return a DataProto.

    `non_tensor_batch` has the strings, group ids also as verl's `uid`; `meta_info` has
    `global_steps`, the batch's `meta`, and what has no rows (a loss).
    """
    texts = dict(batch.strings)
    if "group_ids" in texts:
        texts.setdefault("uid", texts["group_ids"])
    meta: dict[str, Any] = {**batch.meta, **{n: tensor_of(t) for n, t in batch.others.items()}}
    if batch.step is not None:
        meta["global_steps"] = batch.step
    return DataProto.from_dict(
        tensors={name: value for name, value in tensors(batch).items() if name in batch.tensors},
        non_tensors={name: np.array(list(column), object) for name, column in texts.items()},
        meta_info=meta,
    )
