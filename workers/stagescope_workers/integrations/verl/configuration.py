"""Reads verl's configuration: the run's name, settings and streams; once, on the driver."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from stagescope_wire.nonfinite import Json
from stagescope_workers.integrations.configuration import (
    absolute,
    attempt_key,
    lookup,
    named_run,
    present,
    sampling,
    to_container,
    visible_leaves,
)

_NAMES: Final = "stagescope"
_ROLE_PROFILERS: Final = (
    ("actor_rollout_ref", "actor"),
    ("actor_rollout_ref", "ref"),
    ("critic",),
)


def run_name(config: object) -> str:
    """Return STAGESCOPE_RUN, else `{project_name}.{experiment_name}`."""
    names = [lookup(config, "trainer", name) for name in ("project_name", "experiment_name")]
    return named_run(".".join(str(part) for part in names if part), fallback="verl")


def names(config: object) -> tuple[str, str | None]:
    """Return the run's name and the attempt key: the driver's, else those of this process."""
    driver = lookup(config, _NAMES)
    if driver is not None:
        return str(lookup(driver, "run")), lookup(driver, "attempt_key")
    return run_name(config), attempt_key()


def with_names(config: object) -> object:
    """Return a copy of verl's configuration with the driver's names, for other processes.

    The environment variables of these names may be set only for the driver.
    """
    from omegaconf import OmegaConf, open_dict  # pyright: ignore[reportMissingImports]

    copied = OmegaConf.create(config)
    with open_dict(copied):
        copied[_NAMES] = {"run": run_name(config), "attempt_key": attempt_key()}
    return copied


def is_bypass(config: object) -> bool:
    """Return whether the trainer uses the rollout's log-probs as its own."""
    return bool(lookup(config, "algorithm", "rollout_correction", "bypass_mode"))


def settings(config: object) -> dict[str, Json]:
    """Return the settings that influence the statistics, and the whole configuration.

    Only the driver reports them. The configuration is flat, `{"actor_rollout_ref.actor.ppo_epochs":
    1, ...}`, without possible secrets. Reading it takes some tenths of a second, and it is about
    50 kB.
    """
    leaves = visible_leaves(to_container(config) or {})
    return {**statistics_settings(config), **_tokenizer(config), "verl": leaves}


def _tokenizer(config: object) -> dict[str, object]:
    """Return the directory of the model's tokenizer, where it is on this machine."""
    model = lookup(config, "actor_rollout_ref", "model")
    named = lookup(model, "tokenizer_path") or lookup(model, "path")
    directory = absolute(named)
    has_one = directory is not None and (Path(directory) / "tokenizer.json").is_file()
    return {"tokenizer": directory} if has_one else {}


def statistics_settings(config: object) -> dict[str, object]:
    """Return the settings that influence the statistics: verl's rollout_correction."""
    correction = lookup(config, "algorithm", "rollout_correction")
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    return present({name: lookup(correction, name) for name in names})


def streams(config: object) -> dict[str, Json]:
    """Return the metadata of a batch: the producers of its streams, and how tokens were sampled."""
    rollout = lookup(config, "actor_rollout_ref", "rollout")
    sampled = sampling(rollout)
    mode = lookup(rollout, "logprobs_mode")
    engine = {
        "producer": "rollout",
        "engine": lookup(rollout, "name"),
        "quantisation": lookup(rollout, "quantization"),
        "processed": None if mode is None else str(mode).startswith("processed"),
        **sampled,
    }
    trainer = {
        "producer": "trainer",
        "engine": lookup(config, "actor_rollout_ref", "actor", "strategy"),
        "temperature": sampled.get("temperature"),
    }
    # In bypass mode the trainer's old log-probs are the rollout's.
    old = {**trainer, "producer": "rollout"} if is_bypass(config) else trainer
    return {
        "streams": {
            "rollout": present(engine),
            "old": present(old),
            "current": present(trainer),
        }
    }


def profiler(config: object) -> dict[str, object] | None:
    """Return the blocks of verl's precision debugger, with absolute paths; None where it is off."""
    block = to_container(lookup(config, "global_profiler")) or {}
    if block.get("tool") != "precision_debugger":
        return None
    tool = (block.get("global_tool_config") or {}).get("precision_debugger") or {}
    directory = tool.get("data_dir") or block.get("save_path")
    found: dict[str, Json] = {
        "global_profiler": {
            "tool": "precision_debugger",
            "steps": block.get("steps"),
            "global_tool_config": {
                "precision_debugger": {
                    **tool,
                    "config_path": absolute(tool.get("config_path")),
                    "data_dir": absolute(directory),
                }
            },
        }
    }
    for path in _ROLE_PROFILERS:
        node = found
        for name in path:
            node = node.setdefault(name, {})
        node["profiler"] = {
            name: lookup(config, *path, "profiler", name) for name in ("enable", "all_ranks")
        } | {"ranks": list(lookup(config, *path, "profiler", "ranks") or [])}
    return found


def is_reward_model_colocated(config: object) -> bool:
    """Return whether the trainer itself requests scores from a reward model, in every step."""
    model = lookup(config, "reward", "reward_model")
    return bool(lookup(model, "enable")) and not lookup(model, "enable_resource_pool")
