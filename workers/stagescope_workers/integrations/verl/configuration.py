"""What verl's configuration says of a run; read once, on the driver."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

from stagescope_workers.probe.identity import hide, visible_arguments

_NOT_IN_NAMES: Final = re.compile(r"[^A-Za-z0-9._-]+")
_SECRET: Final = re.compile(r"token|secret|passw|pwd|key|credential|auth|cookie", re.I)
_SECRET_VALUE: Final = re.compile(r"://[^/\s@]+@")
_SHORTEST_SECRET: Final = 8
_LONGEST_NAME: Final = 100
_NAMES: Final = "stagescope"
_MOST_SHOWN: Final = 990
_ROLE_PROFILERS: Final = (
    ("actor_rollout_ref", "actor"),
    ("actor_rollout_ref", "ref"),
    ("critic",),
)


def run_name(config: Any) -> str:
    """Return STAGESCOPE_RUN, else `{project_name}.{experiment_name}` in the letters of a run."""
    given = os.environ.get("STAGESCOPE_RUN")
    names = [at(config, "trainer", name) for name in ("project_name", "experiment_name")]
    name = given or ".".join(str(part) for part in names if part)
    kept = _NOT_IN_NAMES.sub("-", name).strip(".-") or "verl"
    if name.isascii() and len(kept) <= _LONGEST_NAME:
        return kept
    # What is cut off, or written in other letters, must still tell two experiments apart.
    digest = hashlib.sha256(name.encode(errors="backslashreplace")).hexdigest()[:8]
    return f"{kept[: _LONGEST_NAME - 9]}-{digest}"


def names(config: Any) -> tuple[str, str | None]:
    """Return the run's name and the attempt key: as the driver said, else as this process sees."""
    said = at(config, _NAMES)
    if said is not None:
        return str(at(said, "run")), at(said, "attempt_key")
    return run_name(config), attempt_key()


def attempt_key() -> str | None:
    """Return STAGESCOPE_ATTEMPT; None leaves the key to Ray's session and job."""
    return os.environ.get("STAGESCOPE_ATTEMPT") or None


def with_names(config: Any) -> Any:
    """Return a copy of verl's configuration that carries the driver's names to other processes.

    The variables that set them may be known to the driver alone.
    """
    from omegaconf import OmegaConf, open_dict  # pyright: ignore[reportMissingImports]

    copied = OmegaConf.create(config)
    with open_dict(copied):
        copied[_NAMES] = {"run": run_name(config), "attempt_key": attempt_key()}
    return copied


def is_bypass(config: Any) -> bool:
    """Say whether the trainer takes the rollout's log-probs for its own."""
    return bool(at(config, "algorithm", "rollout_correction", "bypass_mode"))


def settings(config: Any) -> dict[str, Any]:
    """Return what shapes the statistics, and the whole configuration, for the driver alone.

    The configuration is flat, `{"actor_rollout_ref.actor.ppo_epochs": 1, ...}`, without what may
    be a secret. Reading it takes some tenths of a second, and it is some 50 kB.
    """
    kept = dict(sorted(shown(container(config) or {}).items())[:_MOST_SHOWN])
    return {**shaping(config), "verl": kept}


