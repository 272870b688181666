"""Directories of dumps, written with torch.save in the layouts of the projects that write them.

Every writer takes the same `Batch`, so that what one format says can be held against another.
`edit(kind, name, data)` may change what a file is about to hold: `kind` is its directory (or the
format), `name` the file's name without its suffix.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from tests.support.batches import wire

from stagescope_service.dumps.discover import open_dump
from stagescope_service.dumps.records import Dump, DumpContents
from stagescope_service.store.artifacts import kept_path, step_directory
from stagescope_service.store.kept import Kept, write_kept
from stagescope_wire.keep import sections_of
from stagescope_wire.schema import Part
from stagescope_wire.tensorfile import Array

Number = TypeVar("Number", int, float)
Edit = Callable[[str, str, dict[str, object]], None]

GROUP = 4
"""Trajectories of one prompt."""


@dataclasses.dataclass(frozen=True)
class Batch:
    """The trajectories of one step, their responses padded on the right with 0.

    Attributes:
        prompts: int64 [rows][prompt tokens].
        responses, response_mask: int64 [rows, tokens]; two rounds with an answer of the
            environment between them.
        lengths: int64 [rows], of the responses.
        rollout_log_probs, old_log_probs, log_probs, entropy, advantages: float32 [rows, tokens].
        rewards: float64 [rows].
        groups, runs: group_id and run_id of each row.
    """

    prompts: list[list[int]]
    responses: Array
    response_mask: Array
    lengths: Array
    rollout_log_probs: Array
    old_log_probs: Array
    log_probs: Array
    entropy: Array
    advantages: Array
    rewards: Array
    groups: list[str]
    runs: list[int]

    @property
    def rows(self) -> int:
        return len(self.prompts)

    def in_order(self, order: Sequence[int]) -> Batch:
        """The same trajectories in another order."""

        def moved(values: Any) -> Any:
            is_array = isinstance(values, np.ndarray)
            return values[[*order]] if is_array else [values[row] for row in order]

        fields = (each.name for each in dataclasses.fields(self))
        return Batch(**{name: moved(getattr(self, name)) for name in fields})

    @property
    def samples(self) -> list[str]:
        return [f"{group}_{run}" for group, run in zip(self.groups, self.runs, strict=True)]

    def tokens(self, row: int) -> list[int]:
        """Prompt and response of a row, without padding."""
        response: list[int] = self.responses[row, : self.lengths[row]].tolist()
        return self.prompts[row] + response

    def loss_mask(self, row: int) -> list[int]:
        """As wide as `tokens`."""
        mask: list[int] = self.response_mask[row, : self.lengths[row]].tolist()
        return [0] * len(self.prompts[row]) + mask

    def of_row(self, name: str, row: int) -> list[Any]:
        """A tensor's values of a row's response, without padding."""
        values: list[object] = getattr(self, name)[row, : self.lengths[row]].tolist()
        return values

    def padded(self, name: str, rows: slice = slice(None)) -> torch.Tensor:
        """A tensor of some rows, padded, as torch has it."""
        return torch.from_numpy(getattr(self, name)[rows].copy())

    def input_ids(self, rows: slice = slice(None)) -> torch.Tensor:
        """Prompts padded on the left, responses on the right."""
        width = max(map(len, self.prompts))
        prompts = [[0] * (width - len(prompt)) + prompt for prompt in self.prompts]
        whole = np.concatenate([np.array(prompts, np.int64), self.responses], axis=1)
        return torch.from_numpy(whole[rows].copy())


def read_first(path: Path, **options: Any) -> DumpContents:
    """Open a dump and read its first entry."""
    dump = open_dump(path, **options)
    return dump.read(dump.entries[0])


def rows_in(record: DumpContents, name: str) -> list[list[Any]]:
    """The rows of a ragged tensor."""
    _, _, values, offsets = record.tensors[name]
    assert offsets is not None
    return [values[a:b].tolist() for a, b in itertools.pairwise(offsets)]


def all_problems(found: Dump | DumpContents) -> str:
    """All that is said to be wrong."""
    return "; ".join(problem.message for problem in found.problems)


def same_contents(one: DumpContents, other: DumpContents) -> None:
    """Check that two dumps hold the same in a place; their metadata may differ."""
    assert one.entry.location == other.entry.location
    assert {*one.tensors} == {*other.tensors}
    for name, (tag, shape, values, offsets) in one.tensors.items():
        assert other.tensors[name][:2] == (tag, shape), name
        np.testing.assert_array_equal(other.tensors[name][2], values)
        np.testing.assert_array_equal(other.tensors[name][3], offsets)
    np.testing.assert_equal(dict(other.numbers), dict(one.numbers))
    assert (other.samples, other.groups, other.mask) == (one.samples, one.groups, one.mask)
    assert other.row_texts == one.row_texts


def make_batch(rows: int, tokens: int, *, seed: int = 0, step: int = 0) -> Batch:
    """Make a step's batch; the same arguments make the same."""
    rng = np.random.default_rng([seed, step + 1])
    prompt_lengths = rng.integers(2, 6, rows)
    prompts = [rng.integers(5, 1000, length).tolist() for length in prompt_lengths]
    lengths = rng.integers(max(tokens // 2, 1), tokens + 1, rows)
    at = np.arange(tokens)[None, :]
    there = at < lengths[:, None]
    between = (at >= lengths[:, None] // 3) & (at < lengths[:, None] // 2)
    mask = there & ~between
    old = np.where(there, -rng.exponential(1.0, (rows, tokens)), 0.0)
    noise = np.where(there, rng.normal(0.0, 0.01, (2, rows, tokens)), 0.0)
    rewards = rng.integers(0, 2, rows).astype(np.float64)

    def single(values: Array) -> Array:
        return np.asarray(values, np.float32)

    return Batch(
        prompts=prompts,
        responses=np.where(there, rng.integers(5, 1000, (rows, tokens)), 0),
        response_mask=mask.astype(np.int64),
        lengths=lengths,
        rollout_log_probs=single(np.where(mask, old + noise[0], 0.0)),
        old_log_probs=single(old),
        log_probs=single(old + noise[1]),
        entropy=single(np.where(there, rng.exponential(0.5, (rows, tokens)), 0.0)),
        advantages=single(np.where(mask, (rewards - rewards.mean())[:, None], 0.0)),
        rewards=rewards,
        groups=[f"g{row // GROUP}" for row in range(rows)],
        runs=[row % GROUP for row in range(rows)],
    )


def nexrl_directory(
    path: Path,
    *,
    steps: Iterable[int] = (0,),
    ranks: int = 2,
    micros: int = 2,
    rows: int = 4,
    tokens: int = 16,
    seed: int = 0,
    mode: str = "self_hosted",
    suffix: str = "pt",
    order: Sequence[int] | None = None,
    edit: Edit | None = None,
) -> Path:
    """Write what NexRL's dumper writes: `{path}/{type}/step_{N:06d}[_rank{r}[_micro{m}]].pt`.

    Args:
        path: the directory; it is made, with every subdirectory, as NexRL makes them.
        steps: of the training.
        ranks, micros: each file of forward_data and loss holds one microbatch of one rank.
        rows: of one microbatch; a step has ranks * micros * rows trajectories.
        tokens: the width of the responses.
        seed: the same seed writes the same values.
        mode: 'self_hosted', 'remote_api' or 'weaver': which files there are.
        suffix: 'pt' or 'jsonl'.
        order: of the trajectories of the step.
        edit: may change what is written.
    """
    write = _Writer(path, suffix, edit)
    for step in steps:
        batch = make_batch(ranks * micros * rows, tokens, seed=seed, step=step)
        batch = batch if order is None else batch.in_order(order)
        if mode == "remote_api":
            _write_remote(write, step, batch)
            continue
        if mode == "self_hosted":
            write("trajectory", step, _trajectories(batch))
            write("old_log_probs", step, _old_log_probs(batch))
        for rank in range(ranks):
            write("gradient", step, _parameter(step, rank, "gradient"), rank)
            write("param", step, _parameter(step, rank, "param"), rank)
            for micro in range(micros):
                begin = (rank * micros + micro) * rows
                chosen = slice(begin, begin + rows)
                _write_micro(write, step, rank, micro, batch, chosen, mode)
    return path


class _Writer:
    def __init__(self, path: Path, suffix: str, edit: Edit | None) -> None:
        self.path, self.suffix, self.edit = path, suffix, edit
        for kind in (
            "trajectory", "old_log_probs", "forward_data", "loss", "param", "gradient",
            "prepared_trajectories", "datums", "training_metrics",
        ):  # fmt: skip
            (path / kind).mkdir(parents=True, exist_ok=True)

    def __call__(self, kind: str, step: int, data: dict[str, object], *numbers: int) -> None:
        """Write a file; `numbers` are the rank and the microbatch, as far as it has them."""
        labels = zip(("rank", "micro"), numbers, strict=False)
        name = "_".join([f"step_{step:06d}", *(f"{label}{number}" for label, number in labels)])
        data = {"step": step, **dict(zip(("rank", "micro_idx"), numbers, strict=False)), **data}
        if self.edit is not None:
            self.edit(kind, name, data)
        file = self.path / kind / f"{name}.{self.suffix}"
        file.parent.mkdir(exist_ok=True)
        if self.suffix == "pt":
            torch.save(data, file)
        else:
            file.write_text(json.dumps(_plain(data)) + "\n")


def _plain(value: object) -> object:
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if isinstance(value, dict):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _trajectories(batch: Batch) -> dict[str, object]:
    trajectories = [
        {
            "tokens": batch.tokens(row), "loss_mask": batch.loss_mask(row),
            "reward": float(batch.rewards[row]), "is_val": False,
            "extra_fields": {
                "group_id": batch.groups[row], "run_id": batch.runs[row], "task_id": row // GROUP,
                "score": float(batch.rewards[row]), "temperature": 1.0,
            },
        }
        for row in range(batch.rows)
    ]  # fmt: skip
    return {"num_trajectories": batch.rows, "trajectories": trajectories}


def _old_log_probs(batch: Batch) -> dict[str, object]:
    values = batch.padded("old_log_probs")
    info = {"batch_size": batch.rows, "input_ids_shape": [*batch.input_ids().shape]}
    return {"old_log_probs": values, "shape": [*values.shape], "batch_info": info}


def _parameter(step: int, rank: int, kind: str) -> dict[str, object]:
    rng = np.random.default_rng([step + 1, rank])
    values = torch.from_numpy(rng.normal(size=(8, 8))).to(torch.bfloat16)
    known = values.float()
    return {
        "param_name": "model.layers.0.self_attn.q_proj.weight", kind: values, "shape": [8, 8],
        "dtype": str(values.dtype), "norm": float(known.norm()), "mean": float(known.mean()),
        "std": float(known.std()),
    }  # fmt: skip


def _write_micro(
    write: _Writer, step: int, rank: int, micro: int, batch: Batch, rows: slice, mode: str
) -> None:
    values = {
        name: batch.padded(name, rows)
        for name in ("log_probs", "old_log_probs", "entropy", "advantages", "response_mask")
    }
    ids = batch.input_ids(rows)
    forward: dict[str, object] = {
        name: values[name] for name in ("log_probs", "entropy", "response_mask")
    }
    shapes = {f"{name}_shape": [*values[name].shape] for name in ("log_probs", "entropy")}
    write("forward_data", step, {**forward, **shapes, "input_ids": ids}, rank, micro)
    inside = values["response_mask"]
    ratio = torch.exp(values["log_probs"] - values["old_log_probs"])
    elementwise = -ratio * values["advantages"] * inside
    count = max(int(inside.sum()), 1)
    policy = float(elementwise.sum()) / count
    entropy = float((values["entropy"] * inside).sum()) / count
    losses = {"loss": policy - 0.01 * entropy, "pg_loss": policy, "entropy_loss": entropy}
    extra = {"epoch": 0, "batch_idx": micro}
    write("loss", step, {**losses, "extra_info": extra}, rank, micro)
    if mode != "weaver":
        return
    debug: dict[str, object] = {
        name: values[name] for name in ("log_probs", "old_log_probs", "advantages")
    }
    debug |= {"prob_ratio": ratio, "elementwise_loss": elementwise, "effective_valid": inside}
    write("is_loss_debug", step, {**debug, "loss": torch.tensor(losses["loss"])}, rank, micro)
    inputs: dict[str, object] = {"input_ids": ids, "attention_mask": (ids != 0).long()}
    write("batch_inputs", step, inputs, rank, micro)


def _write_remote(write: _Writer, step: int, batch: Batch) -> None:
    prepared = _trajectories(batch)
    prepared["advantages"] = [batch.of_row("advantages", row) for row in range(batch.rows)]
    write("prepared_trajectories", step, prepared)
    datums = []
    for row in range(batch.rows):
        tokens, mask = batch.tokens(row), batch.loss_mask(row)
        before = [0.0] * (len(batch.prompts[row]) - 1)
        inputs = {
            "target_tokens": tokens[1:],
            "logprobs": before + batch.of_row("rollout_log_probs", row),
            "advantages": before + batch.of_row("advantages", row),
            "loss_mask": [float(value) for value in mask[1:]],
        }
        datums.append({"input_tokens": tokens[:-1], "loss_fn_inputs": inputs})
    write("datums", step, {"num_datums": len(datums), "datums": datums})
    metrics = {"loss:sum": 0.25, "grad_norm": 1.5, "tokens": 128, "status": "ok"}
    write("training_metrics", step, {"metrics": metrics})


def slime_rollout_file(path: Path, batch: Batch, *, rollout_id: int = 0, **changes: object) -> Path:
    """Write slime's `--save-debug-rollout-data`; `changes` replace fields of every sample."""
    samples = [
        {
            "group_index": row // GROUP, "index": row, "rollout_id": None,
            "prompt": f"question {row}", "tokens": batch.tokens(row), "multimodal_inputs": None,
            "response": f"answer {row}", "response_length": int(batch.lengths[row]), "label": "1",
            "reward": float(batch.rewards[row]), "loss_mask": batch.of_row("response_mask", row),
            "weight_versions": ["3"],
            "rollout_log_probs": batch.of_row("rollout_log_probs", row),
            "remove_sample": False, "teacher_log_probs": None, "status": "completed",
            "metadata": {"source": "made"}, "spec_info": {"spec_accept_token_num": 0},
            **changes,
        }
        for row in range(batch.rows)
    ]  # fmt: skip
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"rollout_id": rollout_id, "samples": samples}, path)
    return path


def slime_train_file(path: Path, batch: Batch, *, rollout_id: int = 0) -> Path:
    """Write slime's `--save-debug-train-data`, format version 2, of two ranks."""
    ranks = 2

    def tensor(name: str, row: int) -> torch.Tensor:
        return torch.tensor(batch.of_row(name, row))

    samples = [
        {
            "data_parallel_rank": row % ranks, "sample_index": row, "rollout_position": row,
            "tokens": torch.tensor(batch.tokens(row)), "loss_masks": tensor("response_mask", row),
            "total_lengths": len(batch.tokens(row)), "response_lengths": int(batch.lengths[row]),
            "rewards": float(batch.rewards[row]),
            "rollout_log_probs": tensor("rollout_log_probs", row),
            "log_probs": tensor("old_log_probs", row), "advantages": tensor("advantages", row),
            "returns": tensor("advantages", row),
        }
        for row in range(batch.rows)
    ]  # fmt: skip
    rows_of = [list(range(rank, batch.rows, ranks)) for rank in range(ranks)]
    shards = [
        {"rank": rank, "data_parallel_rank": rank, "sample_indices": rows, "partition": rows,
         "micro_batch_indices": [[0]]}
        for rank, rows in enumerate(rows_of)
    ]  # fmt: skip
    whole = {"format_version": 2, "rollout_id": rollout_id, "rank": 0, "samples": samples}
    path.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**whole, "dp_shards": shards, "raw_reward": batch.rewards.tolist()}, path)
    return path


