"""The methods of `Session` that speak for another process, as an import of its spool does.

They import numpy, which those who only read do without.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

from stagescope.connection import Connection
from stagescope_wire.nonfinite import Json

if TYPE_CHECKING:
    from stagescope_wire.framing import SendResult, WirePayload

_POLL_SECONDS: Final = 2.0


class SendRequests(Connection):
    """Sends events and payloads; `Session` has these methods."""

    def send(
        self, sender: Sequence[Json], events: Sequence[Sequence[Json]],
        payloads: Mapping[int, WirePayload] | None = None,
    ) -> SendResult:  # fmt: skip
        """Send events on behalf of another process; return the refused ones with the reasons.

        An event may be refused in part, such as a scalar that is not a number. The format is
        described in `stagescope_wire.schema`. An event that is sent twice counts once.

        Raises:
            Unauthorized: it needs the operate token.
        """
        from stagescope_wire.framing import pack_batch

        return self.send_packed(pack_batch(sender, events, payloads or {}))

    def send_packed(self, body: bytes) -> SendResult:
        """Send a batch that another process packed; see `send` and `stagescope_wire.framing`."""
        from stagescope_wire.framing import MEDIA_TYPE, SendResult

        answer = self._transport.post_events("/events", body, MEDIA_TYPE)
        return SendResult.from_answer(answer)

    def renew(self, sender: Sequence[Json]) -> None:
        """Tell the service that a process is alive, on its behalf; needs the operate token."""
        self._transport.change("POST", "/poll", {"sender": [*sender], "wait": 0})

    def settled(self, sender: Sequence[Json], seqs: Sequence[int]) -> dict[int, str]:
        """Return seq -> state of those payloads that the service has ingested, after a short wait.

        Raises:
            Unauthorized: it needs the operate token.
        """
        body = {"sender": [*sender], "unreceipted": [*seqs], "wait": _POLL_SECONDS}
        answer = self._transport.change("POST", "/poll", body)
        return {int(seq): str(state) for seq, state in (answer.get("receipts") or {}).items()}
