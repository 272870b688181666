"""Memory that was never written, with chosen bytes in it."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator
from typing import Final

NAN: Final = 0xFF
"""The byte that makes every float NaN."""

_M_PERTURB: Final = -6  # <malloc.h> of glibc


@contextlib.contextmanager
def leftovers(byte: int) -> Iterator[None]:
    """Have glibc fill what it allocates with a byte, as somebody's earlier tensors would."""
    mallopt = ctypes.CDLL(None).mallopt
    # The lowest eight bits are written inverted; 0 as a whole would switch it off.
    mallopt(_M_PERTURB, 0x100 | (byte ^ 0xFF))
    try:
        yield
    finally:
        mallopt(_M_PERTURB, 0)
