"""The rule that scores an answer; verl loads this file by `reward.custom_reward_function.path`."""

from __future__ import annotations


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: dict[str, object]
) -> float:
    """Return 1 for the sum as the last turn's text, else half the share of digits in the text."""
    answer = solution_str.rpartition("]")[2]
    if answer == ground_truth:
        return 1.0
    return 0.5 * sum(map(str.isdigit, answer)) / max(len(answer), 1)
