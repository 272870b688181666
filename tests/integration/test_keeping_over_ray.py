"""Keeping on real Ray: by configuration, by capture, through crashes and on full disks."""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("ray")
from tests.support.cluster import Service, eventually
from tests.support.ranks import Process

from stagescope_service.store.kept import Kept, read_kept

pytestmark = pytest.mark.ray

MB = 1 << 20


def _trainer_class() -> type:
    """Return the class by value: the actor's process cannot import the tests."""

    class Trainer:
        """A rank that records what is worth keeping, in two microbatches of two mini-batches."""

        def __init__(self, run: str, rank: int, keep: Any, options: Any) -> None:
            from stagescope_workers import init

            self.rank = rank
            self.probe = init(run, rank=rank, world_size=1, keep=keep, **options)

        def step(self, step: int, tokens: int = 8) -> int:
            """Do one step; return how many tensors were copied only because they are wanted."""
            import numpy as np
            import torch

            copied = 0
            for minibatch in range(2):
                for microbatch in range(2):
                    model = torch.nn.Linear(3, 2)
                    place = {"minibatch": minibatch, "microbatch": microbatch}
                    value = np.float32(step + 10 * minibatch + 100 * microbatch + 1000 * self.rank)
                    with self.probe.stage("actor_update", step=step, model=model, **place) as stage:
                        model(torch.full((1, 3), float(value))).sum().backward()
                        values = np.full((2, tokens), value)
                        stage.record(
                            log_probs=-values, response_mask=np.ones((2, tokens), np.int64)
                        )
                        if stage.wants("prob_ratio"):
                            copied += 1
                            stage.record(
                                prob_ratio=values,
                                elementwise_loss=2 * values,
                                advantages=3 * values,
                                effective_valid=np.ones_like(values),
                            )
                        stage.record(
                            sample_ids=[
                                f"{self.rank}-{minibatch}-{microbatch}-{r}" for r in range(2)
                            ]
                        )
                        stage.log(loss=float(value), pg_loss=float("nan"))
            self.probe.end_step(step)
            return copied

        def wants(self, step: int) -> bool:
            """Say whether intermediates of a step are wanted here."""
            return bool(self.probe.wants("prob_ratio", stage="actor_update", step=step))

    return Trainer


class Rank(Process):
    """A rank that records what is worth keeping."""

    def __init__(self, run: str, rank: int = 0, keep: object = None, **options: object) -> None:
        super().__init__(_trainer_class(), run, rank, keep, options)

    def step(self, step: int, tokens: int = 8) -> int:
        """Do a step."""
        return int(self.ask("step", step, tokens))

    def wants(self, step: int) -> bool:
        """Say whether intermediates of a step are wanted."""
        return bool(self.ask("wants", step))


def started(home: Path, address: str, **settings: object) -> Service:
    """A service without rules: the NaN that the ranks log would have their steps pinned."""
    home.mkdir(exist_ok=True)
    rules = home / "rules.yaml"
    rules.write_text("rules: []")
    return Service.start(home, address, triggers=rules, **settings)


def kept_rows(service: Service, run: str, step: int, **filters: Any) -> list[dict[str, object]]:
    with service.session() as session:
        return list(session.step(step, run=run).kept(**filters).to_dicts())


def files(service: Service, run: str, step: int, count: int) -> list[Kept]:
    """Wait for so many kept files; each has the checksum that the catalogue says."""

    def there() -> list[dict[str, Any]] | None:
        rows = [row for row in kept_rows(service, run, step) if row["state"] == "kept"]
        return rows if len(rows) == count else None

    found = []
    for row in eventually(there):
        path = Path(row["path"])
        digest = hashlib.sha256(path.read_bytes()).hexdigest()
        assert row["checksum"] == f"sha256:{digest}"
        assert (row["bytes"], row["state"]) == (path.stat().st_size, "kept")
        found.append(read_kept(path))
    return found


