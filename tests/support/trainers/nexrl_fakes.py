"""What of NexRL 1.4.0 (6860191) is touched, in the shapes of its own modules, without NexRL.

`FILES` is a package `nexrl` with the recorded interface: names, signatures, which call is made
with what, which key holds what. `write` puts it below a directory, for PYTHONPATH.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

_TYPES = """
import dataclasses


@dataclasses.dataclass
class Trajectory:
    tokens: list
    loss_mask: list
    reward: float
    is_val: bool
    extra_fields: dict = dataclasses.field(default_factory=dict)

    def __setitem__(self, key, value):
        if key in ("tokens", "loss_mask", "reward", "is_val"):
            setattr(self, key, value)
        else:
            self.extra_fields[key] = value


class Batch:
    def __init__(self, values, metadata):
        self.values, self.metadata = values, metadata
"""

_DUMPER = """
import json
from pathlib import Path


class DataDumper:
    def __init__(self, config=None, rank=0):
        block = (config or {}).get("debug") or {}
        self._rank = rank
        self._enabled = block.get("enable_data_dump", False)
        self._dump_dir, self._options, self._format, self._dump_every_n = None, {}, "pt", 1
        if not self._enabled:
            return
        self._dump_dir = Path(block.get("dump_dir", "debug_dump"))
        self._dump_dir.mkdir(parents=True, exist_ok=True)
        self._remote_api_options = block.get("remote_api_dump_options", {})
        self._target_param_pattern = block.get("target_param_pattern", "")
        self._options = block.get("dump_options", {})
        self._format = block.get("dump_format", "pt")
        self._dump_every_n = block.get("dump_every_n_steps", 1)

    def should_dump(self, data_type, step):
        if not self._enabled or step % self._dump_every_n != 0:
            return False
        if self._options.get(data_type, False):
            return True
        return getattr(self, "_remote_api_options", {}).get(data_type, False)

    def _file(self, kind, step, text=""):
        if self.should_dump(kind, step):
            (self._dump_dir / f"{kind}_{step}{text}").write_text(json.dumps([kind, step]))

    def dump_trajectory(self, step, trajectories):
        self._file("trajectory", step)

    def dump_old_log_probs(self, step, old_log_probs, batch_info=None):
        self._file("old_log_probs", step)

    def dump_forward_data(
        self, step, micro_idx, log_probs, entropy, response_mask, input_ids=None, extra_info=None
    ):
        self._file("forward_data", step, f"_{self._rank}_{micro_idx}")

    def dump_loss(
        self, step, micro_idx, loss, pg_loss, entropy_loss, metrics=None, extra_info=None
    ):
        self._file("loss", step, f"_{self._rank}_{micro_idx}")

    def dump_prepared_trajectories(self, step, trajectories, advantages=None, extra_info=None):
        self._file("prepared_trajectories", step)

    def dump_datums(self, step, datums_data, extra_info=None):
        self._file("datums", step)

    def dump_training_metrics(self, step, metrics, extra_info=None):
        self._file("training_metrics", step)
"""

_BASE = """
class BaseTrainer:
    def __init__(self, config):
        self._config = config
        self._train_step = 0
        self._total_train_steps = config["total_train_steps"]
        self._trajectory_pool = None
        self.logged = []

    def _get_trajectories(self):
        return self._trajectory_pool.get_trajectories()

    def _main_loop(self):
        while self._train_step < self._total_train_steps:
            trajectories = self._get_trajectories()
            if trajectories is None:
                continue
            self.logged.append(self.train(trajectories))
            self._train_step += 1
"""

_SELF_HOSTED = """
import numpy as np
import torch

from nexrl.nexrl_types import Batch
from nexrl.trainer.base_trainer import BaseTrainer
from nexrl.utils.data_dumper import DataDumper


