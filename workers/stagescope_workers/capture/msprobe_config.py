"""Capture requests and their msprobe config.json, checked and completed by the plan.

Every key of config.json is passed on, known or not. Where the plan decides (rank, step, dump_path)
the plan's value goes to msprobe and the difference is listed in `overrides`. For some settings
msprobe would log a reason and raise a bare code; these are refused here with a readable message.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final, TypedDict, cast

from stagescope_wire.captures import MSPROBE_LEVELS, MSPROBE_TASKS
from stagescope_wire.errors import InvalidPlan
from stagescope_wire.plan import CaptureRequest

SUMMARY_MODES: Final = ("statistics", "md5", "xor")
DATA_MODES: Final = ("all", "input", "output", "forward", "backward")
_CHOICES: Final = {
    "task": MSPROBE_TASKS,
    "level": MSPROBE_LEVELS,
    "risk_level": ("CORE", "FOCUS", "ALL"),
    "precision": ("low", "high"),
}

_MAX_BYTES: Final = 4 << 20
"""A config.json is a page of text; a longer file is not one."""

Config = Mapping[str, object]
"""The content of a config.json: JSON of any shape until `check_config` has checked it."""


class TaskSection(TypedDict, total=False):
    """The keys of a task's own block in config.json that are read here."""

    scope: Sequence[str]
    list: Sequence[str]
    tensor_list: Sequence[str]
    data_mode: Sequence[str]
    summary_mode: str
    diff_nums: int
    bench_path: str


@dataclasses.dataclass(frozen=True, slots=True)
class MsprobeConfig:
    """The configuration for msprobe, and what the plan changed in it."""

    content: Config
    overrides: tuple[str, ...] = ()

    @property
    def task(self) -> str:
        """Msprobe's task: statistics, tensors, or another kind of data to collect."""
        return str(self.content.get("task") or "statistics")

    @property
    def level(self) -> str:
        """Msprobe's level: L0 modules, L1 API calls, mix both, L2 kernels, debug saved values."""
        return str(self.content.get("level") or "L1")

    @property
    def section(self) -> TaskSection:
        """The task's own block; empty where there is none."""
        block = self.content.get(self.task)
        return cast("TaskSection", block) if isinstance(block, Mapping) else {}

    @property
    def summary_mode(self) -> str:
        """statistics, md5 or xor."""
        return str(self.section.get("summary_mode") or "statistics")

    @property
    def filtered(self) -> bool:
        """Whether only a part of the operators is collected."""
        return bool(self.section.get("list") or self.section.get("scope"))

    @property
    def signature(self) -> str:
        """Equal for two configurations that one debugger can serve."""
        content = {key: value for key, value in self.content.items() if key != "dump_path"}
        return json.dumps(content, sort_keys=True, default=repr)


