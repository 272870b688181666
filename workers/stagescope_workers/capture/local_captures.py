"""Captures from a YAML file on the rank's own host: in force from `init`, without the service.

The file holds `captures: [...]`, a list of captures or a single one, each with the fields of
`stagescope.captures.CAPTURE_FIELDS`::

    captures:
      - stages: [actor_update]
        ranks: [0]
        steps: {every: 100, start: 100}
        data_dir: /data/dumps
        config: {task: statistics, level: mix}

or verl's own configuration, known by its `global_profiler`. Relative paths are taken from the
file's directory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from stagescope.captures import validate_capture
from stagescope.errors import InvalidPlan
from stagescope_workers.capture.msprobe_config import check_config, load_config
from stagescope_workers.capture.verl_blocks import captures_from_verl

_OWN_FIELDS: Final = ("capture_id", "by", "created", "source")
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
    ordered = {name: value for name, value in spec.items() if name not in _OWN_FIELDS}
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
