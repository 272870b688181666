"""The fields of raw calls: their names, other names for them, and plain values of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from stagescope_wire.errors import InvalidEvent
from stagescope_wire.names import closest_field
from stagescope_wire.nonfinite import Json, JsonObject
from stagescope_wire.schema import BEGIN, END, END_STEP, FINISH, LOG, WORK_FIELDS

CALLS: Final = {BEGIN: "begin_stage", END: "end_stage", LOG: "log_scalars"}
"""Kind of event -> the call's name, if it differs."""
_TEXT, _INT, _NUMBER = "string", "integer", "number"
FIELDS: Final[Mapping[str, str]] = {
    "run": _TEXT, "role": _TEXT, "rank": _INT, "attempt_key": _TEXT, "world_size": _INT,
    **{name: _TEXT if name == "stage" else _INT for name in WORK_FIELDS},
}  # fmt: skip
"""Field of every call -> its type; `end_step` and `finish` have no others."""
OWN_FIELDS: Final[Mapping[str, Mapping[str, str]]] = {
    BEGIN: {"device_time": "boolean"},
    END: {
        "payload": "dict of tensors", "scalars": "dict of numbers", "status": _TEXT,
        "begin_seq": _INT, "begin_wall": _NUMBER, "begin_mono": _NUMBER, "error_type": _TEXT,
        "error_message": _TEXT, "device_seconds": _NUMBER, "payload_dropped": "dict",
    },
    LOG: {"scalars": "dict of numbers"},
    END_STEP: {},
    FINISH: {},
}  # fmt: skip
"""Kind of event -> its further fields, with their types."""
PAGE: Final = "docs/raw-calls.md"
"""Where the fields are listed."""
_OTHER_NAMES: Final[Mapping[str, str]] = {
    "run_name": "run", "run_id": "run", "experiment": "run", "experiment_name": "run",
    "job_name": "run",
    "global_step": "step", "global_steps": "step", "step_id": "step", "step_index": "step",
    "step_number": "step", "iteration": "step", "rollout_id": "step", "training_step": "step",
    "name": "stage", "stage_name": "stage", "phase": "stage",
    "global_rank": "rank", "world_rank": "rank", "rank_id": "rank",
    "num_ranks": "world_size", "n_ranks": "world_size", "nranks": "world_size",
    "weight_version": "policy_version", "weights_version": "policy_version",
    "model_version": "policy_version",
    "tensors": "payload", "metrics": "scalars",
}  # fmt: skip
"""Names that trainers and other tools have for these fields."""
_STEP: Final = re.compile(r"(?:.*[a-z\d]_)?(?:steps?|iter|iterations?)")
"""`trainer_step`, `training_iteration`: in a call without a clock they can only mean the step."""


def call_name(kind: str) -> str:
    """Return the name of the call of a kind of event."""
    return CALLS.get(kind, kind)


def plain_fields(fields: JsonObject) -> dict[str, Json]:
    """Return the fields of a call with scalars of numpy and torch as Python's, one level deep."""
    plain = {name: _plain(value) for name, value in fields.items()}
    if isinstance(scalars := plain.get("scalars"), Mapping):
        plain["scalars"] = {name: _plain(value) for name, value in scalars.items()}
    return plain


def check_plain(kind: str, fields: JsonObject) -> None:
    """Refuse arrays outside of the payload: they have no truth value, so that checks would fail.

    Raises:
        InvalidEvent: a field that is an array or a tensor with elements.
    """
    for name, value in fields.items():
        if shape := tuple(getattr(value, "shape", None) or ()):
            raise InvalidEvent(
                f"{name!r:.100} of {call_name(kind)} is a {type(value).__name__} of shape {shape}",
                expected="a plain value; tensors belong into payload",
            )


def unknown_fields(kind: str, fields: JsonObject) -> list[str]:
    """Return the unknown fields of a call that do not seem to mean a field that it lacks.

    Raises:
        InvalidEvent: a field that looks like a misspelling of a missing one, or is another name of
            it: without this check, `global_step=5` would be work without a step.
    """
    known = (*FIELDS, *OWN_FIELDS.get(kind, {}))
    unknown = sorted(set(fields) - {*known})
    wanted = [name for name in known if name not in fields]
    has_clock = "step" in fields or "policy_version" in fields
    for name in unknown:
        written = name.lower().replace("-", "_")
        meant = _OTHER_NAMES.get(written)
        if meant is None and not has_clock and _STEP.fullmatch(written):
            meant = "step"
        why = "which it is called here"
        if meant not in wanted:
            meant, why = closest_field(name, wanted), "which is the closest"
        if meant is not None:
            raise InvalidEvent(
                f"{call_name(kind)} has no field {name!r:.100}",
                expected=f"{meant}, {why}; it has {', '.join(known)}",
                advice=f"{PAGE} says what each is",
            )
    return unknown


def _plain(value: Json) -> Json:
    shape, item = getattr(value, "shape", None), getattr(value, "item", None)
    if shape is None or item is None or any(size != 1 for size in shape):
        return value
    try:
        return item()
    except Exception:  # of any library: the check of the field names its type
        return value
