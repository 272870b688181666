"""`stagescope run` on a Ray cluster that stands already: its workers know what the driver knows."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.workers.integrations.test_launcher import INTEGRATION, LAUNCH, TRAINER

pytest.importorskip("ray")

from stagescope_workers.integrations import ray_jobs, registry

pytestmark = pytest.mark.ray

DRIVER = """
import json, os, sys
import ray

theirs = json.loads(sys.argv[1])
ray.init(os.environ["CLUSTER"], log_to_driver=False, **theirs)

@ray.remote(num_cpus=0)
class Worker:
    def look(self):
        from other_trainer.loop import train
        names = ("STAGESCOPE_RUN", "STAGESCOPE_ATTEMPT", "STAGESCOPE_TOKEN", "THEIRS")
        return {"trained": train(1), **{name: os.environ.get(name) for name in names}}

print(json.dumps(ray.get(Worker.remote().look.remote())))
"""


@pytest.mark.parametrize(
    ("theirs", "value"),
    [
        ({}, None),
        ({"runtime_env": {"env_vars": {"THEIRS": "1", "STAGESCOPE_RUN": "theirs"}}}, "1"),
    ],
)
def test_a_worker_of_a_standing_cluster_is_patched(
    theirs: Mapping[str, object], value: str | None, address: str, tmp_path: Path
) -> None:
    package = tmp_path / "other_trainer"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "loop.py").write_text(TRAINER)
    (tmp_path / "other_hooks.py").write_text(INTEGRATION)
    hooks = f"{registry.watched()},other_trainer=other_hooks"
    # What a test may not add to the table is added to the variable that the launcher made of it.
    driver = f"import os; os.environ[{registry.VARIABLE!r}] = {hooks!r}\n" + textwrap.dedent(DRIVER)
    path = os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", LAUNCH, "run", "--run", "mine", "--attempt", "k1", "--",
         sys.executable, "-c", driver, json.dumps(theirs)],
        env={**os.environ, "PYTHONPATH": path, "CLUSTER": address, "STAGESCOPE_TOKEN": "secret"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    assert seen["trained"] == ["seen", 1]
    # Their own variables stay; a token is shown by Ray to everybody, and is not passed on.
    assert seen["STAGESCOPE_RUN"] == ("mine" if value is None else "theirs")
    assert (seen["STAGESCOPE_ATTEMPT"], seen["STAGESCOPE_TOKEN"]) == ("k1", None)
    assert seen["THEIRS"] == value


def test_a_submitted_jobs_own_environment_says_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray refuses a driver's runtime environment that differs from that of its job."""
    job = {"runtime_env": {"env_vars": {"PYTHONPATH": "/theirs", "OTHER": "1"}}, "metadata": {}}
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", json.dumps(job))
    monkeypatch.setenv("STAGESCOPE_RUN", "mine")
    merged = ray_jobs.with_variables({"working_dir": "/w"})
    expected = os.pathsep.join([str(registry.BOOTSTRAP), "/theirs"])
    assert (merged["working_dir"], merged["env_vars"]["PYTHONPATH"]) == ("/w", expected)
    left = json.loads(os.environ["RAY_JOB_CONFIG_JSON_ENV_VAR"])
    assert left["runtime_env"]["env_vars"] == {"PYTHONPATH": expected, "OTHER": "1"}