def areal_batch(batch: Batch) -> dict[str, torch.Tensor]:
    """AReaL's batch of padded sequences; index t of every tensor is token t (not shifted)."""
    width = max(len(batch.tokens(row)) for row in range(batch.rows))

    def pad(values: list[Number], fill: Number) -> list[Number]:
        return values + [fill] * (width - len(values))

    made: dict[str, list[object]] = {
        name: [] for name in ("input_ids", "loss_mask", "logprobs", "versions", "attention_mask")
    }
    for row in range(batch.rows):
        tokens, mask = batch.tokens(row), batch.loss_mask(row)
        prompt = len(batch.prompts[row])
        log_probs = [0.0] * prompt + batch.of_row("rollout_log_probs", row)
        made["input_ids"].append(pad(tokens, 0))
        made["loss_mask"].append(pad(mask, 0))
        made["logprobs"].append(pad(log_probs, 0.0))
        made["versions"].append(pad([3 if on else -1 for on in mask], -1))
        made["attention_mask"].append(pad([True] * len(tokens), False))
    kinds = {"logprobs": torch.float32, "attention_mask": torch.bool}
    found = {n: torch.tensor(v, dtype=kinds.get(n, torch.int32)) for n, v in made.items()}
    return {**found, "rewards": torch.tensor(batch.rewards, dtype=torch.float32)}


