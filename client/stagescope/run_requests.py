"""The methods of `Session` that list, name, hide and delete runs."""

from __future__ import annotations

from typing import Final

from stagescope.answers import Record
from stagescope.connection import LIMIT, Connection, segment
from stagescope.table import Table
from stagescope_wire import render
from stagescope_wire.errors import NotReady
from stagescope_wire.nonfinite import JsonObject

_WAIT_SECONDS: Final = 20.0
"""Seconds of one call of a deletion; a longer one is called again."""


class RunRequests(Connection):
    """Lists and changes runs; `Session` has these methods."""

    def runs(self, *, hidden: bool = False, limit: int = LIMIT) -> Table:
        """Return the runs, the most recently active first; with `hidden` also the hidden ones."""
        return self.table("/runs", {"hidden": hidden or None}, noun="runs", limit=limit)

    def rename_run(self, run: str, display_name: str | None) -> Record:
        """Give a run a name for people; None: its own. Questions still use its own name."""
        return self._change_run(run, {"display_name": display_name}, "run, renamed")

    def hide_run(self, run: str, *, hidden: bool = True) -> Record:
        """Leave a run out of lists, or show it again. It still answers to its name."""
        return self._change_run(run, {"hidden": hidden}, "run, hidden" if hidden else "run, shown")

    def _change_run(self, run: str, changes: JsonObject, title: str) -> Record:
        answer = self._transport.change("PATCH", f"/runs/{segment(run)}", changes)
        return Record(answer, title=title)

    def delete_run(self, run: str, *, dry_run: bool = False) -> Record:
        """Delete a run with its files, and return what it took; return once it is gone.

        With `dry_run` nothing is deleted, and the answer says what would be.

        Raises:
            Conflict: it is live, or its payloads are still being read.
            NotFound: there is no such run.
            NotReady: the service cannot delete all of it now; it tries again by itself.
        """
        query = f"wait={_WAIT_SECONDS:g}&dry_run={str(dry_run).lower()}"
        path = f"/runs/{segment(run)}?{query}"
        while True:
            answer = self._transport.change("DELETE", path, timeout=2 * _WAIT_SECONDS)
            if dry_run or answer["deleted"]:
                return Record(answer, title=_deletion(answer))
            if answer["problem"]:
                raise NotReady(
                    f"run {run} is not deleted yet: {answer['problem']}",
                    advice="the service tries again by itself; the same call may be made again",
                )


def _deletion(answer: JsonObject) -> str:
    """Return what was deleted, or would be, as a sentence."""
    rows = render.counted(answer["catalogue_rows"], "row")
    files = render.counted(answer["files"], "file")
    what = f"{rows} and {files} of {render.format_bytes(answer['bytes'])}"
    if not answer["deleted"]:
        attempts, steps = (
            render.counted(answer[noun], noun.rstrip("s")) for noun in ("attempts", "steps")
        )
        return f"run {answer['run']} has {attempts} and {steps}, and takes {what}"
    before, now = answer["previous_catalogue_bytes"], answer["catalogue_bytes"]
    catalogue = "the database server uses the space again"
    if before is not None:
        sizes = map(render.format_bytes, (now, before))
        catalogue = "the catalogue takes {}, before {}".format(*sizes)
    return f"run {answer['run']} is deleted: {what} are free; {catalogue}"
