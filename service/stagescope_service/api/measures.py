"""The statistics of a step: the stored whole of a closed one, assembled now for an open one."""

from __future__ import annotations

from stagescope_service.store.catalogue import Catalogue


class Measures:
    """Reads and remembers the statistics of steps."""

    def __init__(self, catalogue: Catalogue, size: int) -> None:
        self._catalogue = catalogue

    def published(self, attempt_id: int, step: int) -> dict[str, float]:
        """Return the published metrics of a closed step's whole."""
        return {}
