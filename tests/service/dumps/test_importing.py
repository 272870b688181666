from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from stagescope_service.dumps.importing import (
    ProcessEvents,
    TrainedSamples,
    import_events,
    import_key,
)
from stagescope_service.dumps.records import DumpContents, DumpEntry, DumpProblem, Location
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.schema import BEGIN, END, FINISH, HELLO, Event, Part, Sender

KEEP = {"what": ["all"]}


@dataclasses.dataclass(frozen=True)
class FakeDump:
    """A dump with given records; an exception is raised when its entry is read."""

    records: Mapping[DumpEntry, DumpContents | Exception]
    name: str = "/dumps"
    kind: str = "nexrl"
    problems: Sequence[DumpProblem] = ()
    about: Mapping[str, object] = dataclasses.field(default_factory=dict)

    @property
    def entries(self) -> Sequence[DumpEntry]:
        return [*self.records]

    def read(self, entry: DumpEntry) -> DumpContents:
        found = self.records[entry]
        if isinstance(found, Exception):
            raise found
        return found


def values(*shape: int) -> tuple[Any, ...]:
    return ("float32", shape, np.zeros(shape, np.float32), None)


def entry(tmp_path: Path, section: str, name: str = "f", **location: Any) -> DumpEntry:
    path = tmp_path / name
    path.touch()
    return DumpEntry(section, Location(step=location.pop("step", 0), **location), path)


def of_kind(found: Sequence[ProcessEvents], kind: str) -> list[tuple[Sender, Event, ProcessEvents]]:
    return [
        (Sender.parse(batch.sender), event, batch)
        for batch in found
        for event in map(Event.parse, batch.events)
        if event.kind == kind
    ]


def imported(dump: FakeDump) -> list[ProcessEvents]:
    return [*import_events(dump, "imported", "key", keep=KEEP)]


def test_each_section_goes_to_the_stage_that_makes_it(tmp_path: Path) -> None:
    sections = ("trajectories", "old_log_probs", "forward_data", "loss")
    entries = [entry(tmp_path, section, section) for section in sections]
    dump = FakeDump({each: DumpContents(each, {each.section: values(2, 3)}) for each in entries})
    ends = of_kind(imported(dump), END)
    assert [(sender.role, end.fields["stage"]) for sender, end, _ in ends] == [
        ("rollout", "rollout_generate"),
        ("driver", "actor_compute_log_prob"),
        ("driver", "actor_update"),
    ]
    (_, _, update) = ends[-1]
    (payload,) = update.payloads.values()
    # Two sections of one stage and part are one payload of one identity.
    assert set(payload["tensors"]) == {"forward_data", "loss"}


def test_ranks_and_parts_keep_their_identity(tmp_path: Path) -> None:
    entries = [
        entry(tmp_path, "loss", f"{step}{rank}{micro}", step=step, rank=rank,
              part=Part(microbatch=micro))
        for step in (1, 0) for rank in (1, 0) for micro in (1, 0)
    ]  # fmt: skip
    dump = FakeDump({each: DumpContents(each, numbers={"loss": 0.5}) for each in entries})
    found = imported(dump)
    hellos = of_kind(found, HELLO)
    assert [
        (sender.role, sender.rank, hello.fields["world_size"]) for sender, hello, _ in hellos
    ] == [
        ("actor", 0, 2),
        ("actor", 1, 2),
    ]
    assert {hello.fields["settings"]["keep"]["what"][0] for _, hello, _ in hellos} == {"all"}
    ends = of_kind(found, END)
    assert [(e.fields["step"], sender.rank, e.fields["microbatch"]) for sender, e, _ in ends] == [
        (step, rank, micro) for step in (0, 1) for rank in (0, 1) for micro in (0, 1)
    ]
    assert all(end.fields["scalars"] == {"loss": 0.5} for _, end, _ in ends)
    assert not any(batch.payloads for batch in found)
    assert len(of_kind(found, FINISH)) == 2


def test_an_end_names_its_begin_and_numbers_never_repeat(tmp_path: Path) -> None:
    dump = FakeDump({each: DumpContents(each) for each in [entry(tmp_path, "loss", rank=3)]})
    found = imported(dump)
    ((_, begin, _),) = of_kind(found, BEGIN)
    ((_, end, _),) = of_kind(found, END)
    assert end.fields["begin_seq"] == begin.seq
    numbers = [Event.parse(event).seq for batch in found for event in batch.events]
    assert numbers == sorted(set(numbers))


def test_texts_alone_are_a_payload(tmp_path: Path) -> None:
    only = entry(tmp_path, "trajectories")
    record = DumpContents(only, samples=("a", "b"), row_texts={"output": ("x", "y")})
    ((_, end, batch),) = of_kind(imported(FakeDump({only: record})), END)
    assert end.fields["payload"]["tensors"] == {}
    assert batch.payloads[end.seq]["strings"] == {"sample_ids": ["a", "b"], "output": ["x", "y"]}


def test_two_files_of_one_stage_are_never_mixed(tmp_path: Path) -> None:
    # One names the stage that the other has by its section.
    entries = [
        entry(tmp_path, "trajectories", "b"),
        entry(tmp_path, "trajectories", "a", stage="rollout_generate"),
    ]
    dump = FakeDump({each: DumpContents(each, {each.path.name: values(2)}) for each in entries})
    ((_, _, batch),) = of_kind(imported(dump), END)
    assert [set(payload["tensors"]) for payload in batch.payloads.values()] == [{"a"}]
    (problem,) = batch.problems
    assert (problem.kind, problem.path.name) == ("refused", "b")


