"""A run whose files are imported has its numbers, whatever form its ranks recorded."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tests.support.api import Rank, Service, service
from tests.support.parallel import Sample, Span, make_samples, payload_of, zigzag

import stagescope
from stagescope_service.commands.importing import import_dump
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.own_file import PayloadFile, open_payloads
from stagescope_service.dumps.joining.join import join
from stagescope_service.dumps.nexrl_writer import write_nexrl
from stagescope_wire.keep import SECTIONS
from stagescope_wire.policy_versions import text_versions

STREAMS = ("old_log_probs", "rollout_log_probs", "response_mask", "responses")
SAMPLES = make_samples(3, 6, 9, "s")
STAGE = "actor_compute_log_prob"


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("home")) as made:
        made.use_ring()
        made.engine.keep(*SECTIONS)
        yield made


@pytest.fixture(scope="module")
def session(running: Service) -> Iterator[stagescope.Session]:
    with running.session("operate") as found:
        yield found


def whole(samples: Sequence[Sample] = SAMPLES) -> list[Span]:
    return [Span(sample, np.arange(len(sample))) for sample in samples]


def rank_payload(spans: Sequence[Span], *more: str, **extra: Any) -> dict[str, Any]:
    made: dict[str, Any] = dict(payload_of(spans, streams=(*STREAMS, *more), version=9))
    made["tensors"] |= extra
    return made


def padded(payload: dict[str, Any]) -> dict[str, Any]:
    """Rows beside each other, as wide as the widest."""
    for name, (tag, _, values, offsets) in payload["tensors"].items():
        rows = np.split(values, offsets[1:-1])
        width = max(map(len, rows))
        table = np.stack([np.pad(row, (0, width - len(row))) for row in rows])
        payload["tensors"][name] = (tag, table.shape, table, None)
    return payload


def packed(payload: dict[str, Any], *, row: bool = False) -> dict[str, Any]:
    """Rows one after the other in [tokens] or [1, tokens], with cu_seqlens."""
    offsets = payload["tensors"]["old_log_probs"][3]
    for name, (tag, _, values, own) in payload["tensors"].items():
        if own is not None:
            values = values[None] if row else values
            payload["tensors"][name] = (tag, values.shape, values, None)
    lengths = offsets.astype(np.int32)
    payload["tensors"]["cu_seqlens"] = ("int32", lengths.shape, lengths, None)
    return payload


def without_ids(payload: dict[str, Any]) -> dict[str, Any]:
    payload["strings"] = {}
    return payload


def by_rows(name: str, values: Any) -> Any:
    array = np.asarray(values)
    return {name: (array.dtype.name, array.shape, array, None)}


def texts(*versions: str) -> dict[str, Any]:
    tensor, names = text_versions([versions[i % len(versions)] for i in range(6)]) or (None, {})
    made = rank_payload(whole(), versions=tensor)
    made["meta"] |= {"version_names": names} if names else {}
    return made


def halves() -> list[dict[str, Any]]:
    first = [Span(s, np.arange(len(s) // 2)) for s in SAMPLES]
    second = [Span(s, np.arange(len(s) // 2, len(s))) for s in SAMPLES]
    starts = by_rows("token_offset", [len(s) // 2 for s in SAMPLES])
    zeros = by_rows("token_offset", [0] * 6)
    return [rank_payload(first, "round_ids", **zeros), rank_payload(second, "round_ids", **starts)]


CP = [{"layout": {"cp_rank": rank, "cp_size": 2}, "data_rank": 0} for rank in (0, 1)]
TP = [{"layout": {"tp_rank": rank, "tp_size": 2}, "data_rank": 0} for rank in (0, 1)]
DP: list[dict[str, Any]] = [{}, {}]
zigzags = [[Span(s, zigzag(len(s), rank)) for s in SAMPLES] for rank in (0, 1)]

FORMS: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "padded": ([padded(rank_payload(whole()[:3])), padded(rank_payload(whole()[3:]))], DP),
    "padded, no ids": (
        [without_ids(padded(rank_payload(part))) for part in (whole()[:3], whole()[3:])], DP,
    ),
    "ragged": ([rank_payload(whole()[:3]), rank_payload(whole()[3:])], DP),
    "packed": ([packed(rank_payload(whole()[:3])), packed(rank_payload(whole()[3:]))], DP),
    "packed, no ids": (
        [without_ids(packed(rank_payload(part))) for part in (whole()[:3], whole()[3:])], DP,
    ),
    "packed in a row": ([packed(rank_payload(whole()), row=True)], DP[:1]),
    "packed with rows": (
        [packed(rank_payload(whole(), **by_rows("rewards", np.arange(6.0))))], DP[:1],
    ),
    "packed, one token a row": (
        [packed(rank_payload([Span(s, np.arange(1)) for s in SAMPLES]))], DP[:1],
    ),
    "zigzag": ([rank_payload(s, "positions", "round_ids") for s in zigzags], CP),
    "zigzag, packed": ([packed(rank_payload(s, "positions", "round_ids")) for s in zigzags], CP),
    "zigzag, padded": ([padded(rank_payload(s, "positions", "round_ids")) for s in zigzags], CP),
    "token offsets": (halves(), CP),
    "replicas": ([without_ids(padded(rank_payload(whole())))] * 2, TP),
    "turns": ([rank_payload(whole(), "turn_ids")], DP[:1]),
    "rounds": ([rank_payload(whole(), "round_ids")], DP[:1]),
    "versions of tokens": ([rank_payload(whole(), "versions")], DP[:1]),
    "versions of rows": ([rank_payload(whole(), **by_rows("versions", [7, 8, 9] * 2))], DP[:1]),
    "versions of rows, packed": (
        [packed(rank_payload(whole(), **by_rows("versions", [7, 8, 9] * 2)))], DP[:1],
    ),
    "texts of versions": ([texts("step-8", "step-9")], DP[:1]),
    "texts of versions, no number": ([texts("default", "b7c2")], DP[:1]),
    "producers": (
        [rank_payload(whole()) | {"meta": {"producers": {"rollout": "engine", "old": "trainer"}}}],
        DP[:1],
    ),
}  # fmt: skip


def answers_of(running: Service, run: str) -> dict[str, Any]:
    """What is known of the numbers of a step."""
    found = running.get("/steps/5/metrics", run=run)
    sides = ("round", "turn", "staleness")
    return {
        "metrics": found["metrics"],
        "checks": found["comparability"],
        "comparable": found["comparable"],
        "tokens": [
            found["coverage"][name] for name in ("tokens", "tokens_sent", "duplicates_left_out")
        ],
        "left_out": found["coverage"]["tokens_left_out"],
        **{by: running.get("/steps/5/rounds", run=run, by=by)["rows"] for by in sides},
    }


def train(running: Service, run: str, form: str, stage: str = STAGE) -> Path:
    payloads, hellos = (FORMS if stage == STAGE else UPDATES)[form]
    for number, (payload, hello) in enumerate(zip(payloads, hellos, strict=True)):
        rank = Rank(running, run=run, rank=number, world_size=len(payloads), **hello)
        rank.stage(stage, 5, payload, policy_version=9)
        rank.say("finish")
    return running.settings.data_path / run


def flat(value: Any, name: str = "") -> dict[str, Any]:
    """Return the values of nested dicts and lists by their place."""
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return {n: v for key, item in items for n, v in flat(item, f"{name}/{key}").items()}
    return {name: value}


def is_same(one: Any, other: Any) -> bool:
    """Whether values are equal; rows in another order have sums of another last digit."""
    if isinstance(one, float) and isinstance(other, float):
        return one == pytest.approx(other, rel=1e-12, nan_ok=True)
    return repr(one) == repr(other)


@pytest.mark.parametrize("form", FORMS)
def test_an_import_of_kept_files_has_the_numbers_of_the_run(
    running: Service, session: stagescope.Session, form: str
) -> None:
    run = f"own-{[*FORMS].index(form)}"
    kept = train(running, run, form)
    report = import_dump(session, open_dump(kept), f"{run}-again")
    assert (report["problems"], report["refused"], report["left_out"]) == ([], [], {})
    one, other = answers_of(running, run), answers_of(running, f"{run}-again")
    for part in one:
        assert repr(other[part]) == repr(one[part]), part


@pytest.mark.parametrize("form", FORMS)
def test_an_import_of_a_saved_batch_has_the_numbers_of_the_run(
    running: Service, session: stagescope.Session, form: str, tmp_path: Path
) -> None:
    run = f"batch-{[*FORMS].index(form)}"
    files = map(PayloadFile, sorted(train(running, run, form).rglob("*.safetensors")))
    batch = join(open_payloads(files, run), 5)
    batch.save(tmp_path / "batch.safetensors")
    report = import_dump(session, open_dump(tmp_path), f"{run}-again")
    assert (report["problems"], report["refused"], report["left_out"]) == ([], [], {})
    one, other = answers_of(running, run), answers_of(running, f"{run}-again")
    for part in one:
        assert repr(other[part]) == repr(one[part]), part


UPDATES: dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]] = {
    "padded": ([padded(rank_payload(s, "log_probs")) for s in (whole()[:3], whole()[3:])], DP),
    "ragged": ([rank_payload(whole(), "log_probs", "turn_ids", "versions")], DP[:1]),
    "zigzag": ([rank_payload(s, "log_probs", "positions", "round_ids") for s in zigzags], CP),
    "no ids, replicas": ([without_ids(padded(rank_payload(whole(), "log_probs")))] * 2, TP),
    "groups, rewards, other streams": (
        [
            rank_payload(
                whole(), "log_probs",
                ref_log_probs=payload_of(whole(), streams=["old_log_probs"], version=9)["tensors"][
                    "old_log_probs"
                ],
                **by_rows("rewards", np.arange(6.0)),
            )
            | {"strings": {"sample_ids": [s.uid for s in SAMPLES], "group_ids": [*"aabbcc"]}}
        ],
        DP[:1],
    ),
}  # fmt: skip
"""What ranks record in the update, where each of them has a file in NexRL's layout."""
STAGES = [(STAGE, form) for form in FORMS] + [("actor_update", form) for form in UPDATES]


