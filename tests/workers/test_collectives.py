"""The collectives that a process recorded, from real gloo processes that hang."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from stagescope_wire.collectives.records import RankRecord

c10d = pytest.importorskip("torch._C._distributed_c10d")
if not hasattr(c10d, "_dump_fr_trace"):
    pytest.skip("gloo has a recorder since torch 2.8", allow_module_level=True)

_RANK = """
import json, sys, threading, time
from stagescope_workers.probe.collectives import collect_collectives

rank, store = int(sys.argv[1]), sys.argv[2]
assert collect_collectives() is None  # torch is not imported for it
import torch
import torch.distributed as dist
assert collect_collectives().state == "none"
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
dist.new_group([1 - rank])  # of the other rank alone
both = dist.new_group([0, 1], group_desc="both")
dist.all_reduce(torch.ones(4))
if rank == 0:
    threading.Thread(target=dist.barrier, args=(both,), daemon=True).start()
deadline = time.monotonic() + 30.0
while time.monotonic() < deadline:
    found = collect_collectives()
    if rank == 1 or any(not call.done for group in found.groups for call in group.calls):
        break
print(json.dumps(found.wire()), flush=True)
sys.stdin.read()  # the other rank needs its peer until both have answered
import os
os._exit(0)
"""


@pytest.fixture(scope="module")
def records(tmp_path_factory: pytest.TempPathFactory) -> list[RankRecord]:
    """Return what two ranks recorded; rank 0 waits in a barrier that rank 1 never enters."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", _RANK, str(rank), str(store)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )
        for rank in (0, 1)
    ]  # fmt: skip
    answers: list[Any] = [json.loads(_line(rank)) for rank in ranks]
    for each in ranks:
        each.communicate("", timeout=30)
    found = [RankRecord.of_wire(answer) for answer in answers]
    assert None not in found
    return [each for each in found if each is not None]


def _line(rank: subprocess.Popen[str]) -> str:
    assert rank.stdout is not None
    return rank.stdout.readline()


def test_the_call_in_which_a_rank_waits_is_recorded_with_the_ranks_of_its_group(
    records: list[RankRecord],
) -> None:
    assert [each.rank for each in records] == [0, 1]
    [group] = [group for group in records[0].groups if group.description == "both"]
    assert group.ranks == (0, 1)
    [call] = group.calls
    assert (call.operation, call.sequence, call.done) == ("barrier", 1, False)
    assert call.seconds is not None
    assert 0.0 <= call.seconds < 60.0


def test_a_rank_that_entered_nothing_of_a_group_says_so_and_names_no_group_of_others(
    records: list[RankRecord],
) -> None:
    assert {group.ranks for group in records[1].groups} == {(0, 1)}
    entered = sorted(group.entered for group in records[1].groups)
    assert entered == [0, 1]  # the group of both, and the default one
    done = [call for group in records[1].groups for call in group.calls]
    assert [(call.operation, call.done, call.inputs) for call in done] == [
        ("all_reduce", True, ((4,),))
    ]
