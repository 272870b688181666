"""The captures in force in this process: from a local file, and from the service's polls."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final

from stagescope.wire.captures import matches, matches_rank, needs_ranks, validate_capture
from stagescope.wire.errors import InvalidPlan
from stagescope.wire.keep import read_keep, shard_capture, wanted_by, words_of
from stagescope_workers.capture.msprobe_config import check_config, load_config
from stagescope_workers.capture.verl_blocks import captures_from_verl

_FILE_FIELDS: Final = ("capture_id", "by", "created", "source")
_MOST_BYTES: Final = 1 << 20


def captures_from_yaml(path: str) -> list[dict[str, Any]]:
    """Read a YAML file of captures.

    Raises:
        InvalidPlan: it cannot be read, or orders something that cannot be carried out.
    """
    file = Path(path).expanduser().absolute()
    content = _read(file)
    if isinstance(content, Mapping) and "global_profiler" in content:
        captures = captures_from_verl(content)
        for capture in captures:
            capture["config_path"] = _from(file, capture["config_path"])
            capture["data_dir"] = _from(file, capture["data_dir"])
        return captures
    if isinstance(content, Mapping):
        content = content.get("captures", [content] if "stages" in content else None)
    if not isinstance(content, list):
        raise InvalidPlan(f"{path} holds no captures", expected="captures: [{stages: ...}, ...]")
    return [_capture(file, number, spec) for number, spec in enumerate(content)]


def _read(file: Path) -> Any:
    import yaml

    try:
        with file.open("rb") as stream:
            raw = stream.read(_MOST_BYTES + 1)
    except OSError as error:
        raise InvalidPlan(f"{file} cannot be read: {error.strerror or error}") from error
    if len(raw) > _MOST_BYTES:
        raise InvalidPlan(f"{file} is over {_MOST_BYTES} bytes long")
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise InvalidPlan(f"{file} is not YAML: {error}") from error


def _from(file: Path, path: Any) -> Any:
    return str(file.parent / Path(path).expanduser()) if isinstance(path, str) and path else path


def _capture(file: Path, number: int, spec: Any) -> dict[str, Any]:
    if not isinstance(spec, Mapping):
        raise InvalidPlan(f"capture {number} of {file} is {spec!r:.200}", expected="an object")
    ordered = {name: value for name, value in spec.items() if name not in _FILE_FIELDS}
    for name in ("config_path", "data_dir"):
        ordered[name] = _from(file, ordered.get(name))
    # Who can write this file can already do what the training may do: no root is off limits.
    capture = validate_capture(ordered, allowed_roots=["/"])
    if capture["config"] is not None:
        check_config(capture["config"])
    elif capture["config_path"] is not None:
        check_config(load_config(capture["config_path"]))
    return {
        **capture,
        "capture_id": str(spec.get("capture_id") or f"{file.stem}-{number}"),
        "source": "yaml",
        "by": str(file),
        "created": file.stat().st_mtime,
    }


_HISTORY: Final = 1000  # steps remembered to tell a late capture
_WANTED: Final = 64  # stages whose words are remembered
_OWN_FIELDS: Final = ("capture_id", "source", "by", "created", "force")

Missed = Callable[[Mapping[str, Any], int, str], None]
"""Called with (capture, step, stage) of a capture that came after that stage had begun."""

Asked = Callable[[Mapping[str, Any]], None]
"""Called with a capture that is not agreed on yet, and would concern this rank."""


class PlanWatch:
    """Holds the captures; training asks `matching`, the background thread calls `apply`."""

    def __init__(
        self,
        *,
        run: str,
        role: str,
        rank: int,
        local: Iterable[Mapping[str, Any]] = (),
        keep: Mapping[str, Any] | None = None,
        is_carried_out: bool = True,
        on_missed: Missed = lambda capture, step, stage: None,
        on_asked: Asked = lambda capture: None,
    ) -> None:
        self.run = run
        self.role = role
        self.rank = rank
        self._keep = keep
        self._standing: dict[str, Any] | None = None
        shards = None if keep is None else shard_capture(keep)
        ours = (*local, *(() if shards is None else (shards,)))
        self._local = ours if is_carried_out else ()
        self._wanted: dict[tuple[int | None, str], frozenset[str]] = {}
        self._is_carried_out = is_carried_out
        self._captures: tuple[Mapping[str, Any], ...] = self._local
        self._on_missed = on_missed
        self._on_asked = on_asked
        self._revision = 0
        self.data_dir: str | None = None
        """The service's data_dir, where its plan says it."""
        self._lock = threading.Lock()
        self._begun: collections.OrderedDict[int, set[str]] = collections.OrderedDict()
        self._seen: set[str] = {str(capture["capture_id"]) for capture in self._local}

    @property
    def revision(self) -> int:
        """The revision of the service's plan that is in force here; 0 before the first."""
        return self._revision

    @property
    def captures(self) -> tuple[Mapping[str, Any], ...]:
        """The captures in force, the local ones first."""
        return self._captures

    def begin(self, step: int | None, stage: str) -> list[Mapping[str, Any]]:
        """Note that a stage begins here, and return the captures that order it.

        A capture that orders only tensors to keep is the service's to carry out, and not among
        them.
        """
        with self._lock:
            if step is not None:
                self._begun.setdefault(step, set()).add(stage)
                while len(self._begun) > _HISTORY:
                    self._begun.popitem(last=False)
            captures = self._captures
        return [
            capture
            for capture in captures
            if needs_ranks(capture) and self._matches(capture, step, stage)
        ]

    def wanted(self, step: int | None, stage: str) -> frozenset[str]:
        """Return the words by which something of a stage is kept: sections, names of tensors.

        What the configuration and the captures in force say; the service decides with the same
        words, and with what it knows by then.
        """
        key = (step, stage)
        found = self._wanted.get(key)
        if found is None:
            found = self._wanted_now(step, stage)
            with self._lock:
                if len(self._wanted) >= _WANTED:
                    self._wanted.clear()
                self._wanted[key] = found
        return found

    def _wanted_now(self, step: int | None, stage: str) -> frozenset[str]:
        place: dict[str, Any] = {
            "stage": stage, "role": self.role, "rank": self.rank, "step": step
        }  # fmt: skip
        words: set[str] = set()
        for keep in (self._keep, self._standing):
            words.update(() if keep is None else wanted_by(keep, **place))
        for capture in self._captures:
            if capture.get("run") in (None, self.run) and matches(capture, **place):
                words.update(words_of(capture))
        return frozenset(words)

    def apply(self, plan: Mapping[str, Any]) -> None:
        """Put the service's plan in force; what came too late for a step is reported."""
        captures = [dict(item) for item in plan.get("captures", ())]
        missed, asked = [], []
        with self._lock:
            for capture in captures:
                # Each asking and each agreement is a word of its own about the same order.
                word = f"{capture['capture_id']}/{capture.get('agreement', 1)}"
                is_asked = capture.get("phase") == "asked"
                if is_asked:
                    word += f"/{capture.get('asked_revision')}"
                if word in self._seen:
                    continue
                self._seen.add(word)
                if is_asked:
                    asked += [capture] if self._concerns(capture) else []
                else:
                    missed += [(capture, *late) for late in self._too_late(capture)]
            self._standing = read_keep(plan.get("keep"))
            shards = None if self._standing is None else shard_capture(self._standing)
            ordered = () if shards is None or not self._is_carried_out else (shards,)
            self._captures = (*self._local, *captures, *ordered)
            self._wanted.clear()
            self._revision = int(plan["revision"])
            self.data_dir = plan.get("data_dir") or self.data_dir
        for capture, step, stage in missed:
            self._on_missed(capture, step, stage)
        for capture in asked:
            self._on_asked(capture)

    def _too_late(self, capture: Mapping[str, Any]) -> list[tuple[int, str]]:
        return [
            (step, stage)
            for step, stages in self._begun.items()
            for stage in sorted(stages)
            if self._matches(capture, step, stage)
        ]

    def _concerns(self, capture: Mapping[str, Any]) -> bool:
        roles = capture.get("roles") or [self.role]
        is_mine = self._is_carried_out and capture.get("run") in (None, self.run)
        is_named = self.role in roles and matches_rank(capture["ranks"], self.rank)
        return is_mine and is_named and needs_ranks(capture)

    def _matches(self, capture: Mapping[str, Any], step: int | None, stage: str) -> bool:
        if not self._is_carried_out or capture.get("run") not in (None, self.run):
            return False
        return matches(capture, stage=stage, role=self.role, rank=self.rank, step=step)


