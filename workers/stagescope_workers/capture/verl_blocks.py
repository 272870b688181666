"""verl's own configuration of its precision debugger, read as captures.

What is read, of a plain dict or anything that looks like one (OmegaConf; `_target_` is ignored, so
verl need not be installed):

* `global_profiler.tool` must be `precision_debugger`, else there is nothing to capture
* `global_profiler.global_tool_config.precision_debugger`: `enable` (absent counts as true),
  `config_path`, `data_dir`, `steps`, `stages` (absent: all six), `strict`; `save_path` is ignored
* `global_profiler.steps`: where both levels name steps, the steps that both name; where neither
  does, nothing is captured: verl profiles no step then, and "every step" could fill a disk
* `actor_rollout_ref.actor.profiler`, `actor_rollout_ref.ref.profiler`, `critic.profiler`:
  `enable`, `all_ranks`, `ranks` (with neither, all) decide for the stages of their role; where
  msprobe's config.json names ranks, those alone, since verl leaves the choice to it.
  `compute_rm_score` has no block of its own and follows the actor's.

`rollout_generate` is left out, also when strict. Another stage name that verl does not know raises
when strict, else it is logged and left out.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Final

from stagescope.wire.errors import InvalidPlan
from stagescope_workers.capture.msprobe_config import load_config

_log = logging.getLogger(__name__)

_STAGES_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "actor": ("actor_compute_log_prob", "compute_rm_score", "actor_update"),
    "ref": ("ref_compute_log_prob",),
    "critic": ("compute_values", "critic_update"),
}
_BLOCK_OF: Final[Mapping[str, tuple[str, ...]]] = {
    "actor": ("actor_rollout_ref", "actor", "profiler"),
    "ref": ("actor_rollout_ref", "ref", "profiler"),
    "critic": ("critic", "profiler"),
}
VERL_STAGES: Final = tuple(stage for stages in _STAGES_OF.values() for stage in stages)
_TOOL: Final = "precision_debugger"
_REWARD_RULE: Final = (
    "compute_rm_score has no profiler block in verl: it follows actor_rollout_ref.actor.profiler"
)


def captures_from_verl(config: object) -> list[dict[str, Any]]:
    """Return the captures that verl's configuration orders, one for each role that is enabled.

    Args:
        config: verl's whole configuration, or the part with `global_profiler` and the roles.

    Raises:
        InvalidPlan: only when the block is strict: an unknown stage, or a value that cannot be
            read. Otherwise these are logged, once a call, and nothing or the rest is captured.
    """
    profiler = _at(config, "global_profiler")
    if _at(profiler, "tool") != _TOOL:
        return []
    block = _at(profiler, "global_tool_config", _TOOL)
    if block is None or _at(block, "enable") is False:
        return []
    strict = _at(block, "strict") is True
    try:
        return _captures(config, profiler, block, strict)
    except InvalidPlan as error:
        if strict:
            raise
        _log.warning("verl's precision_debugger block is not carried out: %s", error)
        return []


def _captures(
    config: object, profiler: object, block: object, strict: bool
) -> list[dict[str, Any]]:
    notes: list[str] = []
    stages = _stages(block, strict, notes)
    steps = _steps(profiler, block, notes)
    config_path = _at(block, "config_path")
    if not config_path:
        notes.append("precision_debugger.config_path is not set: verl captures nothing without it")
    for note in notes:
        _log.warning("verl's precision_debugger block: %s", note)
    if not steps or not config_path:
        return []
    data_dir = _at(block, "data_dir")
    captures = []
    for role, of_role in _STAGES_OF.items():
        ranks = _ranks(_at(config, *_BLOCK_OF[role]), ".".join(_BLOCK_OF[role]), str(config_path))
        wanted = [stage for stage in of_role if stage in stages]
        if ranks is None or not wanted:
            continue
        rule = [_REWARD_RULE] if "compute_rm_score" in wanted else []
        captures.append(
            {
                "capture_id": f"verl-{role}",
                "run": None,
                "stages": wanted,
                "roles": None,
                "ranks": ranks,
                "steps": steps,
                "config": None,
                "config_path": str(config_path),
                "data_dir": None if data_dir is None else str(data_dir),
                "keep": [],
                "limits": {"bytes": None, "seconds": None},
                "strict": strict,
                "source": "verl",
                "by": "verl",
                "created": 0.0,
                "notes": [*notes, *rule],
            }
        )
    return captures


def _at(node: object, *path: str) -> Any:
    """Return what stands at a path of keys, or None; also of objects with attributes."""
    for name in path:
        if node is None:
            return None
        try:
            node = node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
        except Exception as error:
            # OmegaConf raises its own errors for '???' and for what it cannot interpolate.
            _log.debug("%s of verl's configuration cannot be read: %s", name, error)
            return None
    return node


def _stages(block: object, strict: bool, notes: list[str]) -> set[str]:
    named = _at(block, "stages")
    if named is None:
        return set(VERL_STAGES)
    if isinstance(named, str) or not isinstance(named, Sequence):
        raise InvalidPlan(
            f"precision_debugger.stages is {named!r:.200}", expected="a list of stage names"
        )
    stages = [str(stage) for stage in named]
    unknown = [name for name in stages if name not in VERL_STAGES and name != "rollout_generate"]
    if unknown and strict:
        raise InvalidPlan(
            f"precision_debugger.stages names {', '.join(map(repr, unknown))}",
            expected=f"some of {', '.join(VERL_STAGES)}",
        )
    if unknown:
        notes.append(f"stages that verl does not know are left out: {', '.join(unknown)}")
    if "rollout_generate" in stages:
        notes.append("rollout_generate is left out, as in verl: it runs in the inference engine")
    return {stage for stage in stages if stage in VERL_STAGES}


def _steps(profiler: object, block: object, notes: list[str]) -> list[int]:
    outer = _numbers(_at(profiler, "steps"), "global_profiler.steps")
    inner = _numbers(_at(block, "steps"), "precision_debugger.steps")
    if outer is None and inner is None:
        notes.append("no steps are named on either level: nothing is captured, as in verl")
        return []
    if outer is None or inner is None:
        return sorted(outer or inner or ())
    both = sorted(outer & inner)
    if not both:
        notes.append("global_profiler.steps and precision_debugger.steps have no step in common")
    return both


def _ranks(block: object, name: str, config_path: str) -> list[int] | str | None:
    """Return the ranks that a role's profiler block chooses, or None where it is off."""
    if not _at(block, "enable"):
        return None
    own = None if _at(block, "all_ranks") else _numbers(_at(block, "ranks"), f"{name}.ranks")
    chosen = _ranks_of_msprobe(config_path) or own
    return sorted(chosen) if chosen else "all"


def _ranks_of_msprobe(config_path: str) -> set[int] | None:
    try:
        return _numbers(load_config(config_path).get("rank"), f"rank of {config_path}")
    except InvalidPlan as error:
        # Each rank says it when it captures; a file on the ranks' hosts alone is no mistake.
        _log.debug("the ranks in msprobe's configuration are not known here: %s", error)
        return None


def _numbers(value: Any, name: str) -> set[int] | None:
    if value is None:
        return None
    items: Iterable[Any] = value if isinstance(value, Sequence) else ()
    numbers = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    if isinstance(value, str) or not isinstance(value, Sequence) or len(numbers) != len(value):
        raise InvalidPlan(f"{name} is {value!r:.200}", expected="a list of whole numbers")
    return set(numbers)
