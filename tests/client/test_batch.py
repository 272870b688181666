"""A batch in memory, in its file, part by part, and as other projects have it."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy
import tensordict
import torch
from hypothesis import given, settings
from tests.support.mutated import mutated
from tests.support.step_batches import step_batch

from stagescope_wire.batch import Batch, Tensor
from stagescope_wire.batch.converters import keys_of, trajectories
from stagescope_wire.batch.data import Gap
from stagescope_wire.batch.file import describe
from stagescope_wire.errors import InvalidTensor, MissingExtra, NotFound, UnknownName
from stagescope_wire.nonfinite import Json


def bits(batch: Batch) -> dict[str, Json]:
    found = {name: batch.tensor(name) for name in batch}
    return {n: (t.dtype, t.values.shape, t.values.tobytes()) for n, t in found.items()}


def test_a_saved_batch_is_opened_as_it_was(tmp_path: Path) -> None:
    batch = step_batch()
    again = Batch.load(batch.save(tmp_path / "batch.safetensors"))
    assert bits(again) == bits(batch)
    assert describe(again) == describe(batch)
    for own, other in zip(batch.parts, again.parts, strict=True):
        assert (own.rows == other.rows).all()
        assert bits(again.microbatch(other)) == bits(batch.microbatch(own))
    assert [path.name for path in tmp_path.iterdir()] == ["batch.safetensors"]


def test_other_readers_of_safetensors_open_it(tmp_path: Path) -> None:
    batch = step_batch()
    del_bf16 = {name: t for name, t in batch.tensors.items() if t.dtype != "bfloat16"}
    path = dataclasses.replace(batch, tensors=del_bf16).save(tmp_path / "batch.safetensors")
    found = safetensors.numpy.load_file(path)
    assert (found["rollout_log_probs"] == batch["rollout_log_probs"]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stagescope_batch": 2}, "its format is 2"),
        ({"rows": 3}, "has shape"),
        ({"strings": {"sample_ids": ["one"]}}, "sample_ids has 1 texts"),
        ({"parts": [{}]}, "is not a batch"),
        ({"gaps": "x"}, "is not a batch"),
    ],
)
def test_a_file_that_is_no_batch_is_refused(
    tmp_path: Path, change: dict[str, Json], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch = step_batch()
    metadata = {**describe(batch), **change}
    monkeypatch.setattr("stagescope_wire.batch.file.describe", lambda _: metadata)
    path = batch.save(tmp_path / "batch.safetensors")
    with pytest.raises(InvalidTensor, match=message):
        Batch.load(path)


@settings(deadline=None, max_examples=150)
@given(mutated(json.loads(json.dumps(describe(step_batch())))))
def test_any_metadata_give_a_batch_or_an_error(metadata: Json) -> None:
    batch = step_batch()
    with pytest.MonkeyPatch.context() as patched, tempfile.TemporaryDirectory() as directory:
        patched.setattr("stagescope_wire.batch.file.describe", lambda _: metadata)
        path = batch.save(Path(directory) / "batch.safetensors")
        try:
            found = Batch.load(path)
        except InvalidTensor:
            return
        assert len(repr(found)) > 0
        for part in found.parts:
            found.microbatch(part)


def test_a_truncated_or_foreign_file_is_refused(tmp_path: Path) -> None:
    path = step_batch().save(tmp_path / "batch.safetensors")
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(InvalidTensor, match="bytes of tensors"):
        Batch.load(path)
    path.write_bytes(b"")
    with pytest.raises(InvalidTensor, match="claims a header"):
        Batch.load(path)
    safetensors.numpy.save_file({"a": np.zeros(3)}, path)
    with pytest.raises(InvalidTensor, match="is not a batch"):
        Batch.load(path)
    with pytest.raises(NotFound, match="there is no file"):
        Batch.load(tmp_path / "nothing")


def test_a_name_of_the_file_itself_is_refused(tmp_path: Path) -> None:
    batch = step_batch()
    spoiled = {**batch.tensors, "rows/0": batch.tensor("rewards")}
    with pytest.raises(InvalidTensor, match="rows/0"):
        dataclasses.replace(batch, tensors=spoiled).save(tmp_path / "batch.safetensors")
    assert not list(tmp_path.iterdir())


def test_microbatches_are_as_their_stage_saw_them() -> None:
    batch = step_batch()
    micro = list(batch.microbatches())
    place = [(each.source["rank"], each.source["part"]) for each in micro]
    assert place == [(0, "0.0.0.0"), (1, "0.0.0.0"), (0, "0.1.0.0"), (1, "0.1.0.0")]
    assert micro[0]["log_probs"].shape == (2, 3)
    assert micro[0]["responses"].tolist() == [[11, 12, 0], [13, 90, 14]]  # not recorded by it
    assert micro[0]["attention_mask"].shape == (2, 6)
    assert micro[0]["prompts"].shape == (2, 3)
    assert micro[2]["log_probs"].tolist() == [[0.5] * 3] * 2
    assert micro[3]["log_probs"].tolist() == (batch["rollout_log_probs"][2:] - 1).tolist()
    assert [each.numbers["loss"] for each in micro] == [0.25, 0.25, 1.25, 1.25]
    assert micro[1].others["loss"].values == 0.25
    assert micro[1].sample_ids == ("g1_0", "g1_1")
    with pytest.raises(NotFound, match="no stage 'x'; expected one of actor_update"):
        batch.parts_of("x")


def test_an_unknown_name_lists_the_known_ones() -> None:
    with pytest.raises(NotFound, match="no tensor 'entropy'; expected one of prompts, responses"):
        step_batch()["entropy"]
    with pytest.raises(UnknownName, match="'old_logprob'; did you mean old_log_probs"):
        step_batch()["old_logprob"]
    with pytest.raises(NotFound, match="no response_mask; record prompts and responses"):
        next(trajectories(dataclasses.replace(step_batch(), tensors={})))


def test_it_reads_itself_out_with_what_is_missing() -> None:
    text = str(step_batch())
    assert "run r, attempt 1, step 5, 4 rows" in text
    assert "bfloat16" in text
    assert "actor_update (4)" in text
    assert "rank: actor_update has nothing of actor 7" in text
    page = step_batch()._repr_html_()
    assert all(f">{name}<" in page for name in ("old_log_probs", "bfloat16"))
    assert "rank: actor_update has nothing of actor 7" in page
    assert {"old_log_probs", "responses"} <= {*step_batch()._ipython_key_completions_()}
    assert max(map(len, text.splitlines())) <= 80


# --- as others have it ---------------------------------------------------------------------------
def test_torch_tensors_have_the_recorded_bits() -> None:
    batch = step_batch()
    found = batch.as_tensors()
    assert found["old_log_probs"].dtype == torch.bfloat16
    assert found["old_log_probs"].float().tolist() == batch["rollout_log_probs"].tolist()
    assert torch.equal(found["responses"], torch.from_numpy(batch["responses"]))
    found["responses"].zero_()
    assert batch["responses"].any()
    (micro, *_) = batch.microbatches()
    assert micro.as_tensors()["loss"].shape == ()
    assert micro.as_arrays()["old_log_probs"].dtype == np.uint16


def test_a_tensordict_has_the_rows_texts_and_meta() -> None:
    (micro, *_) = step_batch().microbatches()
    found = micro.as_tensordict()
    assert isinstance(found, tensordict.TensorDict)
    assert found.batch_size == torch.Size([2])
    assert list(found["sample_ids"]) == ["g0_0", "g0_1"]
    assert found["meta"]["policy_version"] == 4
    assert found["loss"].item() == 0.25


def test_slime_samples_are_aligned_to_responses() -> None:
    second, third = step_batch().as_slime_samples()[1:3]
    assert second["tokens"] == [1, 2, 13, 90, 14]
    assert second["response_length"] == 3
    assert second["loss_mask"] == [1, 0, 1]
    assert second["rollout_log_probs"] == [-1.0, 0.0, -2.0]
    assert (second["group_index"], second["index"], second["rollout_id"]) == (0, 1, 5)
    assert third["group_index"] == 1
    assert third["reward"] == 0.5
    assert third["weight_versions"] == ["3"]
    assert third["metadata"] == {"sample_id": "g1_0", "group_id": "g1", "run_id": "0"}


def test_nexrl_trajectories_are_whole() -> None:
    second = step_batch().as_nexrl_trajectories()[1]
    log_probs = second["extra_fields"].pop("logprobs")
    rollout = [*trajectories(step_batch())][1].tensors["rollout_log_probs"]
    assert log_probs == [0.0, 0.0, *rollout.tolist()]
    assert second == {
        "tokens": [1, 2, 13, 90, 14],
        "loss_mask": [0, 0, 1, 0, 1],
        "reward": 0.0,
        "is_val": False,
        "extra_fields": {
            "group_id": "g0", "run_id": 1, "task_id": "a", "score": 0.0, "temperature": 0.7,
        },
    }  # fmt: skip


def test_without_an_attention_mask_the_padding_ends_a_response() -> None:
    batch = step_batch()
    left = {name: t for name, t in batch.tensors.items() if name != "attention_mask"}
    lengths = [len(each.tensors["responses"])
               for each in trajectories(dataclasses.replace(batch, tensors=left))]  # fmt: skip
    assert lengths == [2, 3, 1, 4]
    turns = np.array([[0, 0, -1, -1], [0, 0, 1, 1], [0, 0, -1, -1], [0, 0, 0, 0]])
    spoken = {**left, "turn_ids": Tensor("int64", turns)}
    lengths = [len(each.tensors["responses"])
               for each in trajectories(dataclasses.replace(batch, tensors=spoken))]  # fmt: skip
    assert lengths == [2, 4, 2, 4]


def test_rewards_of_tokens_are_summed_where_the_mask_counts() -> None:
    batch = step_batch()
    rewards = Tensor("float32", np.ones((4, 4), np.float32))
    changed = dataclasses.replace(batch, tensors={**batch.tensors, "rewards": rewards})
    assert [each.reward for each in trajectories(changed)] == [2, 2, 1, 4]


def test_a_tensor_that_is_missing_is_named_with_the_reason() -> None:
    batch = step_batch()
    tensors = {n: each for n, each in batch.tensors.items() if n != "rollout_log_probs"}
    why = "rollout_log_probs is float64 and float32"
    gaps = (Gap("tensor", "rollout_ids are missing"), Gap("tensor", why))
    changed = dataclasses.replace(batch, tensors=tensors, gaps=gaps)
    with pytest.raises(NotFound, match=f"the batch has no rollout_log_probs: {why}"):
        next(trajectories(changed)).tensor("rollout_log_probs")


@pytest.mark.parametrize(
    ("samples", "groups", "expected"),
    [
        (("p-0", "p-1"), ("p", "p"), [("p", "0"), ("p", "1")]),
        (("a", "b"), ("p", "p"), [("p", "0"), ("p", "1")]),
        (("a", "b"), None, [("", "a"), ("", "b")]),
        (None, ("p", "q"), [("p", "0"), ("q", "0")]),
    ],
)
def test_a_missing_run_id_is_derived(
    samples: tuple[str, ...] | None, groups: tuple[str, ...] | None, expected: list[Json]
) -> None:
    batch = step_batch().take([0, 1])
    strings = {"sample_ids": samples, "group_ids": groups}
    metadata = {name: texts for name, texts in strings.items() if texts is not None}
    assert keys_of(dataclasses.replace(batch, strings=metadata)) == expected
    named = dataclasses.replace(batch, strings={**metadata, "run_ids": ("7", "8")})
    assert [run for _, run in keys_of(named)] == ["7", "8"]


def test_reading_a_batch_needs_neither_torch_nor_safetensors(tmp_path: Path) -> None:
    path = step_batch().save(tmp_path / "batch.safetensors")
    text = (
        "import sys\n"
        "for name in ('torch', 'safetensors', 'tensordict'): sys.modules[name] = None\n"
        "from stagescope_wire.batch import Batch\n"
        f"batch = Batch.load({str(path)!r})\n"
        "print(batch.rows, len(batch.as_nexrl_trajectories()))\n"
        "try: batch.as_tensors()\n"
        "except ImportError as error: print(error)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": ":".join(sys.path)})  # fmt: skip
    assert done.stdout.startswith("4 4\n")
    assert "needs torch, which is not installed; pip install torch" in done.stdout


def test_without_verl_a_dataproto_says_what_to_install() -> None:
    try:
        import verl  # noqa: F401
    except ImportError:
        with pytest.raises(MissingExtra, match="needs verl"):
            step_batch().as_dataproto()
    else:
        pytest.skip("verl is installed: see tests/verl")