def areal_file(path: Path, batch: Batch, *, form: str = "dict") -> Path:
    """Write AReaL's `batch_data.pt`: a 'dict' of padded tensors, a 'list' of dicts a trajectory
    ([1, tokens]), or a 'tensordict'."""
    padded = areal_batch(batch)
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == "dict":
        torch.save(padded, path)
    elif form == "tensordict":
        from tensordict import TensorDict

        torch.save(TensorDict(dict(padded), batch_size=[batch.rows]), path)
    else:
        lengths = padded["attention_mask"].sum(1).tolist()
        rows = [
            {
                name: values[row : row + 1, :length].clone() if values.dim() > 1
                else values[row : row + 1].clone()
                for name, values in padded.items()
            }
            for row, length in enumerate(lengths)
        ]  # fmt: skip
        torch.save(rows, path)
    return path


def verl_directory(path: Path, batch: Batch, *, steps: Iterable[int] = (1,)) -> Path:
    """Write verl's `trainer.rollout_data_dir`: `{step}.jsonl`, a line a trajectory."""
    path.mkdir(parents=True, exist_ok=True)
    for step in steps:
        lines = [
            {"input": f"question {row // GROUP}", "output": f"answer {row}", "gts": "42",
             "score": float(batch.rewards[row]), "step": step, "acc": bool(batch.rewards[row])}
            for row in range(batch.rows)
        ]  # fmt: skip
        text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
        (path / f"{step}.jsonl").write_text(text)
    return path


