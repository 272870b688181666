"""What this process says of orders outside the stages that they order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from stagescope.schema import DUMP, Work
from stagescope_workers.capture.reckoning import Models, reckon
from stagescope_workers.outbox import Outbox


class OrderAnswers:
    """Answers orders that came too late, and those that are asked what they would take."""

    def __init__(self, outbox: Outbox) -> None:
        self.models = Models()
        self._outbox = outbox

    def missed(self, capture: Mapping[str, Any], step: int, stage: str) -> None:
        """Say that a capture came too late for a stage."""
        fields = Work(step, None, stage).fields()
        error = "the capture arrived after this stage had begun here"
        fields |= {"capture_id": capture["capture_id"], "state": "missed", "error": error}
        self._outbox.put(DUMP, fields)

    def estimate(self, capture: Mapping[str, Any], data_dir: str | None) -> None:
        """Say what an order would take here; in the background thread."""
        try:
            said = reckon(capture, self.models, data_dir)
            error = None
        except Exception as failure:  # the order may be what cannot be carried out
            said = [(str(capture["stages"][0]), {"basis": "unknown"})]
            error = f"{type(failure).__name__}: {failure}"[:2000]
        for stage, estimate in said:
            fields = Work(None, None, stage).fields()
            fields |= {"capture_id": capture["capture_id"], "state": "estimated"}
            self._outbox.put(DUMP, {**fields, "estimate": estimate, "error": error})