@pytest.mark.parametrize("format", ["pt", "jsonl"])
@pytest.mark.parametrize(("stage", "form"), STAGES)
def test_an_import_of_an_export_has_the_numbers_of_the_run(
    running: Service,
    session: stagescope.Session,
    stage: str,
    form: str,
    format: str,
    tmp_path: Path,
) -> None:
    run = f"export-{STAGES.index((stage, form))}-{format}"
    written = write_nexrl(open_dump(train(running, run, form, stage)), tmp_path / "out", format)
    report = import_dump(session, open_dump(tmp_path / "out"), f"{run}-again")
    assert (report["problems"], report["refused"], report["left_out"]) == ([], [], {})
    one, other = answers_of(running, run), answers_of(running, f"{run}-again")
    if any("which rows" in message for message in written.left_out):
        # Of the copies of a row NexRL's file has one; `left_out` says so.
        for answers in (one, other):
            answers["tokens"], answers["left_out"] = answers["tokens"][0], None
    differing = {
        place: (flat(one).get(place), flat(other).get(place))
        for place in flat(one) | flat(other)
        if not is_same(flat(one).get(place), flat(other).get(place))
    }
    assert differing == {}


@pytest.mark.parametrize("format", ["pt", "jsonl"])
def test_an_export_has_the_log_probs_that_another_stage_recorded(
    running: Service, session: stagescope.Session, format: str, tmp_path: Path
) -> None:
    run = f"apart-{format}"
    engine = Rank(running, run=run, role="rollout", world_size=1)
    prompts = by_rows("prompts", np.full((len(SAMPLES), 2), 7))
    streams = ("rollout_log_probs", "response_mask", "responses")
    sampled: dict[str, Any] = dict(payload_of(whole(), streams=streams, version=9))
    sampled["tensors"] |= prompts
    engine.stage("rollout_generate", 5, sampled, policy_version=9)
    engine.say("finish")
    actor = Rank(running, run=run, world_size=1)
    scored = payload_of(whole(), streams=("old_log_probs", "response_mask"), version=9)
    actor.stage(STAGE, 5, scored, policy_version=9)
    actor.say("finish")
    write_nexrl(open_dump(running.settings.data_path / run), tmp_path / "out", format)
    report = import_dump(session, open_dump(tmp_path / "out"), f"{run}-again")
    assert (report["problems"], report["refused"], report["left_out"]) == ([], [], {})
    train(running, f"{run}-together", "packed in a row")
    runs = (f"{run}-together", f"{run}-again")
    one, other = (running.get("/steps/5/metrics", run=each) for each in runs)
    ours, theirs = flat(one["metrics"]), flat(other["metrics"])
    assert {name for name in ours if not is_same(ours[name], theirs.get(name))} == set()