class Runs:
    """Pickles as a call of `os.system`: what a hostile file holds."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, ...]:
        import os

        return os.system, (self.command,)


def hostile_torch_file(path: Path, marker: Path) -> Path:
    """Write a .pt file that makes `marker` when it is unpickled."""
    torch.save({"step": 0, "log_probs": torch.zeros(2), "more": Runs(f"touch {marker}")}, path)
    return path


def zip_bomb(path: Path) -> Path:
    """Write a .pt file of a few kilobytes whose one storage inflates to 64 MiB."""
    plain = path.with_suffix(".plain")
    torch.save({"step": 0, "log_probs": torch.zeros(4)}, plain)
    with (
        zipfile.ZipFile(plain) as source,
        zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as target,
    ):
        for member in source.namelist():
            data = source.read(member)
            target.writestr(member, bytes(64 << 20) if "/data/" in member else data)
    plain.unlink()
    return path


def own_directory(
    path: Path,
    *,
    key: str = "first",
    steps: Iterable[int] = (0,),
    ranks: int = 2,
    micros: int = 2,
    rows: int = 4,
    tokens: int = 16,
    stage: str = "actor_update",
    edit: Edit | None = None,
) -> Path:
    """Write what the service keeps of payloads; return the attempt's directory.

    One file for each rank and microbatch of the stage, with the streams, the loss and its
    intermediates, a gradient and the samples' ids.
    """
    for step in steps:
        batch = make_batch(ranks * micros * rows, tokens, step=step)
        for rank in range(ranks):
            for micro in range(micros):
                begin = (rank * micros + micro) * rows
                data = _own_payload(batch, slice(begin, begin + rows), rank)
                part = Part(microbatch=micro)
                directory = step_directory(path, "run", key, step, stage, part)
                file = kept_path(directory, "actor", rank, f"incarnation{rank}", micro + 1)
                if edit is not None:
                    edit("own", file.stem, data)
                job = {"run": "run", "attempt_key": key, "step": step, "stage": stage,
                       "role": "actor", "rank": rank, **part._asdict()}  # fmt: skip
                tensors = {name: wire(values) for name, values in data["tensors"].items()}
                sections = sections_of(stage, tensors, data["scalars"])
                kept = Kept(tensors, sections, data["scalars"], data["strings"], data["meta"], job)
                write_kept(file, kept)
    return path / "run" / key


def _own_payload(batch: Batch, rows: slice, rank: int) -> dict[str, Any]:
    names = ("responses", "response_mask", "rollout_log_probs", "old_log_probs", "log_probs",
             "entropy", "advantages")  # fmt: skip
    tensors: dict[str, Array] = {name: getattr(batch, name)[rows] for name in names}
    tensors["rewards"] = batch.rewards[rows]
    tensors["prob_ratio"] = np.exp(tensors["log_probs"] - tensors["old_log_probs"])
    tensors["gradient/lm_head.weight"] = np.full((4, 4), rank + 1.0, np.float32)
    tensors["gradient.1/lm_head.weight"] = np.full((4, 4), rank + 2.0, np.float32)
    return {
        "tensors": tensors,
        "strings": {"sample_ids": batch.samples[rows], "group_ids": batch.groups[rows]},
        "scalars": {"loss": 0.5, "pg_loss": float("nan"), "grad_norm": 1.5},
        "meta": {"temperature": 1.0},
    }
