"""The columns of a row's vector: the sums of one fragment of a sample."""

from __future__ import annotations

from typing import Final

ROW: Final = (
    "tokens", "p_sum", "q_sum", "d_sum", "d_abs_sum", "d_abs_max", "over_0", "over_1", "over_2",
    "over_3", "ratio_0", "ratio_1", "raw_sum", "w_sum", "non_finite",
    "lag1_n", "lag2_n", "ahead_1", "behind_1", "ahead_2", "behind_2", "weight_sum",
    "pp_sum", "qq_sum", "pq_sum",
)  # fmt: skip
"""Columns of a row's vector, defined as in a cell. `raw_sum` and `w_sum` sum weight - 1, the last
three sum products."""
