"""Reads verl's own configuration of its precision debugger as captures.

The configuration is a plain dict or anything that behaves like one (OmegaConf; `_target_` is
ignored, so verl need not be installed):

* `global_profiler.tool` must be `precision_debugger`, else there is nothing to capture
* `global_profiler.global_tool_config.precision_debugger`: `enable` (absent counts as true),
  `config_path`, `data_dir`, `steps`, `stages` (absent: all six), `strict`; `save_path` is ignored
* `global_profiler.steps`: where both levels name steps, those in both lists; where neither does,
  nothing is captured: verl profiles no step then, and "every step" could fill a disk
* `actor_rollout_ref.actor.profiler`, `actor_rollout_ref.ref.profiler`, `critic.profiler`:
  `enable`, `all_ranks`, `ranks` (with neither, all) apply to the stages of their role. If msprobe's
  config.json names ranks, only those count, since verl leaves the choice to it.
  `compute_rm_score` has no block of its own and follows the actor's.

`rollout_generate` is omitted, also when strict. Any other stage name that verl does not know raises
when strict, otherwise it is logged and omitted.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Final

from stagescope_wire.errors import InvalidPlan
from stagescope_wire.plan import CaptureRequest
from stagescope_workers.capture.msprobe_config import load_config

_log = logging.getLogger(__name__)

_STAGES_BY_ROLE: Final[Mapping[str, tuple[str, ...]]] = {
    "actor": ("actor_compute_log_prob", "compute_rm_score", "actor_update"),
    "ref": ("ref_compute_log_prob",),
    "critic": ("compute_values", "critic_update"),
}
_BLOCK_BY_ROLE: Final[Mapping[str, tuple[str, ...]]] = {
    "actor": ("actor_rollout_ref", "actor", "profiler"),
    "ref": ("actor_rollout_ref", "ref", "profiler"),
    "critic": ("critic", "profiler"),
}
VERL_STAGES: Final = tuple(stage for stages in _STAGES_BY_ROLE.values() for stage in stages)
_TOOL: Final = "precision_debugger"
_REWARD_RULE: Final = (
    "compute_rm_score has no profiler block in verl: it follows actor_rollout_ref.actor.profiler"
)


def captures_from_verl(config: object) -> list[CaptureRequest]:
    """Return the captures that verl's configuration requests, one for each enabled role.

    Args:
        config: verl's whole configuration, or the part with `global_profiler` and the roles.

    Raises:
        InvalidPlan: only when the block is strict: an unknown stage, or a value that cannot be
            read. Otherwise these are logged, once per call, and the rest is captured, or nothing.
    """
    profiler = _lookup(config, "global_profiler")
    if _lookup(profiler, "tool") != _TOOL:
        return []
    block = _lookup(profiler, "global_tool_config", _TOOL)
    if block is None or _lookup(block, "enable") is False:
        return []
    strict = _lookup(block, "strict") is True
    try:
        captures, notes = _captures(config, profiler, block, strict)
    except InvalidPlan as error:
        if strict:
            raise
        _log.warning("verl's precision_debugger block is ignored: %s", error)
        return []
    for note in notes:
        _log.warning("verl's precision_debugger block: %s", note)
    return captures


def otherwise_in_verl(config: object, version: str) -> str:
    """Return in one line where verl would treat its block differently; empty if nowhere.

    verl (0.8 to 0.10.0.dev0) ignores `precision_debugger.steps`, and opens every rank of an enabled
    role whatever its `ranks` say. stagescope keeps the documented rule.

    Args:
        config: As `captures_from_verl` gets it.
        version: Version of the installed verl.
    """
    profiler = _lookup(config, "global_profiler")
    block = _lookup(profiler, "global_tool_config", _TOOL)
    if _lookup(profiler, "tool") != _TOOL or block is None or _lookup(block, "enable") is False:
        return ""
    try:
        ours, _ = _captures(config, profiler, block, strict=False)
        theirs, _ = _captures(config, profiler, block, strict=False, as_verl=True)
    except InvalidPlan:
        return ""  # `captures_from_verl` says why
    found: list[str] = []
    inner = _lookup(block, "steps")
    if _all_steps(ours) != _all_steps(theirs):
        found.append(
            f"ignores precision_debugger.steps ({inner}) and captures "
            f"{_describe_steps(_all_steps(theirs))}, stagescope {_describe_steps(_all_steps(ours))}"
        )
    ranks = {each["capture_id"]: each["ranks"] for each in theirs}
    for each in ours:
        if ranks.get(each["capture_id"], each["ranks"]) != each["ranks"]:
            role = each["capture_id"].removeprefix("verl-")
            found.append(f"captures every rank of {role}, stagescope ranks {each['ranks']}")
    return f"precision_debugger: verl {version} {'; it '.join(found)}" if found else ""


def _all_steps(captures: Sequence[CaptureRequest]) -> object:
    return captures[0]["steps"] if captures else []


def _describe_steps(steps: object) -> str:
    return f"steps {steps}" if steps else "nothing"


def _captures(
    config: object, profiler: object, block: object, strict: bool, *, as_verl: bool = False
) -> tuple[list[CaptureRequest], list[str]]:
    """Return the captures and notes; `as_verl` without what verl ignores."""
    notes: list[str] = []
    stages = _stages(block, strict, notes)
    steps = _steps(profiler, None if as_verl else block, notes)
    config_path = _lookup(block, "config_path")
    if not config_path:
        notes.append("precision_debugger.config_path is not set: verl captures nothing without it")
    if not steps or not config_path:
        return [], notes
    data_dir = _lookup(block, "data_dir")
    captures: list[CaptureRequest] = []
    for role, role_stages in _STAGES_BY_ROLE.items():
        path = _BLOCK_BY_ROLE[role]
        ranks = _ranks(_lookup(config, *path), ".".join(path), str(config_path), as_verl)
        requested = [stage for stage in role_stages if stage in stages]
        if ranks is None or not requested:
            continue
        rule = [_REWARD_RULE] if "compute_rm_score" in requested else []
        captures.append(
            {
                "capture_id": f"verl-{role}",
                "run": None,
                "stages": requested,
                "roles": None,
                "ranks": ranks,
                "steps": steps,
                "config": None,
                "config_path": str(config_path),
                "bench": None,
                "data_dir": None if data_dir is None else str(data_dir),
                "keep": [],
                "parameters": [],
                "gradients": [],
                "limits": {"bytes": None, "seconds": None},
                "force": False,
                "strict": strict,
                "timeout": 60.0,
                "late": "wait",
                "again": 0,
                "source": "verl",
                "by": "verl",
                "created": 0.0,
                "notes": [*notes, *rule],
            }
        )
    return captures, notes


def _lookup(node: object, *path: str) -> object:
    for name in path:
        if node is None:
            return None
        try:
            node = node.get(name) if isinstance(node, Mapping) else getattr(node, name, None)
        except Exception as error:
            # OmegaConf raises its own errors for '???' and for failed interpolations.
            _log.debug("%s of verl's configuration cannot be read: %s", name, error)
            return None
    return node


def _stages(block: object, strict: bool, notes: list[str]) -> set[str]:
    names = _lookup(block, "stages")
    if names is None:
        return set(VERL_STAGES)
    if isinstance(names, str) or not isinstance(names, Sequence):
        raise InvalidPlan(
            f"precision_debugger.stages is {names!r:.200}", expected="a list of stage names"
        )
    stages = [str(stage) for stage in names]
    unknown = [name for name in stages if name not in VERL_STAGES and name != "rollout_generate"]
    if unknown and strict:
        raise InvalidPlan(
            f"precision_debugger.stages names {', '.join(map(repr, unknown))}",
            expected=f"some of {', '.join(VERL_STAGES)}",
        )
    if unknown:
        notes.append(f"stages that verl does not know are omitted: {', '.join(unknown)}")
    if "rollout_generate" in stages:
        notes.append("rollout_generate is omitted, as in verl: it runs in the inference engine")
    return {stage for stage in stages if stage in VERL_STAGES}


def _steps(profiler: object, block: object, notes: list[str]) -> list[int]:
    outer = _numbers(_lookup(profiler, "steps"), "global_profiler.steps")
    inner = _numbers(_lookup(block, "steps"), "precision_debugger.steps")
    if outer is None and inner is None:
        notes.append("neither level names steps: nothing is captured, as in verl")
        return []
    if outer is None or inner is None:
        return sorted(outer or inner or ())
    both = sorted(outer & inner)
    if not both:
        notes.append("global_profiler.steps and precision_debugger.steps have no step in common")
    return both


def _ranks(block: object, name: str, config_path: str, as_verl: bool) -> list[int] | str | None:
    """Return the ranks that a role's profiler block chooses, or None where it is off."""
    if not _lookup(block, "enable"):
        return None
    all_ranks = _lookup(block, "all_ranks")
    every = all_ranks or as_verl
    named = None if every else _numbers(_lookup(block, "ranks"), f"{name}.ranks")
    chosen = _msprobe_ranks(config_path) or named
    return sorted(chosen) if chosen else "all"


def _msprobe_ranks(config_path: str) -> set[int] | None:
    try:
        return _numbers(load_config(config_path).get("rank"), f"rank of {config_path}")
    except InvalidPlan as error:
        # Each rank reports it when it captures; the file may exist on the ranks' hosts only.
        _log.debug("the ranks in msprobe's configuration cannot be read here: %s", error)
        return None


def _numbers(value: object, name: str) -> set[int] | None:
    if value is None:
        return None
    items = value if isinstance(value, Sequence) else ()
    numbers = [item for item in items if isinstance(item, int) and not isinstance(item, bool)]
    if isinstance(value, str) or not isinstance(value, Sequence) or len(numbers) != len(value):
        raise InvalidPlan(f"{name} is {value!r:.200}", expected="a list of whole numbers")
    return set(numbers)
