"""A batch as torch tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

from stagescope.wire.errors import MissingExtra

try:
    import torch
except ImportError as error:
    raise MissingExtra(
        "this conversion needs torch, which is not installed", advice="pip install torch"
    ) from error

if TYPE_CHECKING:
    from stagescope.batch import Batch, Tensor


def tensors(batch: Batch) -> dict[str, torch.Tensor]:
    """Return every tensor by name, a copy on the host with the dtype and the bits as recorded."""
    return {name: tensor_of(batch.tensor(name)) for name in batch}


def tensor_of(tensor: Tensor) -> torch.Tensor:
    """Return one tensor, a copy."""
    values = torch.from_numpy(tensor.values.copy())
    # torch reads 16 bits as bfloat16 from its own int16; of numpy it takes uint16 as a number.
    return values.view(torch.bfloat16) if tensor.dtype == "bfloat16" else values
