"""Single samples over HTTP: the list, the tokens of one, and what the loss did to them."""

from __future__ import annotations

import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
from tests.support.api import Rank, Service, service
from tests.support.command_line import invoke
from tests.support.measure import payload
from tokenizers import Tokenizer, decoders, models

import stagescope
from stagescope_service.views.samples.tokens import StepTokens, Update
from stagescope_wire.batch import Batch
from stagescope_wire.batch.data import Gap
from stagescope_wire.errors import InvalidInput, NotFound

STAGE: Final = "actor_compute_log_prob"
# Two ranks of two rows; the last row of each is short. Two rounds, an environment token between.
MASKS: Final = np.array([[1, 1, 0, 1, 1], [1, 0, 1, 0, 0]] * 2, np.float32)
Q: Final = np.array(
    [[-1, -2, 0, -0.5, -3], [-1, 0, -2, 0, 0], [-4, -1, 0, -2, -1], [-2, 0, -1, 0, 0]], np.float32
)
D: Final = np.array(
    [[0.5, -0.25, 0, 2.0, 0], [-1.5, 0, 0.125, 0, 0], [0.25, 3.0, 0, 0, 1.0], [0, 0, -0.5, 0, 0]],
    np.float32,
)
IDS: Final = np.array([[0, 1, 2, 0, 1], [2, 1, 0, 0, 0]] * 2, np.int64)
PROMPTS: Final = np.array([[2, 2, 0, 1], [2, 0, 3, 1]] * 2, np.int64)
"""The first of each rank is padded on the left; 3 is no token of the tokenizer."""
SAMPLES: Final = ("g0/0", "g0/1", "g1/0", "g1/1")
ADVANTAGES: Final = np.array([[1.0] * 5, [0.0] * 5, [-1.0] * 5, [2.0] * 5], np.float32)
REJECTED: Final = (2, 1)
"""(row, token) that the trainer left out of the update's mask: the largest |d|."""
CLIPPED: Final = np.zeros((2, 4, 5), np.int8)
CLIPPED[0, 0, 1], CLIPPED[1, 0, 1] = 1, 1  # in both passes
CLIPPED[0, 2, 0] = -1  # in one alone
MOVED: Final = (0.25, -0.5)
"""What each pass over the rows adds to every log-prob of the policy, in nats."""


def tensors(rows: slice, **values: Any) -> dict[str, object]:
    """A payload of some rows, as a probe sends it."""
    wire = {}
    for name, array in values.items():
        cut = np.ascontiguousarray(array[rows])
        wire[name] = (cut.dtype.name, cut.shape, cut, None)
    strings = {"sample_ids": list(SAMPLES[rows]), "group_ids": ["g0", "g1"] * 2}
    strings["group_ids"] = [name.partition("/")[0] for name in SAMPLES[rows]]
    return {"schema": 1, "tensors": wire, "strings": strings, "meta": {}}


