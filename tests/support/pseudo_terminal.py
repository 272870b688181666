"""The other end of a pseudo-terminal, to which a command under test writes."""

from __future__ import annotations

import errno
import os
from typing import Final

CHUNK: Final = 4096
"""Most bytes of a read."""


def rest_of(controller: int) -> str:
    """Return what is written until the command closes its end, and close this end."""
    seen = b""
    while more := _read(controller):
        seen += more
    os.close(controller)
    return seen.decode()


def _read(controller: int) -> bytes:
    """Return what was written; b"" once the other end is closed, which Linux reports as EIO."""
    try:
        return os.read(controller, CHUNK)
    except OSError as error:
        if error.errno == errno.EIO:
            return b""
        raise
