"""What becomes of one payload, without Ray and without a catalogue."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.support.measure import ingest_job, payload
from tests.support.routes import routed

from stagescope_service.coordinator.aggregation import assembly
from stagescope_service.core import payloads
from stagescope_service.core.entities import Attempt, Process
from stagescope_service.core.findings import FindingLocation
from stagescope_service.core.handshakes import reading_settings
from stagescope_service.core.instructions import PayloadKey, Put
from stagescope_service.ingest.ingestors import IngestWorker
from stagescope_service.ingest.reader import Outcome, PayloadReader, sample_rows
from stagescope_service.ingest.recompute import Recomputer
from stagescope_service.statistics import PartRecord, assemble
from stagescope_service.statistics.codec import summary_from_bytes
from stagescope_service.statistics.payload import read_value
from stagescope_service.store.ring import Ring
from stagescope_service.store.tensorfile import read_tensors
from stagescope_wire.errors import InvalidTensor
from stagescope_wire.schema import Event, Part, Work
from stagescope_wire.tensorfile import WireTensor

JOB = ingest_job()


def reader(directory: Path) -> PayloadReader:
    return PayloadReader(directory, "node-1", Ring(directory / "ring", 1 << 20))


def take(tmp_path: Path, ids: list[str], **tensors: WireTensor) -> Outcome:
    taken = payload()
    taken["strings"] = {"sample_ids": ids}
    taken["tensors"] |= tensors
    return reader(tmp_path).read(PayloadKey("incarnation", 1), JOB, taken)


def test_ids_of_prompts_taken_for_ids_of_samples_lose_no_token(tmp_path: Path) -> None:
    outcome = take(tmp_path, ["one", "one", "two", "two"])
    assert (outcome.state, outcome.reason) == ("ingested", None)
    (row,) = [put.row for put in outcome.rows if put.table == "summaries"]
    summary = summary_from_bytes(row["summary"])
    part = PartRecord("incarnation:1", summary, JOB["stage"], "actor", 0)
    whole = assemble([part])
    assert (whole.sent, whole.total.masked, len(whole.contradictions)) == (44, 44, 2)
    place: FindingLocation = {
        "run": "r", "attempt_id": 1, "step": 5, "stage": whole.stage, "wall": 0.0
    }  # fmt: skip
    found = [put.row for put in assembly.findings(whole, place) if isinstance(put, Put)]
    assert [row["kind"] for row in found] == ["sample_ids_contradict"]
    assert "group_ids" in found[0]["advice"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_lists_of_responses_belong_to_padded_log_probs(side: str, tmp_path: Path) -> None:
    mask = np.array([[1, 1, 0, 1, 0, 0], [1, 0, 0, 0, 0, 0]])
    ids = np.array([[11, 12, 13, 14, 0, 0], [21, 0, 0, 0, 0, 0]])
    if side == "left":
        mask, ids = mask[:, ::-1], ids[:, ::-1]
    p = np.where(mask, -1.0, 0.0).astype(np.float32)
    raw = {
        "old_log_probs": p, "rollout_log_probs": p - mask * 0.5, "response_mask": mask,
        "responses": [row[row > 0].tolist() for row in ids],
    }  # fmt: skip
    ring = Ring(tmp_path / "ring", 1 << 20)
    outcome = PayloadReader(tmp_path, "n", ring).read(PayloadKey("incarnation", 1), JOB, raw)
    assert (outcome.state, outcome.reason) == ("ingested", None)
    (row,) = [put.row for put in outcome.rows if put.table == "summaries"]
    summary = summary_from_bytes(row["summary"])
    assert {*summary.worst.token_id.tolist()} == {*ids[mask == 1].tolist()}
    (kept,) = [put.row for put in outcome.rows if put.table == "artifacts"]
    assert np.array_equal(read_tensors(Path(kept["path"])).tensors["responses"][2], ids)


def test_lists_of_responses_that_fit_on_neither_side_are_refused(tmp_path: Path) -> None:
    mask = np.array([[0, 1, 1, 0]])
    raw = {"old_log_probs": -1.0 * mask, "rollout_log_probs": -2.0 * mask, "response_mask": mask}
    for responses in ([5, 6], [5, 6, 7], [5] * 9):
        outcome = reader(tmp_path).read(
            PayloadKey("incarnation", 1), JOB, raw | {"responses": [responses]}
        )
        assert outcome.state == "refused"
        assert "pad responses as old_log_probs is" in str(outcome.rows)


@pytest.mark.parametrize("changed", ["p", "mask", "nothing"])
def test_of_rows_of_one_sample_in_a_payload_the_last_counts(tmp_path: Path, changed: str) -> None:
    """As if each row were handed over in a part of its own."""
    p = -np.arange(1.0, 13.0, dtype=np.float32) / 8
    rows, masks = np.stack([p, p]), np.ones((2, 12), np.int64)
    if changed == "p":
        rows[0] -= 1.0
    if changed == "mask":
        masks[1, 6:] = 0
    raw = {
        "old_log_probs": rows, "rollout_log_probs": np.stack([p, p]), "response_mask": masks,
        "responses": np.tile(np.arange(12), (2, 1)), "sample_ids": ["one", "one"],
    }  # fmt: skip
    ring = Ring(tmp_path / "ring", 1 << 20)
    outcome = PayloadReader(tmp_path, "n", ring).read(PayloadKey("incarnation", 1), JOB, raw)
    (row,) = [put.row for put in outcome.rows if put.table == "summaries"]
    summary = summary_from_bytes(row["summary"])
    assert summary.total.masked == (6 if changed == "mask" else 12)
    assert summary.left_out == {"repeated": 12}
    assert summary.total.abs_max == 0.0
    (found,) = [put.row for put in outcome.rows if put.table == "findings"]
    if changed == "nothing":
        assert (found["kind"], found["severity"]) == ("rows_repeated", "info")
        assert found["evidence"] == {"rows": 1, "tokens": 12}
        assert "12 tokens are left out as repeated" in found["message"]
    else:
        assert found["kind"] == "rows_differ"
        assert "the last row of each counts" in found["message"]


def test_what_a_gone_node_left_on_the_disk_is_read_again_and_told_to_the_catalogue(
    tmp_path: Path,
) -> None:
    old = IngestWorker("old", tmp_path, [tmp_path], ring_bytes=1 << 20)
    key = PayloadKey("incarnation", 1)
    outcome = old.ingest(key, JOB, payload())
    (row,) = [put.row for put in outcome.rows if put.table == "artifacts"]
    beside = IngestWorker("b", tmp_path, [tmp_path], ring_bytes=1 << 20, alive=lambda: ("old", "b"))
    assert beside.samples(key, JOB) is None  # it is the other's while that lives
    new = IngestWorker("new", tmp_path, [tmp_path], ring_bytes=1 << 20, alive=lambda: ("new",))
    assert new.samples(key, JOB) == [f"sample-{number}" for number in range(4)]
    rows = new.ingest(PayloadKey("incarnation", 2), JOB, payload(seed=2)).rows

    def nobody_knows() -> list[str]:
        raise RuntimeError("the GCS is away")

    third = IngestWorker("third", tmp_path, [tmp_path], ring_bytes=1 << 20, alive=nobody_knows)
    assert third.ingest(PayloadKey("incarnation", 3), JOB, payload()).state == "ingested"
    moved = [put.row for put in rows if put.table == "artifacts" and "kind" not in put.row]
    assert moved == [{"artifact_id": row["artifact_id"], "node_id": "new"}]
    assert Path(str(row["path"])).exists()


@pytest.mark.parametrize(
    "settings", [{"rollout_is": "tokn"}, {"rollout_is": "token", "rollout_is_threshold": "abc"}]
)
def test_a_setting_that_verl_does_not_have_loses_no_number(
    tmp_path: Path, settings: dict[str, object]
) -> None:
    found, plain = (
        PayloadReader(tmp_path / name, "node-1", Ring(tmp_path / name, 1 << 20)).read(
            PayloadKey("i", 1), ingest_job(settings=given), payload()
        )
        for name, given in (("wrong", settings), ("none", {}))
    )
    assert (found.state, found.reason) == ("ingested", None)
    first, second = (
        [put.row["summary"] for put in each.rows if put.table == "summaries"]
        for each in (found, plain)
    )
    assert first == second


def findings_of(tmp_path: Path, **changed: WireTensor | None) -> list[tuple[str, str]]:
    """Read a payload whose tensors are `changed` (None: left out), of a probe that reported it."""
    taken = payload()
    taken["tensors"] = {k: v for k, v in {**taken["tensors"], **changed}.items() if v is not None}
    outcome = reader(tmp_path).read(PayloadKey("incarnation", 1), ingest_job(reported=True), taken)
    assert outcome.state == "refused"
    rows = [put.row for put in outcome.rows if put.table == "findings"]
    return [(row["kind"], row["message"]) for row in rows]


STREAMS = {
    "rollout": "rollout_log_probs", "old": "old_log_probs", "current": "log_probs",
    "ref": "ref_log_prob", "recomputed": "recomputed_log_probs",
}  # fmt: skip


def non_finite_in(
    tmp_path: Path, tensors: dict[str, npt.NDArray[np.generic]], **job: object
) -> dict[str, dict[str, int]]:
    """Read a payload; return the kind of each finding of values that are not finite -> evidence."""
    wires = {name: (each.dtype.name, each.shape, each, None) for name, each in tensors.items()}
    taken = {"schema": 1, "tensors": wires, "strings": {}, "meta": {}}
    outcome = reader(tmp_path).read(PayloadKey("incarnation", 1), ingest_job(**job), taken)
    assert outcome.state == "ingested"
    rows = [put.row for put in outcome.rows if put.table == "findings"]
    return {row["kind"]: row["evidence"] for row in rows if row["kind"].startswith("nonfinite")}


@pytest.mark.parametrize("minibatch", [0, 1])
@pytest.mark.parametrize("beside", [(), ("rollout",), ("old",), ("old", "rollout"), (*STREAMS,)])
@pytest.mark.parametrize("stream", STREAMS)
def test_each_stream_is_counted_whatever_stands_beside_it(
    stream: str, beside: tuple[str, ...], minibatch: int, tmp_path: Path
) -> None:
    random = np.random.default_rng(3)
    tensors: dict[str, npt.NDArray[np.generic]] = {
        STREAMS[name]: -random.exponential(1.0, (4, 12)).astype(np.float32)
        for name in {*beside, stream}
    }
    mask = np.ones((4, 12), np.int64)
    mask[:, 10:] = 0
    odd = np.asarray(tensors[STREAMS[stream]])
    odd[0, :3], odd[1, 4], odd[2, 5], odd[3, 11] = np.nan, np.inf, -np.inf, np.nan
    found = non_finite_in(tmp_path, {**tensors, "response_mask": mask}, minibatch=minibatch)
    expected = {f"{stream}_nan": 3, f"{stream}_posinf": 1, f"{stream}_neginf": 1}
    assert found == {"nonfinite_log_probs": expected}


@pytest.mark.parametrize("name", ["advantages", "values", "returns", "entropy", "rewards"])
def test_values_of_the_update_are_counted(name: str, tmp_path: Path) -> None:
    mask = np.ones((4, 12), np.int64)
    mask[0, 0] = 0
    values = np.zeros((4, 12), np.float32)
    values[0, :3] = np.nan
    found = non_finite_in(tmp_path / "wide", {name: values, "response_mask": mask})
    assert found == {"nonfinite_values": {f"{name}_nan": 2}}
    by_row = np.array([np.inf, 0.0, 1.0, np.nan])
    found = non_finite_in(tmp_path / "rows", {name: by_row, "response_mask": mask})
    assert found == {"nonfinite_values": {f"{name}_nan": 1, f"{name}_posinf": 1}}
    assert non_finite_in(tmp_path / "masked", {name: values, "response_mask": mask * 0}) == {}


def test_streams_in_bfloat16_are_counted(tmp_path: Path) -> None:
    bits = np.full((4, 12), 0xBF80, np.uint16)  # -1.0
    bits[0, :3] = 0x7FC0, 0x7F80, 0xFF80
    taken = payload()
    taken["tensors"] = {
        "ref_log_probs": ("bfloat16", bits.shape, bits, None),
        "response_mask": ("int64", bits.shape, np.ones(bits.shape, np.int64), None),
    }
    outcome = reader(tmp_path).read(PayloadKey("incarnation", 1), JOB, taken)
    (row,) = [put.row for put in outcome.rows if put.table == "findings"]
    assert row["evidence"] == {"ref_nan": 1, "ref_posinf": 1, "ref_neginf": 1}
    assert row["message"].endswith(" of 48 tokens")


def test_what_its_probe_has_reported_is_not_reported_again(tmp_path: Path) -> None:
    assert findings_of(tmp_path, response_mask=None) == []
    narrow = np.zeros((4, 11), np.float32)
    assert findings_of(tmp_path, rollout_log_probs=("float32", narrow.shape, narrow, None)) == []
    # Values are not looked at in the training process.
    mask = np.full((4, 12), 2, np.int64)
    [(kind, message)] = findings_of(tmp_path, response_mask=("int64", mask.shape, mask, None))
    assert kind == "payload_invalid_tensor"
    assert "response_mask" in message


@pytest.mark.parametrize(
    "value", [{"old_log_probs": "x"}, {"response_mask": {"a": 1}}, {1: np.zeros(3)}]
)
def test_a_value_that_is_no_tensor_is_refused_by_name(value: object) -> None:
    with pytest.raises(InvalidTensor, match="an array, a tensor or a list of rows"):
        read_value(value)


def test_routes_of_rows_that_count_elsewhere_are_left_out(tmp_path: Path) -> None:
    step = routed(rows=4, tokens=12, flips=0.2)
    intake = PayloadReader(tmp_path, "node-1", Ring(tmp_path / "ring", 1 << 20))
    whole, rest = step.payload(), step.payload(slice(1, 4))
    assert intake.read(PayloadKey("incarnation", 1), JOB, whole).state == "ingested"
    again = Recomputer(intake).recompute(
        PayloadKey("incarnation", 1), JOB, ("old", "rollout"), [(0, 0, 12)]
    )
    outcome = intake.read(PayloadKey("incarnation", 2), JOB, rest)
    (row,) = [put.row for put in outcome.rows if put.table == "summaries"]
    found, expected = (summary_from_bytes(each).routing for each in (again, row["summary"]))
    assert found is not None
    assert expected is not None
    assert found.counts.tolist() == expected.counts.tolist()
    assert found.tokens.tolist() == expected.tokens.tolist()


@pytest.mark.parametrize("as_list", [False, True])
def test_routes_of_a_raw_caller_are_not_counted_and_a_finding_says_so(
    as_list: bool, tmp_path: Path
) -> None:
    raw = routed(rows=4, tokens=12).tensors()
    if as_list:
        raw["rollout_routed_experts"] = [*raw["rollout_routed_experts"]]
    outcome = reader(tmp_path).read(PayloadKey("incarnation", 1), ingest_job(), raw)
    assert outcome.state == "ingested"
    assert [put for put in outcome.rows if put.table == "summaries"]
    findings = [put.row for put in outcome.rows if put.table == "findings"]
    kinds = {row["kind"]: row["message"] for row in findings}
    assert "only a probe counts routes" in kinds["routes_refused"]


def test_a_misspelt_mask_of_a_raw_caller_is_one_finding(tmp_path: Path) -> None:
    taken = payload()
    taken["tensors"]["respones_mask"] = taken["tensors"].pop("response_mask")
    outcome = reader(tmp_path).read(PayloadKey("incarnation", 1), JOB, taken)
    [found] = [put.row for put in outcome.rows if put.table == "findings"]
    assert "response_mask is missing" in found["message"]
    assert "rename respones_mask" in found["message"]
    attempt, process = Attempt(1, "r", 1, "k"), Process("raw/r", 1, "actor", 0, 0.0, raw=True)
    for names, kinds in (
        (taken["tensors"], []),  # it is what the payload's own finding says
        ({"rollout_logprobs": None}, ["misspelt_tensor"]),
    ):
        event = Event("end", 1, 1.0, 1.0, {})
        out = payloads.announce(
            attempt, process, event, Work(1, None, "s"), {"tensors": names}, has_payload=False
        )
        told = [put.row["kind"] for put in out if isinstance(put, Put) and put.table == "findings"]
        assert told == kinds
        process.payloads.clear()


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_rows_of_one_id_in_a_payload_count_each_content_once(data: st.DataObject) -> None:
    """Two microbatches of a rank whose rows are drawn from a few samples under fewer ids."""
    rng = np.random.default_rng(data.draw(st.integers(0, 1 << 20)))
    sizes = rng.integers(1, 12, 5)
    values = [-rng.exponential(1.0, (2, size)).astype(np.float32) for size in sizes]
    row = st.tuples(st.sampled_from("xyz"), st.integers(0, 4))
    with TemporaryDirectory() as folder:
        intake = PayloadReader(Path(folder), "node-1", Ring(Path(folder) / "ring", 1 << 20))
        recomputer = Recomputer(intake)
        parts, sent = [], 0
        seen: set[tuple[str, int]] = set()
        for seq in (1, 2):
            rows = data.draw(st.lists(row, min_size=1, max_size=6))
            seen |= set(rows)
            sent += sum(int(sizes[of]) for _, of in rows)
            chosen = [values[of] for _, of in rows]
            raw = {
                "old_log_probs": [each[0] for each in chosen],
                "rollout_log_probs": [each[1] for each in chosen],
                "response_mask": [np.ones(each.shape[1], np.int64) for each in chosen],
                "sample_ids": [name for name, _ in rows],
            }
            job = ingest_job(microbatch=seq)
            outcome = intake.read(PayloadKey("i", seq), job, raw)
            assert outcome.state == "ingested", outcome.reason
            (put,) = [put.row for put in outcome.rows if put.table == "summaries"]
            summary = summary_from_bytes(put["summary"])
            part = Part(microbatch=seq)
            parts.append(PartRecord(f"i:{seq}", summary, JOB["stage"], "actor", 0, part))
        whole = assemble(parts)
        for item in whole.to_recompute:
            at = [part.key for part in parts].index(item.key)
            key = PayloadKey("i", at + 1)
            again = recomputer.recompute(key, JOB, ("old", "rollout"), item.skips)
            parts[at] = dataclasses.replace(
                parts[at],
                summary=summary_from_bytes(again),
                handed=parts[at].summary,
                skipped=item.skips,
            )
        whole = assemble(parts)
    assert not whole.to_recompute
    assert whole.total.masked == sum(int(sizes[of]) for _, of in seen)
    assert whole.sent == sent
    assert whole.unaccounted == 0
    assert whole.tokens_left_out == (
        {"repeated": sent - whole.total.masked} if sent > whole.total.masked else {}
    )


def test_producers_are_said_by_a_payload_or_once_by_its_process(tmp_path: Path) -> None:
    settings = reading_settings({"producers": {"rollout": "engine", "old": "trainer"}, "verl": {}})
    taken = payload()
    for seq, meta in enumerate(({}, {"producers": {"rollout": "other", "old": "other"}}), start=1):
        said = {**taken, "meta": meta}
        outcome = reader(tmp_path).read(PayloadKey("i", seq), ingest_job(settings=settings), said)
        (row,) = [put.row for put in outcome.rows if put.table == "summaries"]
        found = summary_from_bytes(row["summary"])
        want = ("other", "other") if meta else ("trainer", "engine")
        assert found.produced == {want: found.total.tokens}


def test_pieces_of_a_sample_that_are_placed_share_its_id(tmp_path: Path) -> None:
    offsets = np.array([0, 12, 0, 12], np.int64)
    placed = ("int64", offsets.shape, offsets, None)
    outcome = take(tmp_path, ["one", "one", "two", "two"], token_offset=placed)
    assert (outcome.state, outcome.reason) == ("ingested", None)


def test_round_ids_that_cannot_be_rounds_are_said_and_lose_no_token(tmp_path: Path) -> None:
    ids = np.full((4, 12), 2**40)
    outcome = take(
        tmp_path, ["one", "two", "three", "four"], round_ids=("int64", ids.shape, ids, None)
    )
    assert outcome.state == "ingested"
    (found,) = [put.row for put in outcome.rows if put.table == "findings"]
    assert (found["kind"], found["evidence"]["tensors"]) == ("too_many_rounds", ["round_ids"])
    (row,) = [put.row for put in outcome.rows if put.table == "summaries"]
    summary = summary_from_bytes(row["summary"])
    assert (summary.total.tokens, len(summary.rounds.keys)) == (44, 2)


@given(st.lists(st.lists(st.booleans(), min_size=3, max_size=3), min_size=1, max_size=5))
def test_rows_of_samples_have_their_number_of_rounds(masks: list[list[bool]]) -> None:
    on, rows = np.array(masks), len(masks)
    ids = [f"sample-{row}" for row in range(rows)]
    tensors = {"response_mask": ("bool", on.shape, on, None)}
    rounds = np.tile([0, 2, 2], (rows, 1))
    named = {**tensors, "round_ids": ("int64", rounds.shape, rounds, None)}
    expected = [sum(1 for a, b in zip([False, *row], row, strict=False) if b > a) for row in masks]
    for sent, counts in (
        (tensors, expected),
        (
            named,
            [len({r for r, kept in zip((0, 2, 2), row, strict=True) if kept}) for row in masks],
        ),
        ({**tensors, "token_offset": ("int64", (rows,), np.zeros(rows, np.int64), None)}, None),
        ({}, None),
    ):
        read = [
            put.row.get("rounds")
            for put in sample_rows(
                JOB, read_value({"schema": 1, "tensors": sent, "strings": {"sample_ids": ids}})
            )
        ]
        assert read == ([None] * rows if counts is None else counts)


def test_the_mask_of_a_loss_does_not_split_rounds() -> None:
    """An update may reject single tokens: the sample has the rounds that were sampled."""
    on = np.array([[1, 1, 0, 1, 1]])
    tensors = {
        "response_mask": ("int64", on.shape, on, None), "responses": ("int64", on.shape, on, None),
    }  # fmt: skip
    value = {"schema": 1, "tensors": tensors, "strings": {"sample_ids": ["one"]}}
    job = ingest_job(stage="actor_update")
    (put,) = sample_rows(job, read_value(value))
    assert not {"rounds", "tokens", "tokens_hash"} & {*put.row}
    tensors["rollout_log_probs"] = ("float32", on.shape, np.zeros(on.shape, np.float32), None)
    (put,) = sample_rows(job, read_value(value))
    assert (put.row["rounds"], put.row["tokens"]) == (2, 4)


@pytest.mark.parametrize("form", ["offsets", "packed", "packed row"])
def test_packed_rows_are_told_apart(form: str) -> None:
    """The row of each sample has the hash, the number and the rounds of its own tokens."""
    flat, bounds = np.arange(7), np.array([0, 2, 2, 7])
    on = np.array([1, 1, 1, 0, 1, 0, 1])
    shape = (1, 7) if form == "packed row" else (7,)
    offsets = bounds if form == "offsets" else None
    tensors = {
        "responses": ("int64", shape, flat.reshape(shape), offsets),
        "response_mask": ("int64", shape, on.reshape(shape), offsets),
    }
    if form != "offsets":
        tensors["cu_seqlens"] = ("int64", bounds.shape, bounds, None)
    ids = ["one", "none", "two"]
    payload = {"schema": 1, "tensors": tensors, "strings": {"sample_ids": ids}}
    rows = [put.row for put in sample_rows(JOB, read_value(payload))]
    assert [row["tokens"] for row in rows] == [2, 0, 3]
    assert [row["rounds"] for row in rows] == [1, 0, 3]
    assert rows[0]["tokens_hash"] != rows[2]["tokens_hash"]
    padded = np.array([[0, 1, 9, 9, 9], [9] * 5, [2, 3, 4, 5, 6]])
    mask = np.array([[1, 1, 0, 0, 0], [0] * 5, [1, 0, 1, 0, 1]])
    same = {"responses": ("int64", padded.shape, padded, None),
            "response_mask": ("int64", mask.shape, mask, None)}  # fmt: skip
    also = sample_rows(JOB, read_value({**payload, "tensors": same}))
    assert [row["tokens_hash"] for row in rows] == [put.row["tokens_hash"] for put in also]


def test_a_file_of_the_ring_says_itself_whose_it_is(tmp_path: Path) -> None:
    take(tmp_path, ["one", "two", "three", "four"])
    (path,) = (tmp_path / "ring").glob("*.safetensors")
    job = read_tensors(path).metadata["job"]
    assert {name: job[name] for name in JOB} == JOB
    assert (job["incarnation"], job["seq"]) == ("incarnation", 1)
