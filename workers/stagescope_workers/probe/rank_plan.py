"""The active captures of this process: those of a local file, and those of the service."""

from __future__ import annotations

import collections
import dataclasses
import threading
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Final, TypedDict, cast

from stagescope_wire.captures import matches, matches_rank, needs_ranks, validate_capture
from stagescope_wire.errors import InvalidPlan
from stagescope_wire.keep import (
    capture_selectors,
    is_selected,
    kept_sections,
    matching_selectors,
    read_keep,
    shard_capture,
)
from stagescope_wire.plan import CaptureRequest, CaptureSpec, KeepSpec, SentPlan
from stagescope_workers.capture.msprobe_config import check_config, load_config
from stagescope_workers.capture.verl_blocks import captures_from_verl
from stagescope_workers.probe.options import ProbeOptions

_ORIGIN_FIELDS: Final = ("capture_id", "by", "created", "source")
_MAX_BYTES: Final = 1 << 20


def captures_from_yaml(path: str) -> list[CaptureRequest]:
    """Read a YAML file of captures.

    Raises:
        InvalidPlan: it cannot be read, or requests something impossible.
    """
    file = Path(path).expanduser().absolute()
    content = _read(file)
    if isinstance(content, Mapping) and "global_profiler" in content:
        captures = captures_from_verl(content)
        for capture in captures:
            capture["config_path"] = _resolve(file, capture["config_path"])
            capture["data_dir"] = _resolve(file, capture["data_dir"])
        return captures
    if isinstance(content, Mapping):
        content = content.get("captures", [content] if "stages" in content else None)
    if not isinstance(content, list):
        raise InvalidPlan(f"{path} has no captures", expected="captures: [{stages: ...}, ...]")
    return [_capture(file, number, spec) for number, spec in enumerate(content)]


def _read(file: Path) -> object:
    import yaml

    try:
        with file.open("rb") as stream:
            raw = stream.read(_MAX_BYTES + 1)
    except OSError as error:
        raise InvalidPlan(f"{file} cannot be read: {error.strerror or error}") from error
    if len(raw) > _MAX_BYTES:
        raise InvalidPlan(f"{file} is over {_MAX_BYTES} bytes long")
    try:
        return yaml.safe_load(raw)
    except yaml.YAMLError as error:
        raise InvalidPlan(f"{file} is not YAML: {error}") from error


def _resolve(file: Path, path: str | None) -> str | None:
    """Return `path` relative to the directory of `file`; a value that is no path is unchanged."""
    return str(file.parent / Path(path).expanduser()) if isinstance(path, str) and path else path


def _capture(file: Path, number: int, spec: object) -> CaptureRequest:
    if not isinstance(spec, Mapping):
        raise InvalidPlan(f"capture {number} of {file} is {spec!r:.200}", expected="an object")
    paths = {name: _resolve(file, spec.get(name)) for name in ("config_path", "data_dir")}
    capture = _checked({**spec, **paths})
    if capture["config"] is not None:
        check_config(capture["config"])
    elif capture["config_path"] is not None:
        check_config(load_config(capture["config_path"]))
    origin = {
        "capture_id": str(spec.get("capture_id") or f"{file.stem}-{number}"),
        "source": "yaml",
        "by": str(file),
        "created": file.stat().st_mtime,
    }
    return cast("CaptureRequest", {**capture, **origin})


def _checked(spec: Mapping[str, object]) -> CaptureSpec:
    fields = {name: value for name, value in spec.items() if name not in _ORIGIN_FIELDS}
    # Whoever writes the file or calls init has the training's rights: every root is allowed.
    return validate_capture(fields, allowed_roots=("/",))


_REMEMBERED_STEPS: Final = 1000
"""Begun steps that are remembered, to detect late captures."""
_CACHED_STAGES: Final = 64
"""Stages whose selectors are cached."""

MissedCallback = Callable[[CaptureRequest, int, str], None]
"""Called with (capture, step, stage) of a capture that arrived after that stage had begun."""

EstimateCallback = Callable[[CaptureRequest], None]
"""Called with a capture that is not agreed on yet, and would include this rank."""


class _Location(TypedDict):
    """The keywords of `matches` and `matching_selectors`."""

    stage: str
    role: str
    rank: int
    step: int | None


