"""The same trajectories written by slime and AReaL with other padding, alignment and order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tests.support.dump_files import (
    Batch,
    Edit,
    areal_batch,
    areal_file,
    make_batch,
    nexrl_directory,
    slime_rollout_file,
    slime_train_file,
    verl_directory,
)
from tests.support.step_batches import step_batch

from stagescope_service.compare.comparison import compare
from stagescope_service.compare.results import DumpComparison, Verdict
from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.formats.content import read_content, write_content

Content = dict[str, Any]
"""Content of a torch file."""
ROWS = 8
ORDER = (3, 6, 1, 0, 7, 2, 5, 4)


def leftward(data: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Padded on the left."""
    lengths = data["attention_mask"].sum(1).tolist()
    found = {}
    for name, values in data.items():
        shifted = [torch.roll(row, row.numel() - n) for row, n in zip(values, lengths, strict=True)]
        found[name] = values if values.dim() == 1 else torch.stack(shifted)
    return found


def trained(batch: Batch, *, rolled: bool) -> dict[str, torch.Tensor]:
    """With `prox_logp`, which is shifted by one; rolled: after AReaL's compute_advantages."""
    data = areal_batch(batch)

    def shifted(name: str) -> torch.Tensor:
        found = torch.zeros_like(data["logprobs"])
        for row in range(batch.rows):
            start, values = len(batch.prompts[row]) - 1, batch.of_row(name, row)
            found[row, start : start + len(values)] = torch.tensor(values)
        return found

    data["prox_logp"] = shifted("old_log_probs")
    if rolled:
        data |= {name: torch.roll(data[name], -1, 1) for name in ("loss_mask", "logprobs")}
        data["advantages"] = shifted("advantages")
    return data


def compare_both_ways(tmp_path: Path, one: Path, data: object) -> DumpComparison:
    path = tmp_path / "areal.pt"
    torch.save(data, path)
    forth = compare([open_dump(one), open_dump(path)])
    back = compare([open_dump(path), open_dump(one)])
    assert forth.verdict is back.verdict
    return forth


def pairs(result: DumpComparison) -> dict[str, int]:
    return {each.name: each.found.pairs for each in result.pairs[0].tensors}


@pytest.mark.parametrize("order", ["same order", "another order"])
@pytest.mark.parametrize("form", ["dict", "list", "left", "no attention_mask", "left, without"])
def test_the_same_trajectories_are_the_same(tmp_path: Path, form: str, order: str) -> None:
    batch = make_batch(ROWS, 12)
    slime = slime_rollout_file(tmp_path / "slime.pt", batch)
    theirs = batch if order == "same order" else batch.in_order(ORDER)
    if form in ("dict", "list"):
        data = torch.load(areal_file(tmp_path / "theirs.pt", theirs, form=form), weights_only=True)
    else:
        data = areal_batch(theirs)
        data = leftward(data) if form.startswith("left") else data
    if "without" in form or form.startswith("no"):
        del data["attention_mask"]
    result = compare_both_ways(tmp_path, slime, data)
    assert result.verdict is Verdict.SAME, result.reason
    found = pairs(result)
    policy = int(batch.response_mask.sum())
    assert (found["rollout_log_probs"], found["versions"], found["rewards"]) == (
        policy, policy, ROWS,
    )  # fmt: skip
    whole = sum(len(batch.tokens(row)) for row in range(ROWS))
    assert found["tokens"] == whole if form in ("dict", "list", "left") else policy <= whole
    assert result.pairs[0].keys["trajectories"] == ("response tokens",)


