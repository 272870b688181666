"""A training process pays for what it uses: none of the service's libraries comes along."""

from __future__ import annotations

import subprocess
import sys

SERVICE = {
    "alembic", "fastapi", "numba", "orjson", "pandas", "polars", "prometheus_client", "pyarrow",
    "pydantic", "pydantic_settings", "safetensors", "sqlalchemy", "starlette", "uvicorn",
}  # fmt: skip
"""Without Ray, which brings some of them itself, and msprobe, which brings pandas."""

PROGRAM = """
import sys, time
import numpy as np
from stagescope_workers import calculate_debug_metrics, init

log_probs = np.full((2, 3), -1.0, np.float32)
tensors = {
    "rollout_log_probs": log_probs, "old_log_probs": log_probs - 0.5,
    "response_mask": np.ones((2, 3), np.int64), "responses": np.ones((2, 3), np.int64),
}
probe = init("light", attempt_key="a", strict=True, url="http://127.0.0.1:9")
with probe.stage("actor_compute_log_prob", step=1) as stage:
    stage.record(**tensors)
    stage.log(loss=1.0)
assert calculate_debug_metrics(tensors)["per_round/total_rounds"] == 1
deadline = time.monotonic() + 30
while probe.service is None:  # the background thread has said who it is, and opened a link
    assert time.monotonic() < deadline
    time.sleep(0.01)
print(*{name.partition(".")[0] for name in list(sys.modules)})
probe.close(0.0)
"""


def test_using_the_probe_loads_no_library_of_the_service() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=60
    )
    loaded = set(done.stdout.split())
    assert {"numpy", "httpx", "stagescope_workers"} <= loaded
    assert not loaded & SERVICE
    assert not loaded & {"torch", "ray", "stagescope_service"}