def four(service: Service, run: str, step: int) -> list[dict[str, Any]] | None:
    rows = kept_rows(service, run, step)
    return rows if len(rows) == 4 else None


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of 24 MB."""
    path = tmp_path / "disk"
    path.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", str(path)]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("needs the right to mount a tmpfs")
    try:
        yield path
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def test_a_full_disk_stops_keeping_and_says_so_while_metrics_go_on(
    address: str, tmp_path: Path, small_disk: Path
) -> None:
    service = started(
        tmp_path / "home", address, data_dir=small_disk / "data", ring_bytes=0,
        database_url=f"sqlite:///{tmp_path}/catalogue.db", reserve_bytes=8 * MB,
    )  # fmt: skip
    rank = Rank("full", keep={"what": ["is_loss"]})
    ballast = small_disk / "somebody_elses"
    try:
        rank.step(1)
        eventually(lambda: four(service, "full", 1))
        ballast.write_bytes(b"x" * (17 * MB))
        rank.step(2)
        eventually(rank.settled)
        assert kept_rows(service, "full", 2) == []
        keeping = eventually(lambda: unhealthy(service))
        assert keeping["not_kept"] == 4
        assert "must stay free" in keeping["reason"]
        with service.session() as session:
            status = session.status()
            assert status["ready"] is True
            assert status["coordinator"]["keeping"]["healthy"] is False
            (said,) = [row for row in session.findings("full") if row["kind"] == "not_kept"]
            assert "must stay free" in said["message"]
            scalars = session.step(2, run="full").scalars(name="loss")
            assert len(scalars) == 4  # what is said of the step is as complete as ever
        ballast.unlink()
        rank.step(3)
        eventually(lambda: four(service, "full", 3))
        eventually(lambda: service.status()["keeping"]["healthy"])
        assert service.status()["keeping"]["not_kept"] == 4
        with service.session() as session:
            (said,) = [row for row in session.findings("full") if row["kind"] == "not_kept"]
            assert said["over_wall"] is not None
    finally:
        with contextlib.suppress(FileNotFoundError):
            ballast.unlink()
        rank.close()
        service.stop()


def unhealthy(service: Service) -> Any:
    keeping = service.status()["keeping"]
    return None if keeping["healthy"] or keeping["not_kept"] < 4 else keeping


# A cluster has one service: those of single tests came first.


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    home = tmp_path_factory.mktemp("keeping")
    file = home / "keep.yaml"
    file.write_text("runs: {'set*': {every_n_steps: 2, what: [is_loss]}}")
    running = started(home, address, lease_seconds=20.0, keep=file)
    yield running
    running.stop()


def test_what_a_configuration_names_is_kept_and_no_part_over_another(service: Service) -> None:
    keep = {"every_n_steps": 2, "what": ["is_loss", "loss"], "gradients": ["weight"]}
    ranks = [Rank("configured", rank, keep) for rank in range(2)]
    copied = [rank.step(step) for step in (1, 2, 3) for rank in ranks]
    assert copied == [0, 0, 4, 4, 0, 0]
    found = files(service, "configured", 2, 8)
    parts = {(each.job["rank"], each.job["minibatch"], each.job["microbatch"]) for each in found}
    assert len(parts) == 8
    for each in found:
        value = np.float32(
            2 + 10 * each.job["minibatch"] + 100 * each.job["microbatch"] + 1000 * each.job["rank"]
        )
        assert np.all(each.tensors["elementwise_loss"][2] == 2 * value)
        assert np.all(each.tensors["gradient/weight"][2] == value)
        assert each.scalars["loss"] == value
        assert np.isnan(each.scalars["pg_loss"])
        assert {*each.sections} == {"is_loss", "loss", "gradients"}
        assert each.strings["sample_ids"][0].startswith(f"{each.job['rank']}-")
    for step in (1, 3):
        assert len(service.stages("configured", step)) == 8
        assert kept_rows(service, "configured", step) == []
    for rank in ranks:
        rank.close()


def test_a_capture_of_the_plan_keeps_the_same_words(service: Service) -> None:
    rank = Rank("captured")
    assert rank.step(1) == 0
    with service.session() as session:
        eventually(lambda: len(session.step(1, run="captured").stages()) == 4)
        requested = session.capture(
            run="captured", stages=["actor_update"], steps=[5], keep=["is_loss_debug", "loss"]
        )
        assert requested["agreement"]["phase"] == "agreed"
    eventually(lambda: rank.wants(5))
    assert [rank.step(step) for step in (4, 5, 6)] == [0, 4, 0]
    assert {*files(service, "captured", 5, 4)[0].sections} == {"is_loss", "loss"}
    assert kept_rows(service, "captured", 4) == kept_rows(service, "captured", 6) == []
    rank.close()


def test_the_ingestor_killed_in_the_middle_loses_nothing(service: Service) -> None:
    rank = Rank("killed", keep={"what": ["is_loss"]})
    rank.step(1)
    files(service, "killed", 1, 4)
    with service.held("ingestor") as pid:  # what comes now is read by nobody
        for step in (2, 3):
            rank.step(step, tokens=20_000)
        service.kill("ingestor", pid)
    for step in (2, 3):
        found = files(service, "killed", step, 4)
        assert all(each.tensors["prob_ratio"][1] == (2, 20_000) for each in found)
    eventually(rank.settled)
    assert not [*service.settings.data_path.glob("killed/**/.*.tmp")]
    rank.close()


def test_what_the_settings_have_runs_keep_reaches_ranks_also_when_it_changes(
    service: Service,
) -> None:
    ranks = [Rank(run) for run in ("settings", "other")]
    eventually(lambda: ranks[0].wants(2))
    assert not ranks[1].wants(2)
    for rank in ranks:
        assert rank.step(1) == 0
    assert [rank.step(2) for rank in ranks] == [4, 0]
    files(service, "settings", 2, 4)
    assert service.settings.keep is not None
    service.settings.keep.write_text("what: [loss]")
    service.kill_and_await("coordinator")
    eventually(lambda: not ranks[0].wants(4))
    for rank in ranks:
        rank.step(4)
    for run in ("settings", "other"):
        assert {*files(service, run, 4, 4)[0].sections} == {"loss"}
    for rank in ranks:
        rank.close()