def read_plan(source: str | Path | Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the captures of a local plan: a file (see `local_captures`), or its content.

    Raises:
        InvalidPlan: the file cannot be read, or a capture in it cannot be carried out.
    """
    if not isinstance(source, Mapping):
        from stagescope_workers.probe.plan import captures_from_yaml

        return captures_from_yaml(str(source))
    if "global_profiler" in source:
        from stagescope_workers.capture.verl_blocks import captures_from_verl

        return captures_from_verl(source)
    captures = source.get("captures")
    if not isinstance(captures, list) or not all(isinstance(item, Mapping) for item in captures):
        raise InvalidPlan(
            f"a plan with {', '.join(map(str, source)) or 'nothing'}",
            expected="captures: a list of captures, or verl's global_profiler block",
        )
    return [_local_capture(capture, number) for number, capture in enumerate(captures)]


def _local_capture(given: Mapping[str, Any], number: int) -> dict[str, Any]:
    own = {name: given[name] for name in _OWN_FIELDS if name in given}
    spec = {name: value for name, value in given.items() if name not in _OWN_FIELDS}
    # Whoever calls init can already do what the training may do: no root is closed.
    capture = validate_capture(spec, allowed_roots=("/",))
    defaults = {"capture_id": f"init-{number}", "source": "yaml", "by": "init", "created": 0.0}
    return {**capture, **defaults, **own}
