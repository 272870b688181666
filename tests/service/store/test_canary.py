"""The queries of the canary: versions in the order of their attempts, in each database."""

from __future__ import annotations

import pytest
from tests.support.stores import training, write

from stagescope_service.store.catalogue import Catalogue
from stagescope_service.store.contract import Put
from stagescope_service.store.queries.canary import CanaryVersion
from stagescope_service.store.sql import SqlStore


@pytest.fixture
def scored(store: SqlStore) -> SqlStore:
    """Attempt 7 of run r did versions 0 to 5; attempt 3, which is later, versions 4 and 5."""
    write(store, *training(7, number=1), *training(3, number=2), *training(9, run="other"))
    versions = [(7, version) for version in range(6)] + [(3, 4), (3, 5)]
    for at, (attempt_id, version) in enumerate(versions):
        key = {"attempt_id": attempt_id, "version": version}
        write(store, Put("canaries", {"incarnation": "i", "seq": at, **key, "wall": 1.0}))
        if (attempt_id, version) != (3, 5):
            verdict = {"source": "vllm-0", "pair": "engine twice", "mean": None, "records": 1}
            write(store, Put("canary_verdicts", {**key, **verdict, "sequences": []}))
    write(store, Put("canaries", {"incarnation": "j", "seq": 0, "attempt_id": 9, "version": 0}))
    return store


def test_versions_are_in_the_order_of_their_attempts(
    scored: SqlStore, catalogue: Catalogue
) -> None:
    found = catalogue.scored_versions("r")
    assert [(each.attempt_id, each.version) for each in found] == [
        (7, 0), (7, 1), (7, 2), (7, 3), (7, 4), (7, 5), (3, 4), (3, 5),
    ]  # fmt: skip
    assert found[-1] == CanaryVersion(3, 5, records=1, judged=0)
    assert {each.judged for each in found[:-1]} == {1}
    assert catalogue.runs_with_canaries() == ["other", "r"]
    assert [row["seq"] for row in catalogue.canaries(3, 5)] == [7]


def test_the_versions_before_one_span_a_restart(scored: SqlStore, catalogue: Catalogue) -> None:
    def before(versions: int, *, newest: bool) -> list[tuple[int, int]]:
        rows = catalogue.canary_verdicts_before("r", 3, 5, versions, newest=newest)
        return [(row["attempt_id"], row["version"]) for row in rows]

    assert before(3, newest=True) == [(7, 4), (7, 5), (3, 4)]
    assert before(2, newest=False) == [(7, 0), (7, 1)]
    assert catalogue.canary_verdicts_before("r", 7, 0, 3, newest=True) == []
    assert catalogue.judged_engines(7, limit=2, offset=1) == [(4, "vllm-0"), (3, "vllm-0")]
    [row] = catalogue.canary_verdicts(3, [4])
    assert (row["mean"], row["sequences"]) == (None, [])