def shaping(config: Any) -> dict[str, Any]:
    """Return what shapes the statistics, verl's rollout_correction: what every rank is told."""
    correction = at(config, "algorithm", "rollout_correction")
    names = ("rollout_is", "rollout_is_threshold", "rollout_is_batch_normalize")
    found = {name: at(correction, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def streams(config: Any) -> dict[str, Any]:
    """Return the metadata of a batch: who made its streams, and how tokens were drawn."""
    rollout = at(config, "actor_rollout_ref", "rollout")
    drawn = {name: at(rollout, name) for name in ("temperature", "top_p", "top_k")}
    mode = at(rollout, "logprobs_mode")
    engine = {
        "producer": "rollout",
        "engine": at(rollout, "name"),
        "quantisation": at(rollout, "quantization"),
        "processed": None if mode is None else str(mode).startswith("processed"),
        **drawn,
    }
    trainer = {
        "producer": "trainer",
        "engine": at(config, "actor_rollout_ref", "actor", "strategy"),
        "temperature": drawn["temperature"],
    }
    # The bypass branch takes the rollout's log-probs for the trainer's old ones.
    old = {**trainer, "producer": "rollout"} if is_bypass(config) else trainer
    return {
        "streams": {
            "rollout": {name: value for name, value in engine.items() if value is not None},
            "old": {name: value for name, value in old.items() if value is not None},
            "current": {name: value for name, value in trainer.items() if value is not None},
        }
    }


def profiler(config: Any) -> dict[str, Any] | None:
    """Return the blocks of verl's precision debugger, with absolute paths; None where it is off."""
    block = container(at(config, "global_profiler")) or {}
    if block.get("tool") != "precision_debugger":
        return None
    tool = (block.get("global_tool_config") or {}).get("precision_debugger") or {}
    directory = tool.get("data_dir") or block.get("save_path")
    found: dict[str, Any] = {
        "global_profiler": {
            "tool": "precision_debugger",
            "steps": block.get("steps"),
            "global_tool_config": {
                "precision_debugger": {
                    **tool,
                    "steps": None,  # verl reads the steps of global_profiler alone
                    "config_path": _absolute(tool.get("config_path")),
                    "data_dir": _absolute(directory),
                }
            },
        }
    }
    for path in _ROLE_PROFILERS:
        node = found
        for name in path:
            node = node.setdefault(name, {})
        node["profiler"] = {
            name: at(config, *path, "profiler", name) for name in ("enable", "all_ranks")
        } | {"ranks": list(at(config, *path, "profiler", "ranks") or [])}
    return found


def at(node: Any, *path: str) -> Any:
    """Return what stands at a path of keys, or None; also of OmegaConf and dataclasses."""
    for name in path:
        if node is None:
            return None
        try:
            node = node.get(name) if hasattr(node, "get") else getattr(node, name, None)
        except Exception:  # OmegaConf raises its own errors for what it cannot interpolate
            return None
    return node


def container(node: Any) -> Any:
    """Return an OmegaConf node as built-in types, interpolations resolved where they can be."""
    if node is None or isinstance(node, dict):
        return node
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]

    try:
        return OmegaConf.to_container(node, resolve=True)
    except Exception:  # '???' somewhere, or an interpolation that leads nowhere
        return OmegaConf.to_container(node, resolve=False)


def shown(tree: Mapping[Any, Any]) -> dict[str, Any]:
    """Return the leaves of a tree by dotted name; nothing that may be a secret."""
    secrets = {
        value
        for variable, value in os.environ.items()
        if _SECRET.search(variable) and len(value) >= _SHORTEST_SECRET
    }
    found: dict[str, Any] = {}
    for name, value in _leaves(tree, ""):
        texts = [text for text in _listed(value) if isinstance(text, str)]
        if texts and _SECRET.search(name):
            continue
        if any(_SECRET_VALUE.search(text) or text in secrets for text in texts):
            continue
        # An argument may be an option of its own: --api-key=x
        if isinstance(value, str):
            found[name] = hide(value)
        else:
            found[name] = visible_arguments(texts) if texts == value else value
    return found


def _leaves(tree: Any, prefix: str) -> Iterator[tuple[str, Any]]:
    for key, value in tree.items() if isinstance(tree, Mapping) else enumerate(tree):
        if isinstance(value, Mapping) or any(
            isinstance(item, Mapping | list | tuple) for item in _listed(value)
        ):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def _listed(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list | tuple) else [value]


def _absolute(path: Any) -> str | None:
    return str(Path(path).expanduser().absolute()) if isinstance(path, str) and path else None
