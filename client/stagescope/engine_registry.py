"""Long-lived inference engines that are registered with the service, by name."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from stagescope.answers import Record
from stagescope.asking import LIMIT, Asking, segment
from stagescope.engines.http import engine_url
from stagescope.frames import Table

if TYPE_CHECKING:
    from stagescope.engines import HttpEngine

_ENGINE_ORDER: Final = ("name", "state", "age_seconds", "kind", "url", "model", "used_by")


class EngineRegistry(Asking):
    """The registered engines."""

    def engines(self, *, check: bool = False, limit: int = LIMIT) -> Table:
        """Return the registered long-lived engines, and how each answered last.

        With `check` the service asks each engine's health path first, two seconds at most.
        """
        params = {"check": "true" if check else None}
        return self.table("/engines", params, title="engines", order=_ENGINE_ORDER, limit=limit)

    def engine(
        self, name: str, *, key_file: str | Path | None = None, timeout: float = 120.0
    ) -> HttpEngine:
        """Return a registered engine by its name, ready to be asked; see `stagescope.engines`.

        Args:
            name: as it was registered.
            key_file, timeout: as `stagescope.engines.connect`.

        Raises:
            NotFound: no engine is called so.
            EngineError: it does not answer, or is no inference engine any more.
        """
        from stagescope.engines import connect

        row = self.get(f"/engines/{segment(name)}")
        return connect(str(row["url"]), key_file=key_file, timeout=timeout)

    def add_engine(self, url: str, **said: Any) -> Record:
        """Register an engine with the service; needs the operate token.

        Args:
            url: `http://HOST:PORT`, or HOST:PORT.
            said: `stagescope.engines.registry` has its ENGINE_FIELDS; None is left out.
        """
        body = {name: value for name, value in said.items() if value is not None}
        answer = self._transport.change("POST", "/engines", {**body, "url": engine_url(url)})
        return Record(answer or {}, title="registered engine")

    def remove_engine(self, name: str) -> Record:
        """Take an engine out of the registry; the engine itself is left alone.

        Raises:
            NotFound: no engine is called so.
        """
        answer = self._transport.change("DELETE", f"/engines/{segment(name)}")
        return Record(answer or {"name": name}, title="engine, no longer registered")
