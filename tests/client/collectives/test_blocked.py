"""Which collective cannot finish: the judgement alone."""

from __future__ import annotations

from typing import Any

from tests.client.collectives.recorders import WORLD, call, dump

from stagescope_wire.collectives.blocked import Member, blocked, is_recording, place_of
from stagescope_wire.collectives.records import OFF, RankRecord, recorded
from stagescope_wire.collectives.rows import BlockedCollective


def members(**calls: list[dict[str, Any]]) -> list[Member]:
    """Return ranks `r0`, `r1`, ... that each made some calls and are on a line of their own."""
    return [
        Member(
            rank := int(name[1:]), recorded([dump(rank, each)], rank=rank), "actor_update",
            f"work ({'ab'[rank > 1]}.py:1)",
            {"dp": rank // 2, "ep": rank % 2},
        )
        for name, each in calls.items()
    ]  # fmt: skip


def judge(**calls: list[dict[str, Any]]) -> list[BlockedCollective]:
    return blocked(members(**calls), "actor")


def wait(group: str, sequence: int, operation: str = "all_reduce", **more: Any) -> dict[str, Any]:
    return call(group, sequence, operation, done=False, **more)


def test_collectives_that_finish_are_none() -> None:
    assert judge(r0=[call("0", 1)], r1=[call("0", 1)], r2=[call("0", 1)], r3=[call("0", 1)]) == []


def test_ranks_on_the_same_line_are_one_and_say_what_they_share() -> None:
    [row] = judge(r0=[wait("0", 1)], r1=[wait("0", 1)], r2=[], r3=[])
    assert row.message == (
        "ranks 0-1 wait in all_reduce #1 of all ranks; ranks 2-3 have not entered it: "
        "they are in work (b.py:1)"
    )
    [waiting], [missing] = row.waiting, row.missing
    assert (waiting.ranks, waiting.layout) == ([0, 1], "dp 0")
    assert (missing.ranks, missing.layout, missing.stage) == ([2, 3], "dp 1", "actor_update")


def test_a_group_is_named_by_what_it_spans() -> None:
    [row] = judge(r2=[wait("2", 8812)], r3=[])
    assert row.group == "ep (group 2), ep of dp 1"
    assert (row.ranks, row.sequence, row.verdict) == (2, 8812, "not entered")


def test_the_collective_whose_missing_ranks_wait_in_none_is_the_cause() -> None:
    """Ranks 0 and 1 wait for 2, which waits for 3."""
    first, second = judge(
        r0=[wait("0", 2)], r1=[wait("0", 2)], r2=[wait("2", 5, "all_gather")], r3=[]
    )
    assert (first.group, first.verdict) == ("ep (group 2), ep of dp 1", "not entered")
    assert (second.group, second.verdict) == ("all ranks", "behind")
    assert "rank 2 waits in all_gather #5 of ep (group 2), ep of dp 1" in second.message


def test_a_rank_that_waits_in_none_is_a_cause_though_another_missing_one_waits() -> None:
    cause, behind = judge(r0=[wait("0", 2)], r1=[], r2=[wait("2", 5)], r3=[wait("0", 2)])
    assert (cause.group, cause.verdict) == ("all ranks", "not entered")
    assert [at.ranks for at in cause.missing] == [[1], [2]]
    assert (behind.group, behind.verdict) == ("ep (group 2), ep of dp 1", "behind")


def test_groups_that_are_used_in_another_order_are_a_circle() -> None:
    rows = judge(r2=[wait("0", 1)], r3=[wait("2", 1)], r0=[wait("0", 1)], r1=[wait("0", 1)])
    assert {row.verdict for row in rows} == {"circle"}


def test_other_operations_sizes_and_dtypes_under_one_number_are_named() -> None:
    for other, shown in (
        (wait("2", 1, "all_gather"), "all_gather [4] Float"),
        (wait("2", 1, sizes=(8,)), "all_reduce [8] Float"),
        (wait("2", 1, dtype="BFloat16"), "all_reduce [4] BFloat16"),
    ):
        [row] = judge(r2=[wait("2", 1)], r3=[other])
        assert row.verdict == "different calls"
        assert row.message == (
            "ranks of ep (group 2), ep of dp 1 called different collectives as #1: "
            f"rank 2 called all_reduce [4] Float; rank 3 called {shown}"
        )


def test_calls_that_may_differ_between_ranks_do_not() -> None:
    for operation in ("broadcast", "scatter", "gather", "all_to_all", "_broadcast_oop"):
        [row] = judge(r2=[wait("2", 1, operation)], r3=[wait("2", 1, operation, sizes=(9,))])
        assert row.verdict == "entered"
    # The same number of elements in another shape.
    [row] = judge(r2=[wait("2", 1, sizes=(2, 4))], r3=[wait("2", 1, sizes=(8,))])
    assert row.verdict == "entered"


def test_a_rank_without_a_record_is_not_accused() -> None:
    [row] = judge(r2=[wait("2", 1)])
    assert (row.verdict, row.unknown, row.missing) == ("no record", [3], [])
    off = Member(3, RankRecord(OFF, 3))
    [row] = blocked([*members(r2=[wait("2", 1)]), off])
    assert (row.verdict, row.unknown) == ("no record", [3])


def test_a_rank_that_is_further_has_entered() -> None:
    """Broadcast returns at the source before the others have received."""
    [row] = judge(r2=[call("2", 1, "broadcast"), call("2", 2)], r3=[wait("2", 1, "broadcast")])
    assert row.verdict == "entered"


def test_the_oldest_of_several_that_were_enqueued_is_named() -> None:
    """NCCL's calls return at once: a rank runs ahead of what its device has done."""
    ahead = [wait("2", number) for number in (5, 6, 7)]
    [row] = judge(r2=ahead, r3=ahead[:1])
    assert (row.sequence, row.verdict) == (6, "not entered")


def test_a_receive_without_its_send_is_named_and_a_pair_is_none() -> None:
    receive = wait("2", 3, "recv 1<-0", p2p=True)
    [row] = judge(r3=[receive], r2=[call("2", 1)])
    assert row.message.startswith(
        "rank 3 waits in recv 1<-0 #3 of ep (group 2), ep of dp 1; rank 2 has not entered it"
    )
    [row] = judge(r3=[receive], r2=[wait("2", 3, "send 0->1", p2p=True)])
    assert (row.verdict, row.waiting[0].ranks) == ("entered", [2, 3])


def test_engines_of_one_role_are_worlds_of_their_own() -> None:
    """Two engines of two ranks: the process groups of both count from rank 0."""
    every = [
        Member(rank, recorded([dump(rank % 2, calls)], rank=rank % 2))
        for rank, calls in enumerate(([wait("1", 1)], [], [wait("1", 1)], [wait("1", 1)]))
    ]
    missing, entered = blocked(every)
    assert ([at.ranks for at in missing.missing], missing.verdict) == ([[1]], "not entered")
    assert ([at.ranks for at in entered.waiting], entered.verdict) == ([[2, 3]], "entered")


def test_groups_of_one_name_and_other_ranks_are_others() -> None:
    """torch names a subgroup of a mesh by its dimension: all of them alike."""
    both = {"x": [0, 1]}, {"x": [0, 1]}, {"x": [2, 3]}, {"x": [2, 3]}
    every = []
    for rank, ranks in enumerate(both):
        entry = {**wait("0", 1), "process_group": ("x", "mesh_tp"), "record_id": 0}
        entries = [entry] if rank != 3 else []
        found = recorded([{"entries": entries, "pg_status": {}}], rank=rank, ranks=ranks)
        every.append(Member(rank, found))
    missing, entered = blocked(every)
    assert (missing.missing[0].ranks, missing.waiting[0].ranks) == ([3], [2])
    assert entered.verdict == "entered"


def test_who_records_nothing_is_known() -> None:
    assert not is_recording(members(r0=[], r1=[]))
    assert is_recording(members(r0=[], r1=[call("0", 1)]))
    assert WORLD


def test_the_line_of_a_stack_is_the_training_s_own() -> None:
    stack = "\n".join(
        f'  File "{path}", line {line}, in {name}\n    code()'
        for path, line, name in (
            ("/job/main.py", 3, "<module>"),
            ("/x/lib/python3.11/site-packages/verl/trainer.py", 212, "save_checkpoint"),
            ("/x/lib/python3.11/site-packages/torch/distributed/c.py", 9, "barrier"),
            ("/x/lib/python3.11/threading.py", 5, "wait"),
        )
    )
    assert place_of(stack) == "save_checkpoint (trainer.py:212)"
    assert place_of('  File "/x/lib/python3.11/threading.py", line 5, in wait') == (
        "wait (threading.py:5)"
    )
    assert place_of("") is None