class SelfHostedTrainer(BaseTrainer):
    world_size = 4

    def __init__(self, config):
        super().__init__(config)
        self._train_service_client = config["client"]
        self._data_dumper = DataDumper(config)

    def train(self, trajectories):
        if self._data_dumper.should_dump("trajectory", self._train_step):
            self._data_dumper.dump_trajectory(self._train_step, trajectories)
        batch, metrics = self._prepare_batch(self._padded(trajectories))
        batch.metadata["global_step"] = self._train_step
        names = ("input_ids", "responses", "advantages", "scoring_attention_mask", "old_log_probs")
        data = {
            "batch": {name: batch.values[name] for name in names if name in batch.values},
            "non_tensor_batch": {},
            "meta_info": dict(batch.metadata),
        }
        output = self._train_service_client.update_actor(data)
        self._train_service_client.save_checkpoint(local_path="w", save_weight_only=True)
        return {**output["meta_info"]["metrics"], **metrics, "training/note": "text"}

    def _padded(self, trajectories):
        # The first token is the prompt, the rest the response, padded on the right.
        width = max(len(one.tokens) for one in trajectories)
        values = {name: [] for name in ("input_ids", "responses", "tokens", "reward")}
        masks = []
        for one in trajectories:
            wide = one.tokens + [0] * (width - len(one.tokens))
            mask = one.loss_mask + [0] * (width - len(one.loss_mask))
            one["input_ids"], one["loss_mask"] = torch.tensor(wide), torch.tensor(mask)
            values["input_ids"].append(wide)
            values["responses"].append(wide[1:])
            values["tokens"].append(one.tokens)
            values["reward"].append(one.reward)
            masks.append(mask)
        for name in trajectories[0].extra_fields:
            values.setdefault(name, [one.extra_fields[name] for one in trajectories])
        values["loss_mask"] = values["scoring_attention_mask"] = masks
        surplus = -len(trajectories) % self.world_size
        for name, column in values.items():
            column = column + column[:surplus]
            is_wide = name in ("input_ids", "responses", "loss_mask", "scoring_attention_mask")
            values[name] = torch.tensor(column) if is_wide else column
        return Batch(values, {"batch_size": len(values["tokens"]), "temperature": 1.0})
"""

_GRPO = """
import torch

from nexrl.trainer.self_hosted_trainer import SelfHostedTrainer


class SelfHostedGrpoTrainer(SelfHostedTrainer):
    def _prepare_batch(self, batch):
        values = batch.values
        if "run_id" in values:
            keys = list(zip(values["task_id"], values["group_id"], values["run_id"]))
            order = sorted(range(len(keys)), key=lambda row: (*keys[row], row))
            for name, column in values.items():
                is_tensor = isinstance(column, torch.Tensor)
                values[name] = column[order] if is_tensor else [column[row] for row in order]
        values["old_log_probs"] = self._compute_old_log_probs(batch)
        reward = torch.tensor(values["reward"])[:, None]
        values["advantages"] = reward * values["scoring_attention_mask"][:, 1:]
        return batch, {"grpo/advantage/mean": float(values["advantages"].mean())}

    def _compute_old_log_probs(self, batch):
        data = {"batch": dict(batch.values), "meta_info": dict(batch.metadata)}
        old = self._train_service_client.compute_log_prob(data)["batch"]["old_log_probs"]
        if self._data_dumper.should_dump("old_log_probs", self._train_step):
            self._data_dumper.dump_old_log_probs(self._train_step, old, {})
        return old
"""

_REMOTE = """
from nexrl.trainer.base_trainer import BaseTrainer
from nexrl.utils.data_dumper import DataDumper


class RemoteApiGrpoTrainer(BaseTrainer):
    def __init__(self, config):
        super().__init__(config)
        self._data_dumper = DataDumper(config)

    def train(self, trajectories):
        for one in trajectories:
            one["advantage"] = one.reward - 0.5
        if self._data_dumper.should_dump("prepared_trajectories", self._train_step):
            self._data_dumper.dump_prepared_trajectories(
                step=self._train_step, trajectories=trajectories, advantages=[[]]
            )
        datums = [
            {"input_tokens": one.tokens[:-1], "loss_fn_inputs": {"target_tokens": one.tokens[1:]}}
            for one in trajectories
            if one.extra_fields["advantage"] > 0
        ]
        if self._data_dumper.should_dump("datums", self._train_step):
            self._data_dumper.dump_datums(step=self._train_step, datums_data=datums)
        metrics = {"loss": 0.25, "tokens": 7}
        if self._data_dumper.should_dump("training_metrics", self._train_step):
            self._data_dumper.dump_training_metrics(step=self._train_step, metrics=metrics)
        return {"training/loss": 0.25}
"""

_ACTOR = """
import torch

from nexrl.utils.data_dumper import DataDumper