def tokenizer_file(directory: Path) -> Path:
    """A byte-level tokenizer of three tokens: `a`, ` b`, and half of a character."""
    tokenizer = Tokenizer(models.BPE(vocab={"a": 0, "Ġb": 1, "Ã": 2}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    directory.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def running(tmp_path: Path) -> Iterator[Service]:
    with service(tmp_path / "home") as running:
        data = running.settings.data_path
        running.use_ring()
        tokenizer = tokenizer_file(data / "tokenizer")
        settings = {"rollout_is": "token", "rollout_is_threshold": "0.3_5.0",
                    "tokenizer": str(tokenizer)}  # fmt: skip
        ranks = [Rank(running, rank=rank, settings=settings) for rank in (0, 1)]
        update_mask = MASKS.copy()
        update_mask[REJECTED] = 0
        for number, rank in enumerate(ranks):
            rows = slice(2 * number, 2 * number + 2)
            streams = tensors(
                rows, rollout_log_probs=Q, old_log_probs=Q + D, response_mask=MASKS, responses=IDS,
                prompts=PROMPTS,
            )  # fmt: skip
            rank.hand(STAGE, 5, streams)
            loss = tensors(rows, response_mask=update_mask, advantages=ADVANTAGES)
            rank.hand("compute_advantage", 5, loss)
            for epoch in (0, 1):
                each = tensors(
                    rows, response_mask=update_mask, clipped=CLIPPED[epoch],
                    log_probs=Q + D + np.float32(MOVED[epoch]),
                )  # fmt: skip
                rank.hand("actor_update", 5, each, epoch=epoch)
        for rank in ranks:
            rank.stage(STAGE, 6)
        yield running


@pytest.fixture
def step(running: Service) -> Iterator[stagescope.Step]:
    with running.session() as session:
        yield session.step(5)


def test_samples_are_listed_the_worst_first(step: stagescope.Step) -> None:
    table = step.samples()
    size = np.abs(D)
    worst = sorted(range(4), key=lambda row: -size[row].max())
    assert list(table["sample_uid"]) == [SAMPLES[row] for row in worst]
    for found, row in zip(table, worst, strict=True):
        on = MASKS[row] == 1
        assert (found["tokens"], found["rank"], found["row"]) == (on.sum(), row // 2, row % 2)
        assert found["mean_abs"] == pytest.approx(float(size[row][on].mean()), rel=1e-12)
        assert found["max_abs"] == float(size[row].max())
        assert (found["fragments"], found["nonfinite"]) == (1, 0)
    assert all(table["kept"])
    assert list(step.samples(sort="sample_uid")["sample_uid"]) == list(SAMPLES)
    assert list(step.samples(rank=1, sort="tokens")["tokens"]) == [4, 2]
    with pytest.raises(NotFound, match="has no role 'actr'; expected one of actor"):
        step.samples(role="actr")


def test_the_tokens_of_a_sample_say_what_the_loss_did(step: stagescope.Step) -> None:
    found = step.sample("g0/0")
    assert list(found["round"]) == [0, 0, None, 1, 1]
    assert list(found["token_id"]) == IDS[0].tolist()
    assert list(found["text"]) == ["a", " b", "\ufffd", "a", " b"]
    assert found.text == "a b\ufffda b"
    # d of the environment's token, 0.0, is none of the model's.
    assert list(found["d"]) == [0.5, -0.25, None, 2.0, 0.0]
    assert list(found["p"]) == [-0.5, -2.25, None, 1.5, -3.0]
    assert list(found["q"]) == [-1.0, -2.0, None, -0.5, -3.0]
    # e^2 = 7.4 lies beyond 5: IcePop drops it.
    assert found.about["comparable"] == "suspect"  # one token of a few is not finite
    assert list(found["fate"]) == [
        "trained", "clipped high", "environment", "zero weight", "trained"
    ]  # fmt: skip
    assert found["weight_raw"][3] == pytest.approx(math.exp(2), rel=1e-6)
    assert found["weight"][3] == 0.0
    assert found["weight"][0] == pytest.approx(math.exp(0.5), rel=1e-6)
    assert list(found["clipped"]) == [None, "high", None, None, None]
    assert found.about["unrecorded"] == []
    text = "a token counts as clipped where every one of 2 passes clips it"
    assert text in found.about["notes"]


def test_the_prompt_is_shown_as_text_and_ids(running: Service, step: stagescope.Step) -> None:
    prompts = {uid: step.sample(uid).about for uid in ("g0/0", "g0/1")}
    assert [each["prompt_ids"] for each in prompts.values()] == [[2, 0, 1], [2, 0, 3, 1]]
    texts = [each["prompt_text"] for each in prompts.values()]
    assert texts == ["\ufffda b", "\ufffda<3> b"]
    rank = Rank(running, rank=0, key="a2", world_size=1, start=5000.0)
    streams = tensors(slice(2), rollout_log_probs=Q, old_log_probs=Q + D, response_mask=MASKS)
    rank.hand(STAGE, 9, streams)
    rank.stage(STAGE, 10)
    found = running.get("/steps/9/samples/g0/0")
    assert (found["prompt_ids"], found["prompt_text"]) == (None, None)


def test_the_ratio_that_is_clipped_is_the_updates_own_of_each_pass(
    step: stagescope.Step, running: Service
) -> None:
    found = step.sample("g0/0").about
    # Not e^d, the trainer's over the rollout's, which the importance weight is made of.
    for moved, ratios in zip(MOVED, found["update_ratios"], strict=True):
        assert ratios == [
            pytest.approx(math.exp(moved)) if on else None for on in MASKS[0].tolist()
        ]
    assert found["clipped_passes"] == [[None, "high", None, None, None]] * 2
    in_one = running.get("/steps/5/samples/g1/0")
    assert in_one["clipped"] == [None] * 5
    assert in_one["clipped_passes"] == [["low", None, None, None, None], [None] * 5]


def test_a_passs_clip_fraction_can_be_told_from_what_every_pass_clips(
    step: stagescope.Step,
) -> None:
    table = step.loss()
    assert table.about["clipped_in"] == [10, 1, 1]
    assert (
        "; clipped in at least one of 2 passes: 2 tokens (16.7 %), in every pass: 1 (8.33 %). On "
        "average a pass clips 12.5 %, as a logged clip fraction says"
    ) in table.about["note"]
    assert "or clipped in every one of 2 passes" in table.about["note"]
    assert table.about["note"] in table._repr_html_()


def test_what_excludes_a_token_first_is_its_fate(step: stagescope.Step) -> None:
    rejected = step.sample("g1/0")
    # e^3 lies beyond the weights too: that it was rejected comes first. Clipped in one pass alone.
    assert rejected.about["rejected"] == [False, True, False, False, False]
    assert rejected.about["masked_why"] == [None, None, "environment or padding", None, None]
    assert list(rejected["fate"]) == ["trained", "rejected", "environment", "trained", "trained"]
    flat = step.sample("g0/1")
    # e^-1.5 = 0.22 is below 0.3; the others have an advantage of 0. What is padded is left out.
    assert list(flat["fate"]) == ["zero weight", "environment", "zero advantage"]


def test_the_worst_tokens_have_their_text_before_their_id(step: stagescope.Step) -> None:
    table = step.tokens(kind="worst")
    assert list(table.names)[:2] == ["text", "token_id"]
    assert (table[0]["text"], table[0]["token_id"]) == (" b", 1)  # of g1/0, where |d| is 3
    assert table.about["texts_reason"] is None


def test_the_table_says_what_no_gradient_sees(step: stagescope.Step) -> None:
    table = step.loss()
    sums = {row["fate"]: (row["tokens"], row["sum_abs"]) for row in table}
    assert sums == {
        "trained": (7, pytest.approx(0.5 + 0 + 0.25 + 0 + 1.0 + 0 + 0.5)),
        "clipped high": (1, pytest.approx(0.25)),
        "zero advantage": (1, pytest.approx(0.125)),
        "zero weight": (2, pytest.approx(2.0 + 1.5)),
        "rejected": (1, pytest.approx(3.0)),
    }
    total = sum(size for _, size in sums.values())
    shares = {row["fate"]: row["share_of_mismatch"] for row in table}
    assert shares == {fate: pytest.approx(size / total) for fate, (_, size) in sums.items()}
    assert sum(table["tokens"]) == table.about["tokens"] == table.about["tokens_counted"] == 12
    hidden = (total - sums["trained"][1]) / total
    assert table.about["note"].startswith(f"{hidden:.1%} of the mismatch")
    assert [row["gradient"] for row in table] == [True, False, False, False, False]


def test_a_diagnosis_names_the_share_that_the_updates_mask_leaves_out(running: Service) -> None:
    rank = Rank(running, key="a5", world_size=1, start=5000.0)
    rows, update_mask = slice(4), MASKS.copy()
    update_mask[REJECTED] = 0
    both = tensors(rows, rollout_log_probs=Q, old_log_probs=Q + D, response_mask=MASKS)
    rank.hand(STAGE, 9, both)
    rank.hand("actor_update", 9, tensors(rows, response_mask=update_mask))
    rank.stage(STAGE, 10)
    parts = running.get("/runs/r/diagnosis")["mismatch"]
    (part,) = (each for each in parts if each["name"] == "rejected tokens")
    assert part["share"] == pytest.approx(3.0 / np.abs(D).sum())


def test_what_is_not_recorded_excludes_nothing_and_is_named(
    running: Service, step: stagescope.Step
) -> None:
    rank = Rank(running, rank=0, key="a2", world_size=1, start=5000.0)
    only = tensors(slice(2), rollout_log_probs=Q, old_log_probs=Q + D, response_mask=MASKS)
    rank.hand(STAGE, 9, only)
    rank.stage(STAGE, 10)
    answer = running.get("/steps/9/loss")
    assert [(row["fate"], row["gradient"]) for row in answer["rows"]] == [("unknown", None)]
    names = [each["name"] for each in answer["unrecorded"]]
    assert names == ["update", "in_loss", "weight", "advantage", "clipped"]
    assert answer["note"] == (
        "whether any token was trained on is not known; no actor_update of this step was reported: "
        "the tokens may have seen no gradient at all; not recorded: whether the trainer rejected "
        "them, the weights that the loss applies, the advantages, whether the loss clipped them"
    )
    found = running.get("/steps/9/samples/g0/0")
    assert (found["token_ids"], found["texts"]) == (None, None)
    assert (
        "token ids were not recorded" in found["texts_reason"]
        or "no tokenizer" in (found["texts_reason"])
    )
    assert found["weight"] is None
    assert found["advantage"] is None


@pytest.mark.parametrize("status", ["ok", "failed", None])
def test_what_an_update_did_that_did_not_end_is_unknown(
    running: Service, status: str | None
) -> None:
    ranks = [Rank(running, rank=n, key="a4", world_size=2, start=9000.0) for n in (0, 1)]
    for number, rank in enumerate(ranks):
        rows = slice(2 * number, 2 * number + 2)
        both = tensors(
            rows, rollout_log_probs=Q, old_log_probs=Q + D, response_mask=MASKS,
            advantages=ADVANTAGES,
        )  # fmt: skip
        rank.hand(STAGE, 30, both)
        rank.begin("actor_update", 30)
    ranks[0].end("actor_update", 30)
    if status is not None:  # the other rank died in it
        ranks[1].end("actor_update", 30, status=status)
    answer = running.get("/steps/30/loss")
    rest = ("trained", True) if status == "ok" else ("unknown", None)
    found = {(row["fate"], row["gradient"]): row["tokens"] for row in answer["rows"]}
    assert found == {rest: 10, ("zero advantage", False): 2}
    names = [each["name"] for each in answer["unrecorded"]]
    assert ("update" in names) == (status != "ok")
    said = f"actor_update of this step is {status or 'open'} on a rank"
    assert (said in answer["note"]) == (status != "ok")
    fates = running.get("/steps/30/samples/g0/0")["fate"]
    assert fates == [rest[0], rest[0], "environment", rest[0], rest[0]]


def test_a_sample_that_is_not_kept_says_so(running: Service, step: stagescope.Step) -> None:
    with pytest.raises(NotFound, match="no sample 'nobody'"):
        step.sample("nobody")
    with pytest.raises(InvalidInput, match=r"this sample has no id.*record sample_ids"):
        step.sample(None)
    shutil.rmtree(running.settings.data_path / "ring")
    assert running.problem(404, "/steps/5/samples/g0/0")["code"] == "not_found"
    assert running.problem(404, "/steps/5/loss")["code"] == "not_found"
    assert len(step.samples()) == 4  # the list rests on the summary


def test_an_id_may_have_slashes_and_line_ends(running: Service) -> None:
    ids = ["x\ny\r\t", "a/b\n", "?#%2F", " "]
    rank = Rank(running, rank=0, key="a3", world_size=1, start=9000.0)
    payload = tensors(slice(0, 4), rollout_log_probs=Q, old_log_probs=Q + D, response_mask=MASKS)
    payload["strings"] = {"sample_ids": ids}
    rank.hand(STAGE, 20, payload)
    rank.stage(STAGE, 21)
    with running.session() as session:
        step = session.step(20)
        assert {row["sample_uid"] for row in step.samples()} == {*ids}
        assert [step.sample(uid).about["sample_uid"] for uid in ids] == ids


def test_rows_without_ids_are_shown_by_rank_and_row(running: Service) -> None:
    rank = Rank(running, rank=0, key="a3", world_size=1, start=9000.0)
    payload = tensors(slice(0, 4), rollout_log_probs=Q, old_log_probs=Q + D, response_mask=MASKS)
    payload["strings"] = {}
    rank.hand(STAGE, 20, payload)
    rank.stage(STAGE, 21)
    listed = running.get("/steps/20/samples")["rows"]
    assert [row["sample_uid"] for row in listed] == [None] * 4
    first = listed[0]
    shown = running.get(
        "/steps/20/row", role=first["role"], rank=first["rank"], row=first["row"]
    )  # fmt: skip
    assert shown["d"] == [0.25, 3.0, None, 0.0, 1.0]
    assert first["max_abs"] == 3.0
    assert running.problem(404, "/steps/20/row", row=4)["code"] == "not_found"


@pytest.mark.parametrize("content", [b"{}", b"not JSON", None])
def test_a_damaged_or_foreign_tokenizer_is_a_reason(
    content: bytes | None, running: Service, tmp_path: Path
) -> None:
    inside = running.settings.data_path / "other"
    inside.mkdir()
    path = inside / "tokenizer.json" if content is not None else tmp_path / "tokenizer.json"
    if content is not None:
        path.write_bytes(content)
    else:
        shutil.copy(tokenizer_file(tmp_path / "made") / "tokenizer.json", path)
    settings = {"tokenizer": str(path)}
    rank = Rank(running, rank=0, key="a4", world_size=1, start=12000.0, settings=settings)
    payload = tensors(
        slice(2), rollout_log_probs=Q, old_log_probs=Q + D, response_mask=MASKS, responses=IDS
    )
    rank.hand(STAGE, 30, payload)
    rank.stage(STAGE, 31)
    found = running.get("/steps/30/samples/g0/0")
    assert found["texts"] is None
    reason = "damaged" if content is not None else "cannot be read"
    assert reason in found["texts_reason"]
    assert found["token_ids"] == IDS[0].tolist()


def test_the_command_line_asks_the_same(running: Service) -> None:
    environment = running.environment()
    for words in (["samples", "5"], ["sample", "5", "g0/0"], ["loss", "5"]):
        result = invoke(*words, env=environment)
        assert result.exit_code == 0, result.output
    assert "clipped high" in invoke("loss", "5", env=environment).output


def test_samples_of_ids_that_name_several_are_shown_one_by_one(live: Service) -> None:
    live.engine.keep("old_log_probs", "rollout_log_probs", "response_mask", "responses")
    ranks = [Rank(live, rank=rank, world_size=2) for rank in range(2)]
    sent = [payload(seed=rank, first_sample=0) for rank in range(2)]
    for rank, each in zip(ranks, sent, strict=True):
        rank.stage(STAGE, 5, each)
    for rank in ranks:
        rank.begin(STAGE, 6)
    listed = {row["sample_uid"] for row in live.get("/steps/5/samples")["rows"]}
    assert listed == {f"sample-{row} [actor {rank}]" for row in range(4) for rank in range(2)}
    for rank, row in np.ndindex(2, 4):
        found = live.get(f"/steps/5/samples/sample-{row} [actor {rank}]")
        mask = sent[rank]["tensors"]["response_mask"][2][row].astype(bool)
        old = sent[rank]["tensors"]["old_log_probs"][2][row]
        assert np.array(found["p"], float)[mask].tolist() == old[mask].tolist()
        assert found["notes"][0].startswith("read from its own payload alone")
    problem = live.problem(404, "/steps/5/samples/sample-0")
    assert problem["wrong"] == "'sample-0' names 2 samples of step 5"
    assert problem["expected"] == "one of 'sample-0 [actor 0]', 'sample-0 [actor 1]'"


def test_a_step_of_which_nothing_could_be_joined_says_why() -> None:
    why = "1 parts hold pieces of samples without the positions of their tokens"
    batch = Batch(1, {}, source={"step": 3}, gaps=(Gap("joined", why),))
    with pytest.raises(NotFound, match="could be joined has no two streams: no tensor") as raised:
        StepTokens.from_batch(batch, None, [], Update(frozenset()))
    assert why in str(raised.value)
