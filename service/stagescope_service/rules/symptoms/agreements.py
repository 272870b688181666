"""Facts that speak against a symptom as a cause: what was compared and agrees."""

from __future__ import annotations

from stagescope_service.rules.evidence import Evidence
from stagescope_service.rules.history import RunHistory
from stagescope_wire.render import counted


def weights_agree(history: RunHistory, evidence: Evidence) -> str | None:
    """Return that the checksums of all weights agree since a symptom began; None: they do not, or
    none were compared."""
    compared = history.compared_weights(evidence.since_step)
    if not compared or any(row["differ"] or row["missing"] for row in compared):
        return None
    agreeing = [row for row in compared if row["agree"]]
    if not agreeing:
        return None
    tensors = max(row["agree"] for row in agreeing)
    return (
        f"the engine received what the trainer sent: {counted(tensors, 'tensor')} agree in "
        f"{counted(len(agreeing), 'version')} since then"
    )
