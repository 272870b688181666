"""Which dumps become operator tables: announced with their cause, once, also after a crash."""

from __future__ import annotations

from tests.support.trainings import Bench, Delivery, Rank

from stagescope_service.core.instructions import AnnouncedDump, BuildOperatorTable, Instruction
from stagescope_service.core.operators import again, outcome

STAGE = "actor_update"
PATH = "/data/r/a1/step_1/actor_update/step0/rank0"


def table_jobs(out: list[Instruction]) -> list[BuildOperatorTable]:
    return [job for job in out if isinstance(job, BuildOperatorTable)]


def began(rank: Rank) -> Delivery:
    return rank.dump(1, STAGE, "armed", path=PATH)


def test_a_dump_that_ended_is_announced_with_its_cause() -> None:
    bench, rank = Bench(), Rank()
    assert table_jobs(bench.give(began(rank))) == []
    (job,) = table_jobs(bench.give(rank.dump(1, STAGE, "complete", path=PATH, bytes=3)))
    row = bench.rows.one("operators")
    assert job.job == {name: value for name, value in row.items() if name in job.job} | {"run": "r"}
    assert row["dump_path"] == PATH
    assert row["truncated"] is False
    assert bench.rows.snapshot().undigested == [row]
    bench.carry_out([outcome(job.job, "digested", None, rows=3)])
    assert bench.rows.snapshot().undigested == []


def test_what_has_nothing_on_the_disk_is_not_announced() -> None:
    bench, rank = Bench(), Rank()
    for state in ("missed", "skipped", "failed"):
        assert table_jobs(bench.give(rank.dump(1, STAGE, state, path=PATH))) == []
    assert table_jobs(bench.give(rank.dump(2, STAGE, "complete"))) == []
    assert bench.rows.of("operators") == []


def test_said_again_it_is_the_same_and_an_older_word_changes_nothing() -> None:
    bench, rank = Bench(), Rank()
    armed, ended = began(rank), rank.dump(1, STAGE, "complete", path=PATH)
    (job,) = table_jobs(bench.give(ended))
    bench.carry_out([outcome(job.job, "digested", None)])
    (twice,) = table_jobs(bench.give(ended))
    assert twice == job
    assert bench.rows.snapshot().undigested == []
    assert table_jobs(bench.give(armed)) == []
    assert table_jobs(bench.silence()) == []


def test_a_rank_that_fell_silent_inside_a_capture_leaves_a_truncated_dump() -> None:
    bench, rank = Bench(), Rank()
    bench.give(began(rank))
    (job,) = table_jobs(bench.silence())
    assert bench.rows.one("operators")["truncated"] is True
    assert bench.rows.one("dumps")["state"] == "truncated"
    assert "stopped reporting" in bench.rows.one("losses", kind="dump")["reason"]
    bench.carry_out([outcome(job.job, "digested", None)])
    # It was only quiet: what it says now is announced anew, and nothing is lost.
    (whole,) = table_jobs(bench.give(rank.dump(1, STAGE, "complete", path=PATH)))
    assert whole.job["truncated"] is False
    assert [row["mark"] for row in bench.rows.snapshot().undigested] == [whole.job["mark"]]
    assert bench.rows.of("losses", kind="dump") == []


def test_a_restart_forgets_neither_what_was_armed_nor_what_was_announced() -> None:
    bench, first, second = Bench(), Rank(rank=0), Rank(rank=1)
    bench.give(began(first), began(second))
    (job,) = table_jobs(bench.give(first.dump(1, STAGE, "complete", path=PATH)))
    bench.restart()
    (row,) = bench.rows.snapshot().undigested
    assert named(again(row, "r").job) == named(job.job)
    (cut,) = table_jobs(bench.silence())
    assert cut.key.incarnation == second.sender.incarnation
    assert cut.job["dump_path"] == PATH


def named(job: AnnouncedDump) -> dict[str, object]:
    return {name: value for name, value in job.items() if value is not None}
