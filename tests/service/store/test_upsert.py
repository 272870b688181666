"""Merging: a batch leaves what its writes leave one after the other."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
import sqlalchemy as sa
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.stores import url_of

from stagescope_service.store import connect, statements
from stagescope_service.store.contract import Delete, Put, Write
from stagescope_service.store.snapshot import rows
from stagescope_service.store.sql import WriteBatch
from stagescope_service.store.statements import check
from stagescope_service.store.tables import TABLES
from stagescope_wire.errors import StoreError

_KEYS = st.fixed_dictionaries(
    {
        "incarnation": st.sampled_from(["a", "b"]),
        "work_key": st.sampled_from(["1", "2"]),
        "name": st.sampled_from(["loss"]),
    }
)
_COLUMNS = st.fixed_dictionaries(
    {},
    optional={
        "step": st.none() | st.integers(0, 3),
        "value": st.none() | st.floats(),
        "role": st.none() | st.text(max_size=3),
        "wall": st.floats(0, 10),
    },
)
_PUT = st.builds(lambda key, row: Put("scalars", {**key, **row}), _KEYS, _COLUMNS)
_RUN = st.builds(
    lambda run, row: Put("runs", {"run": run, **row}),
    st.sampled_from("xyz"),
    st.fixed_dictionaries(
        {}, optional={"settings": st.integers(), "created_wall": st.floats(0, 9)}
    ),
)
_DELETE = st.builds(
    lambda where: Delete("scalars", where),
    st.sampled_from([{"incarnation": "a"}, {"incarnation": "b", "work_key": "1"}, {"step": 1}]),
)
_WRITES = st.lists(st.one_of(_PUT, _PUT, _RUN, _DELETE), max_size=30)
# Deletes by what never changes of a row, as the engine's are: by a column that a later write sets,
# a repeated delete would find other rows than the first time.
_REPEATABLE = _WRITES.map(lambda writes: [each for each in writes if "step" not in _where(each)])


def _where(write: Write) -> Mapping[str, object]:
    return write.where if isinstance(write, Delete) else {}


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[sa.Engine]:
    engine = connect.writer_engine(url_of(tmp_path_factory.mktemp("upsert")))
    with engine.begin() as connection:
        connect.make_tables(connection)
    yield engine
    engine.dispose()


def _outcome(engine: sa.Engine, groups: list[list[Write]]) -> str:
    with engine.connect() as connection, connection.begin() as transaction:
        for group in groups:
            WriteBatch(group).execute(connection)
        found = [
            sorted(rows(dict, connection, TABLES[name].select()), key=repr)
            for name in ("scalars", "runs")
        ]
        transaction.rollback()
    return repr(found)


_FEW = settings(max_examples=150, deadline=None)


@_FEW
@given(_WRITES, st.integers(1, 10))
def test_any_grouping_leaves_the_same(engine: sa.Engine, writes: list[Write], size: int) -> None:
    one_by_one = _outcome(engine, [[write] for write in writes])
    grouped = [writes[start : start + size] for start in range(0, len(writes), size)]
    assert _outcome(engine, grouped) == one_by_one
    assert _outcome(engine, [writes]) == one_by_one


@_FEW
@given(_REPEATABLE, st.data())
def test_resubmission_leaves_the_same(
    engine: sa.Engine, writes: list[Write], data: st.DataObject
) -> None:
    # A sender that saw no receipt says again everything from some point on.
    again = data.draw(st.integers(0, len(writes)))
    assert _outcome(engine, [writes, writes[again:]]) == _outcome(engine, [writes])


@_FEW
@given(st.lists(_PUT, max_size=12, unique_by=lambda put: put.row["incarnation"]), st.randoms())
def test_the_order_between_rows_does_not_matter(
    engine: sa.Engine, puts: list[Write], random: random.Random
) -> None:
    shuffled = [*puts, *puts]
    random.shuffle(shuffled)
    assert _outcome(engine, [shuffled]) == _outcome(engine, [puts])


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (Put("nowhere", {"a": 1}), "no table"),
        (Put("runs", {"run": "a", "color": 1}), "no columns"),
        (Put("runs", {"created_wall": 1.0}), "without run"),
        (Put("scalars", {"incarnation": "a", "work_key": None, "name": "n"}), "without work_key"),
        (Delete("runs", {}), "all rows"),
        (Delete("runs", {"color": 1}), "no columns"),
    ],
)
def test_what_no_database_could_take_is_refused(write: Write, message: str) -> None:
    with pytest.raises(StoreError, match=message):
        check(write)


def test_upserts_compile_for_postgresql() -> None:
    dialect = sa.engine.make_url("postgresql://").get_dialect()()

    def text(*sets: str, nulls: frozenset[str] = frozenset()) -> str:
        conflict = statements._Conflict(frozenset(sets), None)
        made = statements._Statement(dialect, TABLES["runs"], ("run", *sets), conflict, nulls)
        assert {*made.order} == {"run", *sets} - nulls
        return made.text

    assert "ON CONFLICT (run) DO UPDATE SET settings = excluded.settings" in text("settings")
    assert "NULL" in text("settings", nulls=frozenset({"settings"}))
    assert "DO NOTHING" in text()


def test_a_catalogue_needs_no_parent_directory(tmp_path: Path) -> None:
    engine = connect.writer_engine(url_of(tmp_path / "a" / "b c?#%"))
    with engine.begin() as connection:
        connect.make_tables(connection)
    engine.dispose()
    assert (tmp_path / "a" / "b c?#%" / "catalogue.db").exists()
