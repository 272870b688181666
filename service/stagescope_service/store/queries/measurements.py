"""Queries for the data that ranks record: scalars, payloads, and the results of ingestion."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Generator, Hashable, Iterator, Mapping, Sequence
from typing import Final, Literal, NamedTuple, TypedDict, cast

import sqlalchemy as sa
from typing_extensions import NotRequired, Unpack

from stagescope_service.store.queries.overview import StepOverview
from stagescope_service.store.queries.reader import (
    LIMIT,
    Filter,
    RankFilter,
    Reader,
    StepRange,
    StepWindow,
    between,
    conditions,
    in_window,
    is_kept,
    of_few,
)
from stagescope_service.store.snapshot import Query
from stagescope_service.store.tables import (
    TABLES,
    PayloadRow,
    ScalarRow,
    StreamRow,
    SummaryRow,
    compact,
)
from stagescope_service.store.tables.compact import scalar_names
from stagescope_service.store.tables.declare import NON_FINITE_NAMES

_STEP_STATE: Final = (
    "attempt_id", "step", "closed_wall", "completeness", "superseded_by", "summary_wall",
    "parts_mark", "summary_mark", "rows_removed",
)  # fmt: skip


class ScalarFilter(RankFilter, total=False):
    """Selects scalars."""

    name: Filter
    nonfinite: Filter


class StepNumbers(StepOverview):
    """A step with its stored numbers; those are null if it has none of this version."""

    stage: str | None
    verdict: str | None
    suspects: list[str] | None
    tokens: int | None
    masked_tokens: int | None
    unequal_tokens: int | None
    metrics: NotRequired[dict[str, float | str | None] | None]
    slices: NotRequired[bytes | None]


class ScalarValues(TypedDict):
    """A scalar of a step, stage and role (and rank), aggregated over its ranks and parts."""

    attempt_id: int
    step: int | None
    stage: str | None
    role: str
    rank: NotRequired[int]
    mean: float | None
    """Mean of the finite values; null, as `low` and `high`, if there is none."""
    low: float | None
    high: float | None
    count: int
    """Number of all values."""
    nan: int
    posinf: int
    neginf: int


class ScalarMean(NamedTuple):
    """A scalar of a step, stage and role, aggregated over its ranks and parts."""

    attempt_id: int
    step: int | None
    stage: str | None
    role: str
    mean: float | None
    """Mean of the finite values; None if there is none."""
    nan: int
    posinf: int
    neginf: int
    number: int
    """Number of all values."""


class PayloadStates(TypedDict):
    """The payloads of a step in one state: how many, and one of the reasons."""

    attempt_id: int
    step: int
    state: str
    replaced: bool
    """Whether their stage was superseded."""
    count: int
    reason: str | None


class SettledPayloads(NamedTuple):
    """The payloads of a process in the catalogue."""

    newest: int | None
    """The highest seq of all its payloads; None if it has none."""
    states: Mapping[int, str]
    """Seq -> final state, for the requested payloads that are settled."""


class MeasurementQueries(Reader):
    """Queries for scalars, payloads, summaries and streams."""

    def scalars(
        self,
        attempt_id: Filter,
        step: Filter = None,
        *,
        limit: int = LIMIT,
        offset: int = 0,
        **filters: Unpack[ScalarFilter],
    ) -> list[ScalarRow]:
        """Return scalars by step, name and rank; `value` is a float, including nan and inf.

        Excludes those of stages that a newer incarnation or report replaced.
        """
        where = conditions("scalars", attempt_id=attempt_id, step=step, **filters)
        return self._scalars(attempt_id, where, limit, offset)

    def non_finite_scalars(
        self, attempts: Sequence[int], *, limit: int = LIMIT, **window: Unpack[StepWindow]
    ) -> list[ScalarRow]:
        """Return the scalars of attempts that are NaN or infinite, as `scalars` does."""
        is_bad = conditions("scalars", nonfinite=NON_FINITE_NAMES)
        where = [*in_window("scalars", attempts, **window), *is_bad]
        return self._scalars(list(attempts), where, limit, 0)

    def _scalars(
        self, attempts: Filter, where: list[sa.ColumnElement[bool]], limit: int, offset: int
    ) -> list[ScalarRow]:
        where = [*where, *self._answers(attempts), *self._of_newest(attempts)]
        order = "step name role rank work_key"
        found = self._page(ScalarRow, "scalars", where, order, limit, offset)
        for row in found:
            if row["nonfinite"]:
                row["value"] = float(row["nonfinite"])
        return found

    def scalar_names(self, attempts: Sequence[int]) -> dict[str, int | None]:
        """Return the scalar names of attempts with the last step of each.

        The step is None for a scalar that was only logged outside of steps.
        """
        found: dict[str, int | None] = {}
        for attempt_id in attempts:
            for name, own in self._tuples(_scalar_names(attempt_id)):
                last = found.get(name)
                found[name] = own if last is None else max(last, own or last)
        return dict(sorted(found.items()))

    def oldest_but(self, attempt_id: int, step: int, keep: int) -> int | None:
        """Return the attempt's step that is `keep` existing steps before `step`, or None.

        Step numbers may have gaps.
        """
        table = TABLES["steps"]
        lower = [table.c.attempt_id == attempt_id, table.c.step < step]
        query = sa.select(table.c.step).where(*lower).order_by(table.c.step.desc())
        found = self._values(query.limit(1).offset(keep - 1))
        return found[0] if found else None

    def summarised_steps(self, attempt_id: int, *, through: int) -> list[int]:
        """Return the steps up to `through` that have part summaries, ascending, at most `LIMIT`."""
        table = TABLES["summaries"]
        where = [table.c.attempt_id == attempt_id, table.c.step <= through]
        query = sa.select(table.c.step).where(*where).distinct().order_by(table.c.step)
        return self._values(query.limit(LIMIT))

    def step_metrics(
        self,
        attempts: Sequence[int],
        *,
        version: int,
        numbers: Literal["metrics", "slices"] | None = "metrics",
        **window: Unpack[StepWindow],
    ) -> Generator[StepNumbers, None, None]:
        """Yield every step of attempts with its numbers, the newest step and attempt first.

        A read transaction is open until the last row, or until the generator is closed.

        The column `numbers` has those of the step or of its slices (None selects neither). They
        are null if the step has no numbers of this `version`, or outdated ones.
        """
        steps, found = TABLES["steps"], TABLES["step_metrics"]
        current = sa.and_(
            found.c.attempt_id == steps.c.attempt_id,
            found.c.step == steps.c.step,
            found.c.summary_wall == steps.c.summary_wall,
            found.c.version == version,
        )
        counts = ("tokens", "masked_tokens", "unequal_tokens")
        wanted = ("stage", "verdict", "suspects", *counts, *([numbers] if numbers else []))
        query = (
            sa.select(
                *(steps.c[name] for name in _STEP_STATE),
                is_kept(steps.c.step_summary).label("has_summary"),
                *(found.c[name] for name in wanted),
            )
            .outerjoin(found, current)
            .where(*in_window("steps", attempts, **window))
            .order_by(steps.c.step.desc(), steps.c.attempt_id.desc())
        )
        yield from self._each(StepNumbers, query)

    def scalar_values(
        self,
        attempts: Sequence[int],
        name: str,
        *,
        by_rank: bool,
        first: int | None = None,
        last: int | None = None,
        **filters: Unpack[RankFilter],
    ) -> Iterator[ScalarValues]:
        """Yield a scalar by step, stage and role (and rank), the newest step first."""
        of = ["attempt_id", "step", "stage", "role", *(["rank"] if by_rank else [])]
        query = self._scalar(attempts, name, of, first=first, last=last, **filters)
        table = TABLES["scalars"].c
        query = query.add_columns(
            sa.func.min(table.value).label("low"),
            sa.func.max(table.value).label("high"),
            sa.func.count().label("count"),
        ).order_by(table.step.desc(), table.attempt_id.desc())
        yield from self._each(ScalarValues, query)

    def scalar_means(
        self, attempts: Sequence[int], name: str, **steps: Unpack[StepRange]
    ) -> list[ScalarMean]:
        """Return the mean of a scalar by step, stage and role, in no order."""
        # A diagnosis reads many scalars: the query takes as long to build as to run.
        query = self._once(("means", repr(attempts)), lambda: self._means(attempts))
        given = {"scalar": name, "first_step": steps["first"], "last_step": steps["last"]}
        # Rows of SQLAlchemy: an object of our own would take as long as the query.
        return cast("list[ScalarMean]", self._tuples(query, given))

    def _means(self, attempts: Sequence[int]) -> Query:
        """Select what `scalar_means` returns; `scalar`, `first_step` and `last_step` are given."""
        columns = ["attempt_id", "step", "stage", "role"]
        step, given = TABLES["scalars"].c.step, sa.bindparam
        return (
            self._scalar(attempts, given("scalar", type_=sa.Text), columns)
            .add_columns(sa.func.count().label("number"))
            .where(step >= given("first_step", type_=sa.BigInteger))
            .where(step <= given("last_step", type_=sa.BigInteger))
        )

    def _scalar(
        self,
        attempts: Sequence[int],
        name: str | sa.BindParameter[str],
        of: Sequence[str],
        *,
        first: int | None = None,
        last: int | None = None,
        **filters: Unpack[RankFilter],
    ) -> Query:
        """Select the mean of a scalar, and the numbers of its non-finite values, by columns."""
        table = TABLES["scalars"].c
        kinds = {"nan": "nan", "posinf": "inf", "neginf": "-inf"}
        return (
            sa.select(
                *(table[column] for column in of),
                sa.func.avg(table.value).label("mean"),
                *(
                    sa.func.sum(sa.case((table.nonfinite == text, 1), else_=0)).label(kind)
                    for kind, text in kinds.items()
                ),
            )
            .where(
                *in_window("scalars", attempts, first=first, last=last),
                table.name == name,
                *self._answers(attempts),
                *self._of_newest(attempts),
                *conditions("scalars", **filters),
            )
            .group_by(*(table[column] for column in of))
        )

    def _answers(self, attempts: Filter) -> list[sa.ColumnElement[bool]]:
        """Return the condition that a scalar's stage is not known to be replaced.

        The list is empty if no stage of the attempts is, the usual case.
        """
        superseded = _superseded(attempts, "incarnation", "work_key")
        if not self._has_any(("superseded", repr(attempts)), superseded):
            return []
        scalars, stages = TABLES["scalars"].c, TABLES["stages"].c
        own = (stages.incarnation == scalars.incarnation) & (stages.work_key == scalars.work_key)
        answering = stages.superseded.is_(None) | (stages.superseded == sa.false())
        key = sa.tuple_(scalars.incarnation, scalars.work_key)
        return [sa.or_(key.not_in(superseded), sa.exists().where(own, answering))]

    def _of_newest(self, attempts: Filter) -> list[sa.ColumnElement[bool]]:
        """Return the condition that a scalar outside a stage is not from a replaced process.

        If a newer incarnation of a rank logged the same scalar in an attempt, the newer one counts.
        The list is empty if no rank of the attempts has two incarnations, the usual case.
        """
        table = TABLES["processes"]
        is_probe = sa.or_(table.c.raw.is_(None), table.c.raw == sa.false())
        rank = (table.c.attempt_id, table.c.role, table.c.rank)
        where = [*conditions("processes", attempt_id=attempts), is_probe]
        twice = sa.select(rank[0]).where(*where).group_by(*rank).having(sa.func.count() > 1)
        if not self._has_any(("twice", repr(attempts)), twice):
            return []
        scalars, other = TABLES["scalars"].c, TABLES["scalars"].alias().c
        own, newer = table.alias().c, table.alias().c
        replaced = sa.exists().where(
            own.incarnation == scalars.incarnation,
            *(newer[column.name] == own[column.name] for column in rank),
            sa.or_(
                newer.first_wall > own.first_wall,
                sa.and_(newer.first_wall == own.first_wall, newer.incarnation > own.incarnation),
            ),
            other.incarnation == newer.incarnation,
            other.work_key == scalars.work_key,
            other.name == scalars.name,
        )
        return [sa.or_(scalars.stage.is_not(None), ~replaced)]

    def _has_any(self, key: Hashable, query: Query) -> bool:
        return self._once(key, lambda: bool(self._values(query.limit(1))))

    def payloads(
        self,
        attempt_id: Filter = None,
        step: Filter = None,
        *,
        stage: Filter = None,
        state: Filter = None,
        consumed_step: Filter = None,
        limit: int = LIMIT,
    ) -> list[PayloadRow]:
        """Return payloads in the order of their announcement."""
        where = conditions(
            "payloads",
            attempt_id=attempt_id,
            step=step,
            stage=stage,
            state=state,
            consumed_step=consumed_step,
        )
        return self._page(PayloadRow, "payloads", where, "announced_wall incarnation seq", limit)

    def recorded_tensors(self, attempt_id: int, *, first: int, last: int) -> dict[int, set[str]]:
        """Return step -> the tensors of its payloads, and of those that it consumed.

        Args:
            attempt_id: of the attempt.
            first: the first step.
            last: the last one.
        """
        table = TABLES["payloads"].c
        found: dict[int, set[str]] = defaultdict(set)
        for step, own in (
            (table.step, conditions("payloads", attempt_id=attempt_id)),
            (table.consumed_step, of_few("payloads", attempt_id)),
        ):
            where = [*own, *between(step, first, last)]
            query = sa.select(step, table.tensors).where(*where).distinct()
            for number, names in self._tuples(query):
                found[number].update(names or ())
        return found

    def settled_payloads(self, incarnation: str, seqs: Collection[int]) -> SettledPayloads:
        """Return the final states of some payloads of a process, by its delivery identity."""
        table, texts = compact.payload_rows.c, compact.texts.c
        owner = sa.select(texts.text_id).where(texts.text == incarnation).scalar_subquery()
        own = table.owner_id == owner
        newest = sa.select(sa.func.max(table.seq)).where(own)
        state = sa.select(texts.text).where(texts.text_id == table.state_id).scalar_subquery()
        found = sa.select(table.seq, state).where(
            own, table.seq.in_(list(seqs)), table.state_id != compact.ANNOUNCED
        )
        with self._reading() as connection:
            states = {int(seq): str(state) for seq, state in connection.execute(found)}
            return SettledPayloads(connection.scalar(newest), states)

    def payload_states(
        self, attempts: Sequence[int], steps: Sequence[int], *, measured: Collection[int] = ()
    ) -> list[PayloadStates]:
        """Return the payloads of steps by state.

        Args:
            attempts: ids of the attempts.
            steps: the steps.
            measured: steps for which only the payloads that are not ingested are selected (few).
        """
        columns = TABLES["payloads"].c
        superseded = _superseded(attempts, "incarnation", "work_key", "end_seq")
        replaced: sa.ColumnElement[bool] = sa.literal(value=False)
        if self._values(superseded.limit(1)):
            key = (columns.incarnation, columns.work_key, columns.seq)
            replaced = sa.func.coalesce(sa.tuple_(*key).in_(superseded), sa.false())
        chosen = (
            sa.select(
                columns.attempt_id,
                columns.step,
                columns.state,
                columns.reason,
                replaced.label("replaced"),
            )
            .where(
                columns.attempt_id.in_(list(attempts)),
                columns.step.in_(list(steps)),
                sa.or_(columns.state != "ingested", columns.step.not_in(list(measured))),
            )
            .subquery()
        ).c
        by = (chosen.attempt_id, chosen.step, chosen.state, chosen.replaced)
        query = sa.select(
            *by, sa.func.count().label("count"), sa.func.min(chosen.reason).label("reason")
        )
        return self._rows(PayloadStates, query.group_by(*by).order_by(*by))

    def summaries(
        self, attempt_id: int, step: Filter = None, *, stage: Filter = None, pair: Filter = None
    ) -> list[SummaryRow]:
        """Return the summaries of payloads with their blobs, by stage, rank and part."""
        where = conditions("summaries", attempt_id=attempt_id, step=step, stage=stage, pair=pair)
        order = "step stage role rank occurrence epoch minibatch microbatch incarnation seq pair"
        return self._page(SummaryRow, "summaries", where, order)

    def summary_pairs(self, attempt_id: int, step: int) -> set[str]:
        """Return the pairs of streams that a step has summaries of."""
        table = TABLES["summaries"].c
        own = (table.attempt_id == attempt_id) & (table.step == step)
        return {*self._values(sa.select(table.pair).where(own).distinct())}

    def streams(self, attempt_id: int, *, stage: Filter = None) -> list[StreamRow]:
        """Return the properties of an attempt's log-prob streams."""
        return self._page(
            StreamRow,
            "streams",
            conditions("streams", attempt_id=attempt_id, stage=stage),
            "stream role stage",
        )


def _superseded(attempts: Filter, *names: str) -> Query:
    """Select columns of the superseded stages of attempts, which are few."""
    columns = TABLES["stages"].c
    # The text of the partial index that finds them.
    where = sa.text("stages.superseded")
    found = [columns[name] for name in names]
    is_known = (column.is_not(None) for column in found)
    return sa.select(*found).where(where, *of_few("stages", attempts), *is_known)


def _scalar_names(attempt_id: int) -> Query:
    """Select the `name`s of an attempt's scalars, and the `last` step of each.

    They are in a table of their own, regardless of the number of scalars. If the last one was
    deleted since, the scalars of earlier steps are searched.
    """
    names, table = scalar_names.c, TABLES["scalars"].c
    own = (table.attempt_id == names.attempt_id) & (table.name == names.name)
    of_last = sa.exists().where(own, table.step.is_not_distinct_from(names.last_step))
    before = sa.select(sa.func.max(table.step)).where(own).scalar_subquery()
    return sa.select(names.name, sa.case((of_last, names.last_step), else_=before)).where(
        names.attempt_id == attempt_id, of_last | sa.exists().where(own)
    )