@pytest.mark.parametrize("rolled", [False, True])
@pytest.mark.parametrize("order", ["same order", "another order"])
def test_shifted_log_probs_and_advantages_are_the_same(
    tmp_path: Path, order: str, rolled: bool
) -> None:
    batch = make_batch(ROWS, 12)
    slime = slime_train_file(tmp_path / "slime.pt", batch)
    theirs = batch if order == "same order" else batch.in_order(ORDER)
    result = compare_both_ways(tmp_path, slime, trained(theirs, rolled=rolled))
    assert result.verdict is Verdict.SAME, result.reason
    names = {"rollout_log_probs", "old_log_probs", *(["advantages"] if rolled else [])}
    policy = int(batch.response_mask.sum())
    assert {n: c for n, c in pairs(result).items() if n in names} == dict.fromkeys(names, policy)
    assert not [f for f in result.pairs[0].findings if f.kind == "note"]


def test_another_mask_or_other_tokens_are_no_false_difference(tmp_path: Path) -> None:
    batch = make_batch(ROWS, 12)
    slime = slime_rollout_file(tmp_path / "slime.pt", batch)
    data = areal_batch(batch)
    inside = data["loss_mask"][1].nonzero()[1, 0]
    data["loss_mask"][1, inside] = 0  # one token less that the policy made
    result = compare_both_ways(tmp_path, slime, data)
    assert result.exit_status == 2
    found = next(t for t in result.pairs[0].tensors if t.name == "rollout_log_probs")
    assert found.verdict is Verdict.NOT_COMPARABLE
    assert "the lengths differ in 1 of 8 samples" in found.reason
    other = areal_batch(make_batch(ROWS, 12, seed=1))
    result = compare_both_ways(tmp_path, slime, other)
    assert result.first is not None
    assert result.first.station == "tokens"


# --- files that are damaged -----------------------------------------------------------------------
def slime_directory(path: Path) -> Path:
    path.mkdir()
    for step in range(2):
        slime_rollout_file(path / f"rollout_{step}.pt", make_batch(4, 8), rollout_id=step)
    return path


def areal_directory(path: Path) -> Path:
    path.mkdir()
    for step in range(2):
        areal_file(path / f"rollout_{step}.pt", make_batch(4, 8, seed=step))
    return path


def converted_directory(path: Path) -> Path:
    for file in slime_directory(path).glob("*.pt"):
        write_content(file.with_suffix(".json"), read_content(file))
        file.unlink()
    return path


def verl_steps(path: Path) -> Path:
    return verl_directory(path, make_batch(4, 8), steps=(0, 1))


def batch_directory(path: Path) -> Path:
    path.mkdir()
    for name in ("rollout_0", "rollout_1"):
        step_batch().save(path / f"{name}.safetensors")
    return path


DIRECTORIES = {
    "slime": slime_directory, "areal": areal_directory, "converted": converted_directory,
    "verl": verl_steps, "batch": batch_directory,
}  # fmt: skip


@pytest.mark.parametrize("share", [0, 0.02, 0.7])
@pytest.mark.parametrize("form", DIRECTORIES)
def test_a_file_that_was_cut_off_is_never_left_out_in_silence(
    tmp_path: Path, form: str, share: float
) -> None:
    cut, rest = (DIRECTORIES[form](tmp_path / name) for name in ("cut", "rest"))
    for directory in (cut, rest):
        for file in directory.glob("*1.*"):
            if directory == rest or (form == "converted" and file.suffix == ".safetensors"):
                file.unlink()
            else:
                file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    for sides in ((cut, rest), (rest, cut), (cut, cut)):
        result = compare([open_dump(side) for side in sides])
        assert result.verdict is Verdict.NOT_COMPARABLE, result.reason
        damaged = [f for f in result.pairs[0].findings if f.verdict is not Verdict.SAME]
        assert any("1." in item for finding in damaged for item in finding.items)
    if form == "verl":  # a file's name says its step: another step's comparison does without it
        result = compare([open_dump(side, step=0) for side in (cut, rest)])
        assert result.verdict is Verdict.SAME, result.reason
        assert not [f for f in result.pairs[0].findings if f.kind == "damaged"]