@dataclasses.dataclass
class _LeftOut:
    """The unsent data of a stage: names of tensors and sections, and of numbers."""

    tensors: frozenset[str] = frozenset()
    numbers: frozenset[str] = frozenset()

    def has_any(self, selectors: Collection[str], stage: str) -> bool:
        """Return whether selectors keep some of it."""
        if any(is_selected(selectors, stage, name) for name in self.tensors):
            return True
        return bool(kept_sections(selectors, stage, (), self.numbers))


class PlanWatch:
    """Holds the captures; training calls `begin`, the background thread calls `apply`."""

    def __init__(
        self,
        options: ProbeOptions,
        *,
        local: Iterable[CaptureRequest] = (),
        on_missed: MissedCallback = lambda capture, step, stage: None,
        on_estimate_requested: EstimateCallback = lambda capture: None,
    ) -> None:
        self.run = options.run
        self.role = options.role
        self.rank = options.rank
        keep, runs_captures = options.keep, options.captures is not False
        self._local_keep = keep
        self._service_keep: KeepSpec | None = None
        self._local = (*local, *_shard_captures(keep)) if runs_captures else ()
        self._selectors: dict[tuple[int | None, str], frozenset[str]] = {}
        self._runs_captures = runs_captures
        self._captures: tuple[CaptureRequest, ...] = self._local
        self._on_missed = on_missed
        self._on_estimate_requested = on_estimate_requested
        self._revision = 0
        self.data_dir: str | None = None
        """The service's data_dir, where its plan has one."""
        self._lock = threading.Lock()
        self._begun: collections.OrderedDict[int, dict[str, _LeftOut]] = collections.OrderedDict()
        """Step -> stage that began here -> what was not sent of it."""
        self._name_sets: dict[frozenset[str], frozenset[str]] = {}
        self._seen: set[str] = {str(capture["capture_id"]) for capture in self._local}

    @property
    def revision(self) -> int:
        """The revision of the service's plan that is active here; 0 before the first."""
        return self._revision

    @property
    def captures(self) -> tuple[CaptureRequest, ...]:
        """The active captures, the local ones first."""
        return self._captures

    def begin(self, step: int | None, stage: str) -> list[CaptureRequest]:
        """Note that a stage begins here, and return the captures that this rank carries out.

        Captures that only keep tensors are not included: the service carries them out.
        """
        with self._lock:
            if step is not None:
                self._begun.setdefault(step, {}).setdefault(stage, _LeftOut())
                while len(self._begun) > _REMEMBERED_STEPS:
                    self._begun.popitem(last=False)
            captures = self._captures
        return [
            capture
            for capture in captures
            if needs_ranks(capture) and self._matches(capture, step, stage)
        ]

    def leave_out(
        self,
        step: int | None,
        stage: str,
        *,
        tensors: Iterable[str] = (),
        numbers: Iterable[str] = (),
    ) -> None:
        """Note which data of a stage is not sent, because no active capture or `keep` needs it."""
        with self._lock:
            left_out = self._begun.get(-1 if step is None else step, {}).get(stage)
            if left_out is not None:
                left_out.tensors = self._shared(left_out.tensors.union(tensors))
                left_out.numbers = self._shared(left_out.numbers.union(numbers))

    def _shared(self, names: frozenset[str]) -> frozenset[str]:
        """Return one object for equal sets: steps leave out the same names, hundreds of them."""
        if len(self._name_sets) >= _CACHED_STAGES:
            self._name_sets.clear()
        return self._name_sets.setdefault(names, names)

    def keep_selectors(self, step: int | None, stage: str) -> frozenset[str]:
        """Return what is kept of a stage: names of sections and tensors.

        They come from the active configurations and captures of this process. The service applies
        the same rules to its own, newer state.
        """
        key = (step, stage)
        selectors = self._selectors.get(key)
        if selectors is None:
            selectors = self._current_selectors(step, stage)
            with self._lock:
                if len(self._selectors) >= _CACHED_STAGES:
                    self._selectors.clear()
                self._selectors[key] = selectors
        return selectors

    def _current_selectors(self, step: int | None, stage: str) -> frozenset[str]:
        location: _Location = {
            "stage": stage, "role": self.role, "rank": self.rank, "step": step
        }  # fmt: skip
        selectors: set[str] = set()
        for keep in (self._local_keep, self._service_keep):
            selectors.update(() if keep is None else matching_selectors(keep, **location))
        for capture in self._captures:
            if capture.get("run") in (None, self.run) and matches(capture, **location):
                selectors.update(capture_selectors(capture))
        return frozenset(selectors)

    def apply(self, plan: SentPlan) -> None:
        """Activate the service's plan, and report the captures that arrived too late."""
        captures = [*plan.get("captures", ())]
        missed: list[tuple[CaptureRequest, int, str]] = []
        to_estimate: list[CaptureRequest] = []
        with self._lock:
            for capture in captures:
                # One capture may be sent for estimates and for agreement, each several times.
                key = f"{capture['capture_id']}/{capture.get('agreement', 1)}"
                needs_estimate = capture.get("phase") == "asked"
                if needs_estimate:
                    key += f"/{capture.get('asked_revision')}"
                if key in self._seen:
                    continue
                self._seen.add(key)
                if needs_estimate:
                    to_estimate += [capture] if self._includes_this_rank(capture) else []
                else:
                    missed += [(capture, *late) for late in self._missed_stages(capture)]
            self._service_keep = read_keep(plan.get("keep"))
            shards = _shard_captures(self._service_keep) if self._runs_captures else ()
            self._captures = (*self._local, *captures, *shards)
            self._selectors.clear()
            self._revision = int(plan["revision"])
            self.data_dir = plan.get("data_dir") or self.data_dir
        for capture, step, stage in missed:
            self._on_missed(capture, step, stage)
        for capture in to_estimate:
            self._on_estimate_requested(capture)

    def _missed_stages(self, capture: CaptureRequest) -> list[tuple[int, str]]:
        """Return the stages that it includes and that began here without it.

        The service may still keep data that is sent in any case. So a capture that only keeps
        tensors misses only those stages that left out some of its data.
        """
        selectors = None if needs_ranks(capture) else capture_selectors(capture)
        return [
            (step, stage)
            for step, stages in self._begun.items()
            for stage, left_out in sorted(stages.items(), key=lambda each: each[0])
            if self._matches(capture, step, stage)
            and (selectors is None or left_out.has_any(selectors, stage))
        ]

    def _includes_this_rank(self, capture: CaptureRequest) -> bool:
        roles = capture.get("roles") or [self.role]
        includes_run = self._runs_captures and capture.get("run") in (None, self.run)
        includes_rank = self.role in roles and matches_rank(capture["ranks"], self.rank)
        return includes_run and includes_rank and needs_ranks(capture)

    def _matches(self, capture: CaptureRequest, step: int | None, stage: str) -> bool:
        if not self._runs_captures or capture.get("run") not in (None, self.run):
            return False
        return matches(capture, stage=stage, role=self.role, rank=self.rank, step=step)


