"""The columns of each kind of table, so that a table without rows has the same columns.

An answer without rows names no columns, and frames of two steps concatenate only if names, order
and types are equal. Tests compare this table with the models of the API's answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

Kinds = Mapping[str, str]
"""Column -> int, float, bool, text, ints, texts or nested; `int?` and `bool?` may be missing."""


def _read(text: str) -> dict[str, str]:
    """Parse `name:kind name:kind ...`; a name without kind is a text."""
    pairs = (item.partition(":") for item in text.split())
    return {name: kind or "text" for name, _, kind in pairs}


RECORDS: Final[Mapping[str, Kinds]] = {
    "begun_again": _read("role ranks:ints stages:texts"),
    "missing": _read("role rank:int stage status since:float"),
    "superseded": _read("from_step:int by:int"),
    "odd_ranks": _read("role rank:int"),
}
"""Nested column whose values are lists of records -> the fields of a record."""

COLUMNS: Final[Mapping[str, Kinds]] = {
    "rounds": _read(
        "tokens:int masked_tokens:int abs_diff_mean:float abs_diff_max:float abs_diff_sum:float "
        "diff_sum:float probs_diff_mean:float probs_diff_max:float kl:float k3_kl:float "
        "pearson:float mult_prob_error:float ratio_mean:float calibration_z:float over_0.1:int "
        "over_0.5:int over_1:int over_5:int nonfinite:int comparable cause step_comparable"
    ),
    "ranks": _read(
        "tokens:int masked_tokens:int abs_diff_mean:float abs_diff_max:float abs_diff_sum:float "
        "diff_sum:float probs_diff_mean:float probs_diff_max:float kl:float k3_kl:float "
        "pearson:float mult_prob_error:float ratio_mean:float calibration_z:float over_0.1:int "
        "over_0.5:int over_1:int over_5:int nonfinite:int comparable cause step_comparable stage "
        "role rank:int parts:int parts_counted:int"
    ),
    "tokens": _read(
        "kind abs_diff:float p:float q:float round:int turn:int? token_id:int? text sample_uid "
        "row:int position:int role rank:int?"
    ),
    "metric_names": _read("name kind unit"),
    "samples": _read(
        "sample_uid group_id role rank:int? row:int fragments:int rounds:int? tokens:int "
        "mean_abs:float max_abs:float nonfinite:int reward:float kept:bool reason"
    ),
    "loss": _read(
        "fate gradient:bool? tokens:int share_of_tokens:float sum_abs:float mean_abs:float "
        "share_of_mismatch:float"
    ),
    "diagnosis": _read(
        "rule family title verdict sure:float since_step:int? last_step:int? explained_by:texts "
        "where for:texts against:texts meaning next:texts figure record sources:texts"
    ),
    "stages": _read(
        "stage role rank:int part status seconds:float begin_wall:float end_wall:float "
        "open_seconds:float device_seconds:float clock_error:float policy_version:int? error_type "
        "error_message incarnation revision:int? superseded:bool"
    ),
    "scalars": _read("name value:float stage role rank:int part wall:float"),
    "stuck": _read(
        "step:int stage role rank:int part status process seconds:float limit_seconds:float "
        "usual_seconds:float history_steps:int ranks:int ranks_begun:int ranks_ended:int "
        "whole_role:bool since_wall:float host pid:int? node_id"
    ),
    "dumps": _read(
        "part stage role rank:int state bytes:int? files:int? path node_id capture_id task level "
        "seconds:float error overrides:nested estimate:nested wall:float"
    ),
    "kept": _read(
        "stage role rank:int? part sections:texts state bytes:int? checksum tensors:nested "
        "policy_version:int? node_id path wall:float deleted_wall:float"
    ),
    "operators": _read(
        "stage role rank:int part capture_id order:int name kind operator module_class call:int? "
        "direction source stack_id parent section index type dtype shape:ints min:float max:float "
        "mean:float norm:float non_finite requires_grad:bool? checksum value placements data_name"
    ),
    "non_finite": _read(
        "state reason truncated:bool? done:bool? stage role rank:int part capture_id order:int? "
        "name operator module_class parent direction section index non_finite dtype shape:ints "
        "source stack_id bad_inputs:nested certain:bool? earliest:bool order_differs:bool "
        "culprits:int? masks:int? not_read:int? calls:int? measured:int? "
        "unmeasured:int? task"
    ),
    "weights": _read(
        "name verdict dtype shape:ints ranks:ints odd_ranks:nested reason trainer rollout kind "
        "trainer_name rollout_name"
    ),
    "versions": _read(
        "version:int step:int? records:int agree:int differ:int missing:int not_comparable:int "
        "replicas_differ:int complete:bool ranks:nested names:nested wall:float"
    ),
    "devices": _read(
        "device odd:int suspected:int runs:texts attempts:int last_run last_step:int? "
        "last_version:int last_role last_rank:int tensors:int names:texts host node_id "
        "device_kind device_index:int? device_serial last_wall:float"
    ),
    "runs": _read(
        "run live:bool attempt:int? attempt_key attempts:int last_closed_step:int? "
        "created_wall:float last_wall:float settings:nested"
    ),
    "attempts": _read(
        "attempt:int state begun:float ended:float end_reason attempt_key resumed_from_step:int? "
        "first_step:int? last_closed_step:int? unkeyed:bool? processes:int last_wall:float "
        "fingerprint:nested superseded:nested"
    ),
    "steps": _read(
        "step:int run attempt:int complete missing:nested gap begun_again:nested "
        "superseded_by:int? opened_wall:float closed_wall:float close_reason measured:bool "
        "losses:int pinned:bool"
    ),
    "findings": _read(
        "finding_id run attempt:int? step:int? stage role rank:int? kind severity message "
        "evidence:nested advice see:nested first_wall:float last_wall:float count:int? "
        "over_wall:float"
    ),
    "findings/groups": _read(
        "where first_step:int? last_step:int? steps:int ranks:int finding_id run attempt:int? "
        "step:int? stage role rank:int? kind severity message evidence:nested advice see:nested "
        "first_wall:float last_wall:float count:int? over_wall:float findings:int"
    ),
    "losses": _read(
        "loss_id run attempt:int? role rank:int? step:int? stage kind reason count:int? "
        "bytes:int? wall:float"
    ),
    "losses/groups": _read(
        "where first_step:int? last_step:int? steps:int ranks:int loss_id attempt:int? role "
        "rank:int? step:int? stage kind reason wall:float losses:int count:int bytes:int "
        "first_wall:float last_wall:float"
    ),
    "firings": _read(
        "run attempt:int? step:int rule stage role rank:int? round:int? message wall:float "
        "revision:int? actions:nested withdrawn_wall:float evidence:nested"
    ),
    "firings/groups": _read(
        "where first_step:int? last_step:int? steps:int ranks:int run attempt:int? step:int rule "
        "stage role rank:int? round:int? message actions:nested outcomes:texts wall:float "
        "withdrawn_wall:float firings:int first_wall:float last_wall:float"
    ),
}
"""Table -> its columns."""