def test_a_strange_file_that_is_whole_is_left_out(tmp_path: Path) -> None:
    directory = slime_directory(tmp_path / "slime")
    torch.save(torch.zeros(3), directory / "weights.pt")
    (directory / "config.json").write_text('{"learning_rate": 1e-6}')
    result = compare([open_dump(directory), open_dump(directory)])
    assert result.verdict is Verdict.SAME, result.reason
    assert {f.kind for f in result.pairs[0].findings} == {"unknown"}


def padded_by_nine(left: bool) -> Edit:
    def edit(kind: str, name: str, data: Content) -> None:
        for tensor, values in data.items():
            is_by_row = isinstance(values, torch.Tensor) and values.dim() == 2
            if is_by_row and kind not in ("param", "gradient"):
                data[tensor] = torch.nn.functional.pad(values, (9, 0) if left else (0, 9))

    return edit


@pytest.mark.parametrize("mode", ["self_hosted", "weaver", "remote_api"])
@pytest.mark.parametrize("left", [False, True])
def test_padding_to_another_width_is_the_same(tmp_path: Path, mode: str, left: bool) -> None:
    a = nexrl_directory(tmp_path / "a", mode=mode)
    b = nexrl_directory(tmp_path / "b", mode=mode, edit=padded_by_nine(left))
    for sides in ((a, b), (b, a)):
        result = compare([open_dump(side) for side in sides])
        assert result.verdict is Verdict.SAME, result.reason


def test_columns_that_one_side_has_more_and_that_are_not_zero_are_no_padding(
    tmp_path: Path,
) -> None:
    def edit(kind: str, name: str, data: Content) -> None:
        if kind == "old_log_probs":
            data[kind] = torch.nn.functional.pad(data[kind], (0, 9), value=-1.0)

    a, b = nexrl_directory(tmp_path / "a"), nexrl_directory(tmp_path / "b", edit=edit)
    assert compare([open_dump(a), open_dump(b)]).verdict is Verdict.NOT_COMPARABLE


def test_datums_in_another_order_pair_by_their_tokens(tmp_path: Path) -> None:
    def reversed_rows(kind: str, name: str, data: Content) -> None:
        for rows in ("trajectories", "datums", "advantages"):
            if rows in data:
                data[rows] = data[rows][::-1]

    def moved(kind: str, name: str, data: Content) -> None:
        reversed_rows(kind, name, data)
        if kind == "datums":
            data["datums"][3]["loss_fn_inputs"]["logprobs"][-1] += 0.5

    a = nexrl_directory(tmp_path / "a", mode="remote_api")
    b = nexrl_directory(tmp_path / "b", mode="remote_api", edit=reversed_rows)
    result = compare([open_dump(a), open_dump(b)])
    assert result.verdict is Verdict.SAME, result.reason
    assert result.pairs[0].keys["datums"] == ("response tokens",)
    c = nexrl_directory(tmp_path / "c", mode="remote_api", edit=moved)
    found = compare([open_dump(a), open_dump(c)]).first
    assert found is not None
    assert (found.section, found.name) == ("datums", "loss_fn_inputs/logprobs")
    assert found.location is not None
    assert [at[0] for at in found.location.coordinates] == [12, 3]


def test_a_link_in_a_circle_hides_nothing(tmp_path: Path) -> None:
    a, b = nexrl_directory(tmp_path / "a"), nexrl_directory(tmp_path / "b")
    (b / "loop").symlink_to("loop")
    (b / "forward_data" / "again").symlink_to("../forward_data/again")
    (b / "up").symlink_to("..")
    result = compare([open_dump(a), open_dump(b)])
    assert result.verdict is Verdict.SAME, result.reason
    assert [f.kind for f in result.pairs[0].findings] == ["unknown"] * 3
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (b / "out").symlink_to(elsewhere)  # there may be anything
    assert compare([open_dump(a), open_dump(b)]).verdict is Verdict.NOT_COMPARABLE
