"""The disks of the nodes, through their ingestors. A thin Ray shell."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ray import exceptions

from stagescope.errors import Unreachable
from stagescope_service.engine.ingestor import Ingestors


class RayDisks:
    """What `retention.Disks` promises; every call raises `Unreachable` where a node is gone."""

    def __init__(self, ingestors: Ingestors) -> None:
        self._ingestors = ingestors

    def place(self, node_id: str | None) -> str:
        """Return the node that stands in for one that is unknown or gone."""
        return self._ingestors.place(node_id)

    async def kept_files(self, node_id: str) -> list[str]:
        """Return the paths of the kept files that a node sees."""
        found: list[str] = await self._ask(node_id, "kept_files")
        return found

    async def describe_kept(
        self, node_id: str, paths: Sequence[str]
    ) -> list[tuple[dict[str, Any], dict[str, Any]]]:
        """Return (row of artifacts, job) of those files that can be read."""
        found: list[tuple[dict[str, Any], dict[str, Any]]]
        found = await self._ask(node_id, "describe_kept", paths)
        return found

    async def discard(self, node_id: str, paths: Sequence[str]) -> list[str]:
        """Delete files; return those that are gone."""
        gone: list[str] = await self._ask(node_id, "discard", paths)
        return gone

    async def _ask(self, node_id: str, method: str, *arguments: Any) -> Any:
        try:
            return await getattr(self._ingestors.on(node_id), method).remote(*arguments)
        except exceptions.RayError as error:
            self._ingestors.forget(node_id)
            raise Unreachable(
                f"the ingestor of node {node_id} cannot be asked: {type(error).__name__}",
                advice="Ray is restarting it; it is asked again",
            ) from error