class DataParallelPPOActor:
    def __init__(self, config, actor_module, rank=0):
        self.config, self.actor_module, self._rank = config, actor_module, rank
        self.ulysses_sequence_parallel_size = 1
        self._data_dumper = DataDumper(config, rank)

    def _forward_micro_batch(self, micro_batch, temperature, *, training_step=-1, micro_idx=0):
        log_probs = self.actor_module(micro_batch["responses"].float())
        if self._data_dumper.should_dump("forward_data", training_step):
            self._data_dumper.dump_forward_data(
                step=training_step,
                micro_idx=micro_idx,
                log_probs=log_probs,
                entropy=-log_probs,
                response_mask=micro_batch["scoring_attention_mask"][:, 1:],
                input_ids=micro_batch["input_ids"],
            )
        return -log_probs, log_probs

    def _optimizer_step(self):
        return torch.tensor(1.0)

    def compute_log_prob(self, data):
        rows = data.batch.split(2)
        parts = [self._forward_micro_batch(part, temperature=1.0)[1] for part in rows]
        return torch.cat(parts)

    def update_policy(self, data):
        step = int(data.meta_info.get("global_step", -1))
        for epoch in range(self.config["ppo_epochs"]):
            for number, mini in enumerate(data.batch.split(self.config["ppo_mini_batch_size"])):
                for micro_idx, micro in enumerate(mini.split(2)):
                    self._forward_micro_batch(
                        micro_batch=micro, temperature=1.0, training_step=step, micro_idx=micro_idx
                    )
                    if self._data_dumper.should_dump("loss", step):
                        self._data_dumper.dump_loss(
                            step=step,
                            micro_idx=micro_idx,
                            loss=100.0 * epoch + 10.0 * number + micro_idx,
                            pg_loss=0.5,
                            entropy_loss=0.0,
                            metrics={"actor/ratio": torch.tensor(1.5)},
                            extra_info={"epoch": epoch, "batch_idx": number},
                        )
                self._optimizer_step()
        return {"actor/grad_norm": 1.0}

    def update_policy_with_distillation(self, data):
        return self.update_policy(data)
"""

_MOCK = """
import logging
from pathlib import Path

import torch

from ..nexrl_types import Trajectory

logger = logging.getLogger(__name__)


class MockRolloutWorker:
    def __init__(self, config):
        self._config = config
        self._is_running_validate = False
        self._processed_count = 0
        self._trajectory_load_path = config.get("trajectory_load_path", None)
        self._trajectory_format = config.get("trajectory_format", "jsonl")
        self._loaded_trajectories = []
        if self._trajectory_load_path and Path(self._trajectory_load_path).exists():
            self._load_trajectories()

    def _load_trajectories(self):
        try:
            rows = torch.load(self._trajectory_load_path)["trajectories"]
            self._loaded_trajectories = [Trajectory(**row) for row in rows]
        except Exception as e:
            logger.error("Failed to load: %s", e)

    def _put_trajectory(self, trajectory):
        if len(trajectory.tokens) > self._max_sequence_length:
            raise ValueError("too long")
        return self.pool.put_trajectory(trajectory)

    def rollout(self, task):
        self._processed_count += 1
        return "synthetic"
"""

FILES: Final[Mapping[str, str]] = {
    "__init__": '__version__ = "0.1.0"\n',
    "nexrl_types": _TYPES,
    "utils/__init__": "",
    "utils/data_dumper": _DUMPER,
    "trainer/__init__": "",
    "trainer/base_trainer": _BASE,
    "trainer/self_hosted_trainer": _SELF_HOSTED,
    "trainer/self_hosted_grpo_trainer": _GRPO,
    "trainer/self_hosted_opd_trainer": "from nexrl.trainer.self_hosted_grpo_trainer import *\n",
    "trainer/remote_api_grpo_trainer": _REMOTE,
    "train_service_backend/__init__": "",
    "train_service_backend/fsdp_worker/__init__": "",
    "train_service_backend/fsdp_worker/fsdp_actor": _ACTOR,
    "mock/__init__": "",
    "mock/mock_rollout_worker": _MOCK,
}
"""File below the package, without its suffix -> what it holds."""


def write(directory: Path) -> Path:
    """Write the package `nexrl` below a directory, and return the directory."""
    for name, text in FILES.items():
        path = directory / "nexrl" / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return directory
