"""The worker's extension of the tests: faults, and the extension that records routes."""

from __future__ import annotations

from stagescope_faults import (  # type: ignore[import-not-found]
    Faults,  # pyright: ignore[reportMissingImports]
)

from stagescope_workers.integrations.vllm_routes import RecordRoutes


class Extension(Faults, RecordRoutes):  # type: ignore[misc]  # found by PYTHONPATH
    """What vLLM's worker inherits."""
