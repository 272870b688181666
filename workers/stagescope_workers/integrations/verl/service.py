"""Whether there is a service to report to; asked of the environment and of Ray's name server."""

from __future__ import annotations

import os
import time
from typing import Final

from stagescope_workers.link import RayLink

_LOOK_AGAIN_SECONDS: Final = 5.0

_found = False
_looked = float("-inf")


def is_there() -> bool:
    """Say whether a service was there at any time; looked for at most every five seconds.

    Once found it is taken to come back: what it misses meanwhile waits in the probe, bounded.
    """
    global _found, _looked
    now = time.monotonic()
    if not _found and now - _looked > _LOOK_AGAIN_SECONDS:
        _looked = now
        _found = bool(os.environ.get("STAGESCOPE_URL")) or RayLink.find() is not None
    return _found
