"""The reading side of the store: what the API asks, from its own process.

Every method opens one read transaction, so an answer is of one moment, and returns plain dict
rows whose keys are the columns of `tables.py`. A `Catalogue` may be used from many threads; it
cannot write. Lists take `limit` and `offset`, and say in which order they come.

Filters are keyword arguments named as the columns; None is no filter, a sequence is any of it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any, Final, TypeAlias

import sqlalchemy as sa

from stagescope.errors import CatalogueUnavailable
from stagescope_service.store import connect, migrate, overview, paces, retention, rollouts, weights
from stagescope_service.store.base import Row
from stagescope_service.store.snapshot import rows
from stagescope_service.store.tables import TABLES

Filter: TypeAlias = str | int | bool | Sequence[str] | Sequence[int] | None

LIMIT: Final = 1000


class Catalogue:
    """Read the catalogue at `url` (the same URL that `SqlStore` writes).

    Raises:
        CatalogueUnavailable: by every method, when there is no catalogue of this version that can
            be read now. The next call tries again.
    """

    def __init__(self, url: str) -> None:
        self._where = connect.shown(url)
        self._path: Path | None = connect.sqlite_path(url)
        self._file = connect.file_id(self._path) if self._path else None
        self._engine = connect.reader_engine(url)

    def close(self) -> None:
        """Close every connection."""
        self._engine.dispose()

    def check(self) -> None:
        """Raise `CatalogueUnavailable` unless there is a catalogue of this version."""
        with connect.explained(self._where), self._connect() as connection:
            revision = migrate.current(connection)
        if revision != migrate.HEAD:
            raise CatalogueUnavailable(
                f"catalogue {self._where} is of revision {revision!r}",
                expected=repr(migrate.HEAD),
                advice="start the service of this version: it upgrades the catalogue on open",
            )

    # --- runs and attempts ------------------------------------------------------------------

    def runs(self, *, limit: int = LIMIT, offset: int = 0) -> list[Row]:
        """Return the runs, last active first.

        Each with `attempts` (how many), `attempt_id`, `attempt` and `attempt_key` of the newest,
        `last_wall` (of its last process to be heard) and `live`.
        """
        return self._rows(overview.runs().limit(limit).offset(offset))

    def run(self, run: str) -> Row | None:
        """Return one run as `runs` does, or None."""
        return self._first(overview.runs(run))

    def live_runs(self, since: float = 0.0) -> list[Row]:
        """Return, as `runs` does, those with a process that was heard at `since` or later.

        Processes that finished or lapsed do not count.
        """
        return [
            row
            for row in self._rows(overview.runs())
            if row["live"] and (row["last_wall"] or 0.0) >= since
        ]

    def attempts(self, run: str | None = None) -> list[Row]:
        """Return attempts, newest first, with `last_wall`, `processes` and `live`."""
        return self._rows(overview.attempts(run))

    def attempt(self, attempt_id: int) -> Row | None:
        """Return one attempt as `attempts` does, or None."""
        return self._first(overview.attempts(attempt_id=attempt_id))

    def find_attempt(self, run: str, number: int | None = None) -> Row | None:
        """Return attempt `number` of a run, the newest where it is None; None if there is none."""
        return self._first(overview.attempts(run, number=number))

    def training_attempt(self) -> Row | None:
        """Return the attempt whose training stage began last, of all runs; None at the start."""
        return self._first(overview.training_attempt())

    def attempt_of_step(self, run: str, step: int) -> Row | None:
        """Return the newest attempt of a run that has `step`, or None."""
        return self._first(overview.attempts(run, step=step))

    # --- steps ------------------------------------------------------------------------------

    def steps(
        self,
        attempt_id: int | None = None,
        *,
        run: str | None = None,
        before: int | None = None,
        limit: int = LIMIT,
    ) -> list[Row]:
        """Return steps, newest first, with `run`, `attempt`, `losses`, `has_whole` (not the blob).

        Args:
            attempt_id: of this attempt; None for all attempts of `run`.
            run: of this run; None for all.
            before: only steps smaller than this: the last step of the page before.
            limit: how many.
        """
        return self._rows(overview.steps(attempt_id, run, before).limit(limit))

    def step(self, attempt_id: int, step: int) -> Row | None:
        """Return one step with its blob `whole`, or None."""
        return self._one("steps", attempt_id=attempt_id, step=step)

    def newest_whole(self, run: str | None) -> Row | None:
        """Return the newest step of a run's newest attempt that has a whole, with its blob.

        Args:
            run: the run; None for the one that trained last.
        """
        return self._first(overview.newest_whole(run))

    def parts_mark(self, attempt_id: int, step: int) -> int | None:
        """Return what a step's whole must hold (`steps.parts_mark`), None where nothing."""
        table = TABLES["steps"]
        chosen = (table.c.attempt_id == attempt_id) & (table.c.step == step)
        found = self._rows(sa.select(table.c.parts_mark).where(chosen))
        return found[0]["parts_mark"] if found else None

    def stages(
        self,
        attempt_id: int,
        step: Filter = None,
        *,
        stage: Filter = None,
        role: Filter = None,
        rank: Filter = None,
        policy_version: Filter = None,
        superseded: bool | None = False,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return stages in the order in which they began; superseded ones only when asked."""
        where = _where("stages", {**locals(), "superseded": True if superseded else None})
        if superseded is False:  # null is unknown, and unknown is not superseded
            column = TABLES["stages"].c.superseded
            where.append(column.is_(None) | (column == sa.false()))
        return self._page("stages", where, "begin_wall rank work_key", limit, offset)

    def open_stages(self, attempt_id: Filter = None, *, limit: int = LIMIT) -> list[Row]:
        """Return stages that began and did not end, oldest first."""
        table = TABLES["stages"]
        where = [*_where("stages", {"attempt_id": attempt_id}), table.c.end_wall.is_(None)]
        where.append(sa.func.coalesce(table.c.status, "open") == "open")
        return self._page("stages", where, "begin_wall rank", limit, 0)

    def processes(
        self, attempt_id: Filter = None, *, role: Filter = None, rank: Filter = None
    ) -> list[Row]:
        """Return the processes of an attempt by role, rank and time: also those that are gone."""
        return self._page("processes", _where("processes", locals()), "role rank first_wall")

    # --- what ranks handed over -------------------------------------------------------------

    def scalars(
        self,
        attempt_id: Filter,
        step: Filter = None,
        *,
        name: Filter = None,
        stage: Filter = None,
        role: Filter = None,
        rank: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return scalars by step, name and rank; `value` is a float again, also nan and inf."""
        found = self._page(
            "scalars", _where("scalars", locals()), "step name role rank work_key", limit, offset
        )
        for row in found:
            if row["nonfinite"]:
                row["value"] = float(row["nonfinite"])
        return found

    def scalar_names(self, attempt_id: int) -> list[str]:
        """Return the names of an attempt's scalars."""
        table = TABLES["scalars"]
        query = sa.select(table.c.name).where(table.c.attempt_id == attempt_id).distinct()
        return [row["name"] for row in self._rows(query.order_by(table.c.name))]

    def payloads(
        self,
        attempt_id: Filter = None,
        step: Filter = None,
        *,
        stage: Filter = None,
        role: Filter = None,
        rank: Filter = None,
        state: Filter = None,
        consumed_step: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return payloads in the order in which they were announced."""
        return self._page(
            "payloads",
            _where("payloads", locals()),
            "announced_wall incarnation seq",
            limit,
            offset,
        )

    def summaries(
        self,
        attempt_id: int,
        step: Filter = None,
        *,
        stage: Filter = None,
        role: Filter = None,
        rank: Filter = None,
        pair: Filter = None,
        policy_version: Filter = None,
    ) -> list[Row]:
        """Return the summaries of payloads with their blobs, by stage, rank and part."""
        return self._page(
            "summaries",
            _where("summaries", locals()),
            "step stage role rank occurrence epoch minibatch microbatch incarnation seq pair",
        )

    def streams(self, attempt_id: int, *, stage: Filter = None) -> list[Row]:
        """Return what is known of an attempt's log-prob streams."""
        return self._page("streams", _where("streams", locals()), "stream role stage")

    def samples(
        self,
        attempt_id: int,
        step: Filter = None,
        *,
        sample_uid: Filter = None,
        group_id: Filter = None,
        prompt_hash: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return samples by step and sample_uid."""
        return self._page(
            "samples", _where("samples", locals()), "step sample_uid clock", limit, offset
        )

    def consumed(self, attempts: Sequence[int], attempt_id: int, step: int) -> list[Row]:
        """Return the rows of samples that a step consumed and another process made."""
        return self._rows(rollouts.consumed_samples(attempts, attempt_id, step))

    def rollout_payloads(
        self, attempts: Sequence[int], step: int, versions: Collection[int | None]
    ) -> list[Row]:
        """Return ingested rollouts of a step, or of no step and one of `versions`, oldest first."""
        return self._rows(rollouts.rollout_payloads(attempts, step, versions))

    # --- weights ----------------------------------------------------------------------------

    def weights(self, attempt_id: int, version: int) -> list[Row]:
        """Return the records of a version, in the order in which they were made."""
        return self._page(
            "weights", _where("weights", locals()), "wall side role rank incarnation seq"
        )

    def weight_manifests(self, manifests: Sequence[str]) -> dict[str, bytes]:
        """Return digest -> manifest, packed, of those that are there."""
        table = TABLES["weight_manifests"]
        found = self._rows(sa.select(table).where(table.c.manifest.in_(manifests)))
        return {row["manifest"]: row["tensors"] for row in found}

    def newest_weights(self, attempt_id: int) -> int | None:
        """Return the highest version of weights that an attempt recorded, or None."""
        version: int | None = self._rows(weights.newest_version(attempt_id))[0]["version"]
        return version

    def weight_versions(self, attempt_id: int, step: int) -> list[int]:
        """Return the versions of weights that were recorded at a step, the highest first."""
        return [row["version"] for row in self._rows(weights.versions_of_step(attempt_id, step))]

    def weight_verdicts(self, attempt_id: int, *, limit: int = LIMIT, offset: int = 0) -> list[Row]:
        """Return what became of each version of an attempt, the newest first."""
        where = _where("weight_verdicts", {"attempt_id": attempt_id})
        return self._page("weight_verdicts", where, "-version", limit, offset)

    def incomplete_weights(self, attempt_id: int, before: int) -> list[int]:
        """Return the versions below `before` of which somebody was still expected."""
        return [row["version"] for row in self._rows(weights.incomplete(attempt_id, before))]

    def unweighed(self) -> list[tuple[int, int]]:
        """Return (attempt_id, version) of which more was recorded than was compared."""
        return [(row["attempt_id"], row["version"]) for row in self._rows(weights.unweighed())]

    def odd_replicas(self) -> list[Row]:
        """Return each time that a rank's weights were not its replicas', the last first."""
        return self._page("odd_replicas", [], "-wall attempt_id version side role rank")

    # --- what the service noticed, kept and lost --------------------------------------------

    def findings(
        self,
        *,
        run: Filter = None,
        attempt_id: Filter = None,
        step: Filter = None,
        kind: Filter = None,
        severity: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return findings, the last seen first."""
        return self._page(
            "findings", _where("findings", locals()), "-last_wall finding_id", limit, offset
        )

    def trigger_rules(self) -> Row | None:
        """Return the rules of triggers that were given last; `document` holds secrets."""
        found = self._page("trigger_rules", [], "-revision", 1)
        return found[0] if found else None

    def pinned_steps(self, run: str | None = None) -> list[Row]:
        """Return run, attempt and step of the steps whose payloads are pinned, newest first."""
        return self._rows(overview.pinned_steps(run))

    def firings(
        self,
        *,
        run: Filter = None,
        attempt_id: Filter = None,
        step: Filter = None,
        rule: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return what fired, the last first; firings that were taken back too."""
        return self._page(
            "firings",
            _where("firings", locals()),
            "-wall -attempt_id -step rule",
            limit,
            offset,
        )

    def stacks(
        self,
        *,
        attempt_id: Filter = None,
        step: Filter = None,
        request_id: Filter = None,
        stage: Filter = None,
        role: Filter = None,
        rank: Filter = None,
        source: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return the stacks of processes, asked for or written by watchdogs, the newest first."""
        order = "-wall role rank incarnation request_id"
        return self._page("stacks", _where("stacks", locals()), order, limit, offset)

    def paces(self, attempt_id: int, steps: Sequence[int]) -> list[Row]:
        """Return how ranks went through each part of steps; see `paces.paces`."""
        return self._rows(paces.paces(attempt_id, steps))

    def losses(
        self,
        *,
        run: Filter = None,
        attempt_id: Filter = None,
        step: Filter = None,
        kind: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return losses, the last first."""
        return self._page("losses", _where("losses", locals()), "-wall loss_id", limit, offset)

    def captures(self, *, run: Filter = None, state: Filter = None) -> list[Row]:
        """Return captures, the last ordered first; removed ones too."""
        return self._page("captures", _where("captures", locals()), "-created_wall capture_id")

    def capture(self, capture_id: str) -> Row | None:
        """Return one capture, or None."""
        return self._one("captures", capture_id=capture_id)

    def captured(self, capture_id: str, *, limit: int = LIMIT) -> list[Row]:
        """Return the dumps of a capture, by attempt, step, stage, role and rank."""
        return self._page(
            "dumps",
            [TABLES["dumps"].c.capture_id == capture_id, TABLES["dumps"].c.step.is_not(None)],
            "attempt_id step stage role rank occurrence epoch minibatch microbatch incarnation",
            limit,
        )

    def dumps(
        self,
        attempt_id: Filter = None,
        step: Filter = None,
        *,
        stage: Filter = None,
        role: Filter = None,
        rank: Filter = None,
        capture_id: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return msprobe dumps by step, stage and rank, in every state."""
        return self._page(
            "dumps", _where("dumps", locals()), "step stage role rank work_key", limit, offset
        )

    def operators(
        self,
        attempt_id: Filter = None,
        step: Filter = None,
        *,
        stage: Filter = None,
        role: Filter = None,
        rank: Filter = None,
        capture_id: Filter = None,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return the operator tables of dumps, the earliest dump first."""
        return self._page(
            "operators",
            _where("operators", locals()),
            "step announced_wall role rank work_key capture_id incarnation",
            limit,
            offset,
        )

    def operator_steps(self, attempt_id: int, *, limit: int = 8) -> list[int]:
        """Return the newest steps of an attempt that have operators, newest first."""
        table = TABLES["operators"]
        of_attempt = (table.c.attempt_id == attempt_id) & table.c.step.is_not(None)
        query = sa.select(table.c.step).where(of_attempt).distinct()
        found = self._rows(query.order_by(table.c.step.desc()).limit(limit))
        return [row["step"] for row in found]

    def artifacts(
        self,
        attempt_id: Filter = None,
        step: Filter = None,
        *,
        stage: Filter = None,
        rank: Filter = None,
        kind: Filter = None,
        node_id: Filter = None,
        incarnation: Filter = None,
        deleted: bool | None = False,
        limit: int = LIMIT,
        offset: int = 0,
    ) -> list[Row]:
        """Return files that are kept, by step and rank; deleted ones only when asked."""
        where = _where("artifacts", locals())
        if deleted is not None:
            column = TABLES["artifacts"].c.deleted_wall
            where.append(column.is_not(None) if deleted else column.is_(None))
        return self._page("artifacts", where, "step stage rank artifact_id", limit, offset)

    def kept_steps(self, attempt_id: int) -> list[int]:
        """Return the steps of which payload files are there, the newest first."""
        table = TABLES["artifacts"].c
        query = (
            sa.select(table.step)
            .where(table.attempt_id == attempt_id, table.step.is_not(None))
            .where(table.kind.in_(("kept", "ring")), table.deleted_wall.is_(None))
            .distinct()
            .order_by(table.step.desc())
        )
        with connect.explained(self._where), self._connect() as connection:
            return [int(step) for step in connection.scalars(query)]

    def engines(self) -> list[Row]:
        """Return the engines that were registered, by name."""
        return self._page("engines", [], "name")

    def kept_bytes(self) -> list[Row]:
        """Return `node_id`, `files` and `bytes` of the kept files of each node."""
        return self._rows(retention.kept_bytes())

    def kept_places(self) -> list[Row]:
        """Return `artifact_id`, `node_id` and `path` of every kept file that is there."""
        return self._rows(retention.kept_places())

    def kept_files(self, *, limit: int = LIMIT, **which: Any) -> list[Row]:
        """Return kept files that may go, the oldest first; `which` as `retention.kept_files`."""
        return self._rows(retention.kept_files(**which).limit(limit))

    def newest_kept_steps(self, attempt_id: int, *, limit: int) -> list[int]:
        """Return the newest steps of an attempt of which something is kept, newest first."""
        found = self._rows(retention.newest_kept_steps(attempt_id).limit(limit))
        return [row["step"] for row in found]

    def audit(self, *, limit: int = LIMIT, offset: int = 0) -> list[Row]:
        """Return who ordered what, the last first."""
        return self._page("audit", [], "-audit_id", limit, offset)

    def meta(self, key: str) -> Any:
        """Return the value of a key of the service itself, or None."""
        row = self._one("meta", key=key)
        return row and row["value"]

    def counts(self) -> dict[str, list[Row]]:
        """Return what Prometheus asks, each as rows of labels and a `count`; see `overview`."""
        with connect.explained(self._where), self._connect() as connection:
            return {name: rows(connection, query) for name, query in overview.counts().items()}

    def bytes_on_disk(self) -> int | None:
        """Return the bytes of the catalogue's files; None where another server holds them."""
        if self._path is None:
            return None
        files = (self._path, self._path.with_name(self._path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    # --- how --------------------------------------------------------------------------------

    def _connect(self) -> Any:
        if self._path and (found := connect.file_id(self._path)) != self._file:
            self._engine.dispose()  # another file lies there now
            self._file = found
        return self._engine.begin()

    def _rows(self, query: Any) -> list[Row]:
        with connect.explained(self._where), self._connect() as connection:
            return rows(connection, query)

    def _first(self, query: Any) -> Row | None:
        found = self._rows(query.limit(1))
        return found[0] if found else None

    def _one(self, name: str, **key: Any) -> Row | None:
        return self._first(sa.select(TABLES[name]).where(*_where(name, key)))

    def _page(
        self,
        name: str,
        where: list[Any],
        order: str,
        limit: int | None = None,
        offset: int = 0,
    ) -> list[Row]:
        table = TABLES[name]
        by = [
            table.c[column[1:]].desc() if column.startswith("-") else table.c[column]
            for column in order.split()
        ]
        query = sa.select(table).where(*where).order_by(*by)
        return self._rows(query.limit(limit).offset(offset) if limit is not None else query)


def _where(name: str, filters: dict[str, Any]) -> list[Any]:
    """Return conditions for those of `filters` that are columns of the table and not None."""
    columns = TABLES[name].columns
    return [
        columns[key].in_(list(value))
        if isinstance(value, Sequence) and not isinstance(value, str)
        else columns[key] == value
        for key, value in filters.items()
        if key in columns and value is not None
    ]
