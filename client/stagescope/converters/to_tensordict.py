"""A batch as a TensorDict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagescope.converters.to_torch import tensor_of, tensors
from stagescope.wire.errors import MissingExtra

try:
    import tensordict
except ImportError as error:
    raise MissingExtra(
        "this conversion needs tensordict, which is not installed", advice="pip install tensordict"
    ) from error

if TYPE_CHECKING:
    from stagescope.batch import Batch


def tensordict_of(batch: Batch) -> tensordict.TensorDict:
    """Return a TensorDict with batch size [rows].

    Strings are a `NonTensorStack` of the rows; what has no rows (a loss) and `meta` are non-tensor
    data of the whole.
    """
    of_rows = {name: value for name, value in tensors(batch).items() if name in batch.tensors}
    found = tensordict.TensorDict(of_rows, batch_size=[batch.rows])
    for name, texts in batch.strings.items():
        found[name] = tensordict.NonTensorStack(*texts)
    for name, other in batch.others.items():
        found.set_non_tensor(name, tensor_of(other))
    found.set_non_tensor("meta", dict(batch.meta))
    return found
