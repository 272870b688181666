"""Whether the head of the Ray cluster answers. No Ray in here.

Actors run on when the head's GCS is gone: they answer each other and HTTP for about a minute, until
Ray ends them. Where Redis is behind the GCS, a new one takes over meanwhile.
"""

from __future__ import annotations

import socket
from typing import Final

FAILED_SECONDS: Final = 2.0
"""How long calls fail until the head counts as gone,"""
PENDING_SECONDS: Final = 20.0
"""and how long one may wait for its answer on a busy machine."""
_CONNECT_SECONDS: Final = 2.0


class HeadWatch:
    """Notes whether the calls to the head succeed; used from one event loop, except `check`.

    Args:
        address: of the GCS, host:port.
    """

    def __init__(self, address: str) -> None:
        self.address = address
        self._since: float | None = None
        """When the first of the calls began that have not been answered; monotonic seconds."""
        self._reason = ""

    def check(self) -> None:
        """Raise OSError where nothing listens: Ray itself would wait for a minute."""
        host, _, port = self.address.rpartition(":")
        if port.isdecimal():
            at = (host.strip("[]"), int(port))
            socket.create_connection(at, timeout=_CONNECT_SECONDS).close()

    def asked(self, now: float) -> None:
        """Note that a call begins."""
        if self._since is None:
            self._since = now

    def answered(self) -> None:
        """Note that the call succeeded."""
        self._since, self._reason = None, ""

    def failed(self, reason: str) -> bool:
        """Note that the call failed; return whether the reason is news."""
        is_news, self._reason = reason != self._reason, reason
        return is_news

    def problem(self, now: float) -> str:
        """Return what is wrong with the head; "" while it answers.

        Args:
            now: the monotonic clock, seconds.
        """
        patience = FAILED_SECONDS if self._reason else PENDING_SECONDS
        if self._since is None or (seconds := now - self._since) < patience:
            return ""
        reason = self._reason or "the call is not answered"
        return (
            f"the head at {self.address} has not answered for {seconds:.0f} s ({reason}). Events "
            "are still recorded, but Ray ends the service about a minute after its head died, "
            "unless the head comes back. `stagescope serve` starts the service again with the "
            "same data"
        )