def _shard_captures(keep: KeepSpec | None) -> tuple[CaptureRequest, ...]:
    """Return the capture that copies a rank's parameters and gradients for `keep`, if any."""
    shards = None if keep is None else shard_capture(keep)
    return () if shards is None else (cast("CaptureRequest", shards),)


def read_plan(source: str | Path | Mapping[str, object]) -> list[CaptureRequest]:
    """Return the captures of a local plan: a file (see `captures_from_yaml`), or its content.

    Raises:
        InvalidPlan: the file cannot be read, or a capture in it is invalid.
    """
    if not isinstance(source, Mapping):
        return captures_from_yaml(str(source))
    if "global_profiler" in source:
        return captures_from_verl(source)
    captures = source.get("captures")
    if not isinstance(captures, list) or not all(isinstance(item, Mapping) for item in captures):
        raise InvalidPlan(
            f"a plan with {', '.join(map(str, source)) or 'nothing'}",
            expected="captures: a list of captures, or verl's global_profiler block",
        )
    return [_local_capture(capture, number) for number, capture in enumerate(captures)]


def _local_capture(spec: Mapping[str, object], number: int) -> CaptureRequest:
    origin = {"capture_id": f"init-{number}", "source": "yaml", "by": "init", "created": 0.0}
    origin |= {name: spec[name] for name in _ORIGIN_FIELDS if name in spec}
    return cast("CaptureRequest", {**_checked(spec), **origin})