def test_importing_a_directory_twice_yields_the_same_events(tmp_path: Path) -> None:
    dump = FakeDump({each: DumpContents(each) for each in [entry(tmp_path, "loss")]})
    assert [batch.events for batch in imported(dump)] == [batch.events for batch in imported(dump)]
    assert import_key(dump, "a") == import_key(dump, "a")


def test_another_run_has_other_processes(tmp_path: Path) -> None:
    dump = FakeDump({each: DumpContents(each) for each in [entry(tmp_path, "loss")]})
    keys = [import_key(dump, run) for run in ("a", "b")]
    senders = {Sender.parse(batch.sender).incarnation
               for run, key in zip("ab", keys, strict=True)
               for batch in import_events(dump, run, key, keep=KEEP)}  # fmt: skip
    assert len(senders) == 2


def test_a_directory_that_grew_is_another_attempt(tmp_path: Path) -> None:
    one, two = entry(tmp_path, "loss", "1"), entry(tmp_path, "loss", "2")
    key = import_key(FakeDump({one: DumpContents(one)}), "run")
    assert import_key(FakeDump({one: DumpContents(one), two: DumpContents(two)}), "run") != key
    os.utime(one.path, (1, 1))
    assert import_key(FakeDump({one: DumpContents(one)}), "run") != key


def test_an_unreadable_file_is_reported_and_the_others_are_imported(tmp_path: Path) -> None:
    good, bad = entry(tmp_path, "loss", "good"), entry(tmp_path, "is_loss", "bad")
    dump = FakeDump({good: DumpContents(good, {"loss": values(1)}), bad: InvalidTensor("cut off")})
    (batch,) = [batch for batch in imported(dump) if batch.payloads]
    assert [(each.path, each.entry) for each in batch.problems] == [(bad.path, bad)]
    assert "cut off" in batch.problems[0].message
    assert [*next(iter(batch.payloads.values()))["tensors"]] == ["loss"]


@pytest.mark.parametrize(
    ("section", "name"), [("parameters", "parameter/w"), ("gradients", "gradient/w")]
)
def test_parameters_have_the_names_that_a_rank_gives_them(
    tmp_path: Path, section: str, name: str
) -> None:
    one = entry(tmp_path, section)
    (batch,) = [
        batch
        for batch in imported(FakeDump({one: DumpContents(one, {"w": values(4)})}))
        if batch.payloads
    ]
    (payload,) = batch.payloads.values()
    assert [*payload["tensors"]] == [name]


def test_ids_travel_with_the_rows(tmp_path: Path) -> None:
    one = entry(tmp_path, "trajectories")
    record = DumpContents(
        one, {"rewards": values(2)}, samples=("g-0", "g-1"), groups=("g", "g"),
        row_texts={"run_id": ("0", "1")}, about={"temperature": 1.0},
    )  # fmt: skip
    (batch,) = [batch for batch in imported(FakeDump({one: record})) if batch.payloads]
    (payload,) = batch.payloads.values()
    assert payload["strings"] == {
        "sample_ids": ["g-0", "g-1"], "group_ids": ["g", "g"], "run_id": ["0", "1"],
    }  # fmt: skip
    assert payload["meta"] == {"temperature": 1.0}
    ((_, end, _),) = of_kind([batch], END)
    assert end.fields["payload"]["tensors"] == {"rewards": ["float32", [2], None]}
    assert end.fields["payload"]["bytes"] == 8


@pytest.mark.parametrize(
    ("tensor", "notes"), [(None, 1), ("loss", 1), ("old_log_probs", 0)], ids=str
)
def test_samples_are_missed_only_where_all_that_is_trained_has_names(
    tmp_path: Path, tensor: str | None, notes: int
) -> None:
    """A payload with rows and without names may be of any sample; a loss is of none."""
    sampled = entry(tmp_path, "trajectories", "a")
    trained = entry(tmp_path, "advantages", "b", rank=0)
    records: dict[DumpEntry, DumpContents | Exception] = {
        sampled: DumpContents(sampled, {"responses": values(3, 2)}, samples=("s0", "s1", "s2")),
        trained: DumpContents(trained, {"advantages": values(2, 2)}, samples=("s0", "s1")),
    }
    if tensor is not None:
        unnamed = entry(tmp_path, "loss", "c", rank=1)
        records[unnamed] = DumpContents(unnamed, {tensor: values(1, 2)})
    samples = TrainedSamples()
    for batch in imported(FakeDump(records)):
        samples.add(batch)
    assert len([*samples.notes()]) == notes


def test_a_training_whose_rows_have_no_names_lacks_no_sample(tmp_path: Path) -> None:
    sampled, trained = entry(tmp_path, "trajectories", "a"), entry(tmp_path, "loss", "b")
    for tensor in ("loss", "old_log_probs"):
        samples = TrainedSamples()
        records: dict[DumpEntry, DumpContents | Exception] = {
            sampled: DumpContents(sampled, {"responses": values(3, 2)}, samples=("s0", "s1", "s2")),
            trained: DumpContents(trained, {tensor: values(3, 2)}),
        }
        for batch in imported(FakeDump(records)):
            samples.add(batch)
        assert not [*samples.notes()]
