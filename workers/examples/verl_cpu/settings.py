"""verl's configuration and environment for this training."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Final, Literal

Trainer = Literal["v0", "v1"]

HERE: Final = Path(__file__).resolve().parent
SOURCE_ROOT: Final = HERE.parent.parent
PACKAGE: Final = "examples.verl_cpu"


@dataclasses.dataclass(frozen=True)
class Settings:
    """The command line's options."""

    trainer: Trainer
    steps: int
    save_freq: int
    directory: Path
    address: str | None
    ranks: int
    seed: int
    overrides: tuple[str, ...]

    @property
    def assets(self) -> Path:
        """Folder of the model, its tokenizer and the data set."""
        return self.directory / "assets"


def environment(settings: Settings) -> dict[str, str]:
    """Return the environment variables of every process of the training."""
    modules = [f"{PACKAGE}.platform", *_list("VERL_USE_EXTERNAL_MODULES", ",")]
    path = [str(SOURCE_ROOT), *_list("PYTHONPATH", os.pathsep)]
    return {
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": os.pathsep.join(dict.fromkeys(path)),
        "VERL_ENGINE_DEVICE": "cuda",  # the name under which verl registers its FSDP engine
        "VERL_FILE_LOGGER_PATH": str(_metrics_file(settings.directory)),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": ",".join(dict.fromkeys(modules)),
    }


def _list(variable: str, separator: str) -> list[str]:
    return list(filter(None, os.environ.get(variable, "").split(separator)))


def _metrics_file(directory: Path) -> Path:
    # verl's logger empties the file that it opens: each start of the training has its own.
    started = len(list(directory.glob("metrics-*.jsonl")))
    return directory / f"metrics-{started + 1}.jsonl"


def hydra_overrides(settings: Settings, env: dict[str, str]) -> list[str]:
    """Return the overrides of verl's `ppo_trainer` configuration; the user's own come last."""
    sections = {
        "actor_rollout_ref.model": _model(settings),
        "critic.model": _model(settings),
        "data": _data(settings),
        "actor_rollout_ref.actor": _actor(),
        "actor_rollout_ref.ref": {"log_prob_micro_batch_size_per_gpu": 4},
        "actor_rollout_ref.rollout": _rollout(settings),
        "critic": _critic(),
        "reward": {"num_workers": 1, "custom_reward_function.path": str(HERE / "reward.py")},
        "transfer_queue.backend.SimpleStorage": {"num_data_storage_units": 1},
        "trainer": _trainer(settings),
    }
    pairs = {
        f"{section}.{key}": value
        for section, values in sections.items()
        for key, value in values.items()
    }
    pairs["algorithm.adv_estimator"] = "gae"
    added = {
        "actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "critic.model.override_config.attn_implementation": "sdpa",
        "ray_kwargs.ray_init.runtime_env.env_vars": env,
        **{f"ray_kwargs.ray_init.{key}": value for key, value in _ray_cluster(settings).items()},
    }
    return [
        *(f"{key}={_hydra(value)}" for key, value in pairs.items()),
        *(f"++{key}={_hydra(value)}" for key, value in added.items()),
        *settings.overrides,
    ]


def _hydra(value: object) -> str:
    # Hydra reads JSON, except for the quotes around a dict's keys.
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{_hydra(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def _model(settings: Settings) -> dict[str, object]:
    return {
        "path": str(settings.assets / "model"),
        "external_lib": f"{PACKAGE}.server",
    }


def _data(settings: Settings) -> dict[str, object]:
    prompts = str(settings.assets / "prompts.parquet")
    return {
        "train_files": prompts,
        "val_files": prompts,
        "train_batch_size": 4,
        "max_prompt_length": 12,
        "max_response_length": 24,
        "dataloader_num_workers": 0,
        "seed": settings.seed,
    }


def _actor() -> dict[str, Any]:
    return {
        "strategy": "fsdp2",
        "ppo_mini_batch_size": 2,  # prompts: two mini-batches a step
        "ppo_micro_batch_size_per_gpu": 2,
        "use_kl_loss": True,
        "use_torch_compile": False,
        "fsdp_config.use_torch_compile": False,
        "optim.lr": 1e-3,
    }


def _rollout(settings: Settings) -> dict[str, object]:
    return {
        "name": "transformers",
        "n": 4,
        "tensor_model_parallel_size": settings.ranks,  # one server for all
        "log_prob_micro_batch_size_per_gpu": 4,
        "seed": settings.seed,
        "agent.num_workers": 1,
        "agent.default_agent_loop": "calculator",
        "agent.agent_loop_config_path": str(HERE / "agent_loop.yaml"),
    }


def _critic() -> dict[str, object]:
    return {
        "strategy": "fsdp2",
        "ppo_micro_batch_size_per_gpu": 2,
        "fsdp.use_torch_compile": False,
        "optim.lr": 1e-3,
    }


def _trainer(settings: Settings) -> dict[str, object]:
    return {
        "use_v1": settings.trainer == "v1",
        "device": "cpu",
        "n_gpus_per_node": settings.ranks,
        "total_training_steps": settings.steps,
        "total_epochs": 1_000_000,  # the number of steps is the limit
        "val_before_train": False,
        "test_freq": -1,
        "save_freq": settings.save_freq,
        "default_local_dir": str(settings.directory / "checkpoints"),
        "resume_mode": "auto",
        "max_actor_ckpt_to_keep": 2,
        "max_critic_ckpt_to_keep": 2,
        "project_name": "verl_cpu",
        "experiment_name": settings.directory.name,
        "logger": ["console", "file"],
    }


def _ray_cluster(settings: Settings) -> dict[str, object]:
    if settings.address is not None:
        return {"address": settings.address, "num_cpus": None}
    # More slots than processors: the processes mostly wait for each other.
    return {"address": "local", "num_cpus": settings.ranks + 14, "include_dashboard": False}