def load_config(path: str) -> dict[str, object]:
    """Read an msprobe config.json.

    Raises:
        InvalidPlan: it cannot be read, or is not a JSON object.
    """
    try:
        with Path(path).open("rb") as file:
            raw = file.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidPlan(
            f"config_path {path!r} cannot be read on this host: {error.strerror or error}",
            expected="the path of an msprobe config.json that every captured rank can read",
        ) from error
    if len(raw) > _MAX_BYTES:
        raise InvalidPlan(f"config_path {path!r} is over {_MAX_BYTES} bytes long")
    try:
        content = json.loads(raw)
    except ValueError as error:
        raise InvalidPlan(f"config_path {path!r} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise InvalidPlan(f"config_path {path!r} has {type(content).__name__}, not an object")
    return content


def resolve_config(capture: CaptureRequest, *, dump_path: str, step: int | None) -> MsprobeConfig:
    """Return the configuration of one capture on one rank, checked and with the plan's values.

    Args:
        capture: the request; `config` or `config_path` holds msprobe's part of it.
        dump_path: the directory of this capture.
        step: the step that the plan chose.

    Raises:
        InvalidPlan: a value that msprobe refuses.
    """
    requested = capture.get("config")
    if requested is None:
        requested = load_config(str(capture["config_path"]))
    check_config(requested)
    content: dict[str, object] = json.loads(json.dumps(requested))
    overrides = _overrides(content, capture, dump_path, step)
    # Both filters stay empty. msprobe counts steps from 0 in each process and would stop for good
    # after the last of its list. The plan has chosen rank and step before msprobe starts.
    content.update({"rank": [], "step": [], "dump_path": dump_path})
    if content.get("dump_enable") is False:
        content["dump_enable"] = True
        overrides.append("dump_enable: config.json says false, the plan requests a dump: true")
    return MsprobeConfig(content, tuple(overrides))


def _overrides(
    content: Config, capture: CaptureRequest, dump_path: str, step: int | None
) -> list[str]:
    overrides = []
    ranks, steps = capture.get("ranks", "all"), capture.get("steps", "all")
    if content.get("rank") and content["rank"] != ranks:
        overrides.append(f"rank: config.json says {content['rank']}, the plan says {ranks}")
    if content.get("step") and content["step"] != steps:
        overrides.append(
            f"step: config.json says {content['step']}, the plan says {steps} (now step {step})"
        )
    if content.get("dump_path") and content["dump_path"] != dump_path:
        overrides.append(
            f"dump_path: config.json says {content['dump_path']!r}, the plan says {dump_path!r}"
        )
    return overrides


def check_config(config: object) -> None:
    """Check the keys of msprobe 26.2; unknown keys are not checked.

    Raises:
        InvalidPlan: a value that msprobe 26.2 refuses.
    """
    if not isinstance(config, Mapping):
        raise InvalidPlan(f"config is {config!r:.200}", expected="msprobe's config.json, an object")
    try:
        json.dumps(config)
    except (TypeError, ValueError) as error:
        raise InvalidPlan(f"config cannot be written as JSON: {error}") from error
    for name, allowed in _CHOICES.items():
        _check(config, name, not config.get(name) or config[name] in allowed, f"one of {allowed}")
    for name in ("extra_info", "async_dump", "dump_enable"):
        _check(config, name, isinstance(config.get(name), bool | None), "true or false")
    for name in ("rank", "step"):
        _check(config, name, isinstance(config.get(name), list | None), "a list")
    resolved = MsprobeConfig(config)
    block = isinstance(config.get(resolved.task), Mapping | None)
    _check(config, resolved.task, block, "an object")
    _check_section(resolved)


def _check(config: Config, name: str, is_valid: bool, expected: str, prefix: str = "") -> None:
    if not is_valid:
        raise InvalidPlan(f"config.{prefix}{name} is {config[name]!r:.200}", expected=expected)


def _check_section(config: MsprobeConfig) -> None:
    section: Config = cast("Config", config.section)

    def check(name: str, is_valid: bool, expected: str) -> None:
        _check(section, name, is_valid, expected, f"{config.task}.")

    for name in ("scope", "list", "tensor_list", "data_mode"):
        value = section.get(name)
        strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
        check(name, value is None or strings, "a list of strings")
    modes = config.section.get("data_mode") or []
    is_one = len(modes) < 2 or "all" not in modes
    known = all(mode in DATA_MODES for mode in modes)
    check("data_mode", known and is_one, f"['all'], or some of {DATA_MODES[1:]}")
    mode = section.get("summary_mode")
    check("summary_mode", not mode or mode in SUMMARY_MODES, f"one of {SUMMARY_MODES}")
    number = section.get("diff_nums")
    is_int = isinstance(number, int) and not isinstance(number, bool)
    is_number = is_int and (number == -1 or cast(int, number) > 0)
    check("diff_nums", number is None or is_number, "-1 or a number over 0")
    check("bench_path", isinstance(section.get("bench_path"), str | None), "a path")
    _check_combinations(config)


def _check_combinations(config: MsprobeConfig) -> None:
    section = config.section
    one_api = len(section.get("list") or []) == 1 and not section.get("scope")
    if config.level == "L2" and not (config.task == "tensor" and one_api):
        raise InvalidPlan(
            "config.level is 'L2' with settings that it does not support",
            expected="task 'tensor', no scope, and a list of one API name",
        )
    if config.task == "nan_check" and config.level != "L1":
        raise InvalidPlan("config.task is 'nan_check'", expected="level 'L1', and an NPU")
    if not config.content.get("async_dump"):
        return
    if config.summary_mode == "md5":
        raise InvalidPlan(
            "config.async_dump is true with summary_mode 'md5'",
            expected="summary_mode 'statistics' or 'xor', or async_dump false",
        )
    if config.task == "tensor" and config.level != "debug" and not section.get("list"):
        raise InvalidPlan(
            "config.async_dump is true with task 'tensor' and no list",
            expected="the names of the operators in tensor.list, or async_dump false",
        )


def with_baseline(
    capture: CaptureRequest, *, stage: str, part: str, role: str, rank: int
) -> CaptureRequest:
    """Return a capture whose configuration names the dump that this rank compares with.

    Raises:
        InvalidPlan: the request names a baseline that has no dump of this work.
    """
    baseline = capture.get("bench")
    if baseline is None:
        return capture
    for dump in baseline.get("dumps", ()):
        found = (dump["stage"], dump["part"], dump["role"])
        if rank in dump["ranks"] and found == (stage, part, role):
            config = dict(capture["config"] or {})
            # msprobe compares checksums; by default it stops after the first operator that differs.
            settings = {"summary_mode": "md5", "bench_path": dump["path"]}
            requested = cast("Config", config.get("tensor") or {})
            section = {"diff_nums": -1, **requested, **settings}
            return {**capture, "config": {**config, "tensor": section}}
    raise InvalidPlan(
        f"capture {baseline['capture_id']} has no dump of {stage} part {part} of {role} rank "
        f"{rank} in step {baseline['step']} to compare with",
        expected="a stage, part and rank that it collected",
    )


def check_baseline(config: MsprobeConfig, rank: int) -> None:
    """Check that the baseline dump of `bench_path`, if there is one, has this rank.

    Raises:
        InvalidPlan: it has not; msprobe would fail with an unreadable message.
    """
    bench_path = config.section.get("bench_path")
    if config.task != "tensor" or not bench_path:
        return
    rank_directory = Path(bench_path) / "step0" / f"rank{rank}"
    if not rank_directory.is_dir():
        raise InvalidPlan(
            f"bench_path {bench_path!r} has no directory step0/rank{rank}",
            expected="the directory of an earlier capture of the same stage (it has step0/)",
        )


@contextlib.contextmanager
def temporary_config(config: MsprobeConfig, directory: Path) -> Iterator[str]:
    """Write the configuration as a JSON file that only its owner may read; remove it at the end.

    The file is in the dump's own directory, whose path msprobe accepts. msprobe refuses paths with,
    for example, a space, and `TMPDIR` may have one.
    """
    descriptor, path = tempfile.mkstemp(prefix="config-", suffix=".json", dir=directory)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(config.content, file)
        yield path
    finally:
        with contextlib.suppress(OSError):
            Path(path).unlink()
