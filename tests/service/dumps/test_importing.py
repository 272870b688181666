"""A dump as the events of its processes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.memory_dumps import MemoryDump

from stagescope_service.dumps.importing import (
    ProcessEvents,
    TrainedSamples,
    import_events,
    import_key,
)
from stagescope_service.dumps.records import DumpContents, DumpEntry, Location
from stagescope_wire.schema import BEGIN, END, FINISH, HELLO, Event, Part, Sender


def values(*shape: int) -> tuple[Any, ...]:
    return ("float32", shape, np.zeros(shape, np.float32), None)


def held(
    tmp_path: Path, section: str, name: str = "f", tensors: Any = (), *,
    texts: Any = None, **location: Any,
) -> DumpContents:  # fmt: skip
    """The contents of a file that exists, as its time and size are read."""
    path = tmp_path / name
    path.touch()
    entry = DumpEntry(section, Location(location.pop("step", 0), **location), path)
    return DumpContents(entry, dict(tensors), **texts or {})


def of_kind(found: Sequence[ProcessEvents], kind: str) -> list[tuple[Sender, Event, ProcessEvents]]:
    return [
        (Sender.parse(batch.sender), event, batch)
        for batch in found
        for event in map(Event.parse, batch.events)
        if event.kind == kind
    ]


def imported(*records: DumpContents, broken: Sequence[Path] = ()) -> list[ProcessEvents]:
    dump = MemoryDump([*records], broken=frozenset(broken))
    return [*import_events(dump, "imported", "key", keep={"what": ["all"]})]


def test_each_section_goes_to_the_stage_that_makes_it(tmp_path: Path) -> None:
    sections = ("trajectories", "old_log_probs", "forward_data", "loss")
    records = [held(tmp_path, name, name, {name: values(2, 3)}) for name in sections]
    ends = of_kind(imported(*records), END)
    assert [(sender.role, end.fields["stage"]) for sender, end, _ in ends] == [
        ("rollout", "rollout_generate"),
        ("driver", "actor_compute_log_prob"),
        ("driver", "actor_update"),
    ]
    # Two sections of one stage and part are one payload of one identity.
    (payload,) = ends[-1][2].payloads.values()
    assert set(payload["tensors"]) == {"forward_data", "loss"}


def test_ranks_and_parts_keep_their_identity(tmp_path: Path) -> None:
    records = [
        held(tmp_path, "loss", f"{step}{rank}{micro}", step=step, rank=rank,
             part=Part(microbatch=micro), texts={"numbers": {"loss": 0.5}})
        for step in (1, 0) for rank in (1, 0) for micro in (1, 0)
    ]  # fmt: skip
    found = imported(*records)
    hellos = of_kind(found, HELLO)
    told = [(sender.role, sender.rank, hello.fields["world_size"]) for sender, hello, _ in hellos]
    assert told == [("actor", 0, 2), ("actor", 1, 2)]
    assert {hello.fields["settings"]["keep"]["what"][0] for _, hello, _ in hellos} == {"all"}
    ends = of_kind(found, END)
    assert [(e.fields["step"], sender.rank, e.fields["microbatch"]) for sender, e, _ in ends] == [
        (step, rank, micro) for step in (0, 1) for rank in (0, 1) for micro in (0, 1)
    ]
    assert all(end.fields["scalars"] == {"loss": 0.5} for _, end, _ in ends)
    assert not any(batch.payloads for batch in found)
    assert len(of_kind(found, FINISH)) == 2
    for (sender, begin, _), (_, end, _) in zip(of_kind(found, BEGIN), ends, strict=True):
        assert end.fields["begin_seq"] == begin.seq
        numbers = [each.seq for kind in (HELLO, BEGIN, END, FINISH)
                   for other, each, _ in of_kind(found, kind) if other == sender]  # fmt: skip
        assert len(numbers) == len(set(numbers))


def test_two_files_of_one_stage_are_never_mixed(tmp_path: Path) -> None:
    # One names the stage that the other has by its section.
    records = [
        held(tmp_path, "trajectories", "b", {"b": values(2)}),
        held(tmp_path, "trajectories", "a", {"a": values(2)}, stage="rollout_generate"),
    ]
    ((_, _, batch),) = of_kind(imported(*records), END)
    assert [set(payload["tensors"]) for payload in batch.payloads.values()] == [{"a"}]
    (problem,) = batch.problems
    assert (problem.kind, problem.path.name) == ("refused", "b")


def test_a_directory_has_one_key_in_a_run_until_it_changes(tmp_path: Path) -> None:
    one, two = held(tmp_path, "loss", "1"), held(tmp_path, "loss", "2")
    assert [each.events for each in imported(one)] == [each.events for each in imported(one)]
    key = import_key(MemoryDump([one]), "a")
    assert import_key(MemoryDump([one]), "a") == key
    assert import_key(MemoryDump([one, two]), "a") != key
    # The key names the processes: those of another run are others.
    other = import_key(MemoryDump([one]), "b")
    assert other != key
    ((sender, *_),) = of_kind([*import_events(MemoryDump([one]), "b", other, keep={})], HELLO)
    assert sender.incarnation.startswith(other)
    os.utime(one.entry.path, (1, 1))
    assert import_key(MemoryDump([one]), "a") != key


def test_an_unreadable_file_is_reported_and_the_others_are_imported(tmp_path: Path) -> None:
    good = held(tmp_path, "loss", "good", {"loss": values(1)})
    bad = held(tmp_path, "is_loss", "bad")
    found = imported(good, bad, broken=[bad.entry.path])
    (batch,) = [batch for batch in found if batch.payloads]
    assert [(each.path, each.entry) for each in batch.problems] == [(bad.entry.path, bad.entry)]
    assert "is truncated" in batch.problems[0].message
    assert [*next(iter(batch.payloads.values()))["tensors"]] == ["loss"]


def test_parameters_have_the_names_that_a_rank_gives_them(tmp_path: Path) -> None:
    records = [held(tmp_path, name, name, {"w": values(4)}) for name in ("parameters", "gradients")]
    ((_, _, batch),) = of_kind(imported(*records), END)
    (payload,) = batch.payloads.values()
    assert {*payload["tensors"]} == {"parameter/w", "gradient/w"}


def test_ids_travel_with_the_rows_and_alone(tmp_path: Path) -> None:
    texts = {"samples": ("g-0", "g-1"), "groups": ("g", "g"), "row_texts": {"run_id": ("0", "1")}}
    for tensors in ({"rewards": values(2)}, {}):
        record = held(tmp_path, "trajectories", "f", tensors,
                      texts={**texts, "about": {"temperature": 1.0}})  # fmt: skip
        ((_, end, batch),) = of_kind(imported(record), END)
        payload = batch.payloads[end.seq]
        assert payload["strings"] == {
            "sample_ids": ["g-0", "g-1"], "group_ids": ["g", "g"], "run_id": ["0", "1"],
        }  # fmt: skip
        assert payload["meta"] == {"temperature": 1.0}
        described = end.fields["payload"]
        assert described["tensors"] == {name: ["float32", [2], None] for name in tensors}
        assert described["bytes"] == 8 * len(tensors)


@pytest.mark.parametrize(
    ("trained", "unnamed", "notes"),
    [
        ("advantages", None, 1),
        ("advantages", "loss", 1),
        ("advantages", "old_log_probs", 0),
        (None, "loss", 0),
        (None, "old_log_probs", 0),
    ],
)
def test_samples_are_missed_only_where_all_that_is_trained_has_names(
    tmp_path: Path, trained: str | None, unnamed: str | None, notes: int
) -> None:
    """A payload with rows and without names may be of any sample; a loss is of none."""
    names = ("s0", "s1", "s2")
    records = [held(tmp_path, "trajectories", "a", {"responses": values(3, 2)},
                    texts={"samples": names})]  # fmt: skip
    if trained is not None:
        records.append(held(tmp_path, trained, "b", {trained: values(2, 2)}, rank=0,
                            texts={"samples": names[:2]}))  # fmt: skip
    if unnamed is not None:
        records.append(held(tmp_path, "loss", "c", {unnamed: values(3, 2)}, rank=1))
    samples = TrainedSamples()
    for batch in imported(*records):
        samples.add(batch)
    assert len([*samples.notes()]) == notes
