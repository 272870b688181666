"""A training process pays for what it uses: none of the service's libraries comes along."""

from __future__ import annotations

import subprocess
import sys

SERVICE = {
    "fastapi", "numba", "orjson", "pandas", "polars", "prometheus_client", "pyarrow",
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


LOOKED_UP = """
import ray, sys
import stagescope_workers
from stagescope_service.api_actor import ApiActor
from stagescope_service.coordinator.actor import DebugCoordinator
loaded = {name for name in sys.modules if name.startswith("stagescope_service")}
print(*loaded, *{name.partition(".")[0] for name in list(sys.modules)})
"""


def test_looking_up_the_service_s_actors_loads_no_library_of_the_service() -> None:
    # A handle brings its actor's class: Ray imports the file of the class in the process.
    ray_alone = _loaded("import ray, sys; print(*sys.modules)")
    loaded = _loaded(LOOKED_UP) - ray_alone
    assert not loaded & SERVICE
    assert {name for name in loaded if name.startswith("stagescope_service.")} == {
        "stagescope_service.api_actor",
        "stagescope_service.background",
        "stagescope_service.coordinator",
        "stagescope_service.coordinator.actor",
        "stagescope_service.coordinator.control_socket",
        "stagescope_service.priority",
    }


def _loaded(program: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60
    )
    return set(done.stdout.split())
