"""Real verl trainings with the plugin installed: nothing of verl or of the example knows of it."""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from stagescope.step import Step

pytest.importorskip("verl")

from safetensors.torch import load_file
from tests.support.cluster import Service, eventually, ray_cluster
from tests.support.trainers.verl_runs import SECONDS, VerlRun, untimed

from stagescope_wire.schema import PART_FIELDS

pytestmark = [pytest.mark.verl, pytest.mark.ray, pytest.mark.timeout(1200)]

STEPS = 4
FORWARD = ("actor_compute_log_prob", "ref_compute_log_prob", "compute_values")
UPDATES = ("actor_update", "critic_update")
CAPTURED = (*FORWARD, *UPDATES)
ROLES = {"ref_compute_log_prob": "ref", "compute_values": "critic", "critic_update": "critic"}
DEBUG = ("valid", "max", "mean", "std")
OFFPOLICY = (
    "kl", "k3_kl", "training_ppl", "rollout_ppl", "training_log_ppl", "rollout_log_ppl",
    "log_ppl_diff", "log_ppl_abs_diff", "log_ppl_diff_max", "log_ppl_diff_min", "ppl_ratio",
    "chi2_token", "chi2_seq",
)  # fmt: skip
WEIGHTS = (
    "mean", "max", "min", "std", "eff_sample_size", "seq_mean", "seq_std", "seq_max", "seq_min",
    "seq_max_deviation", "ratio_fraction_high", "ratio_fraction_low", "seq_fraction_high",
    "seq_fraction_low",
)  # fmt: skip
VERLS_OWN = (
    *(f"training/rollout_probs_diff_{name}" for name in DEBUG),
    "training/rollout_actor_probs_pearson_corr",
    *(f"rollout_corr/{name}" for name in OFFPOLICY),
    *(f"rollout_corr/rollout_is_{name}" for name in WEIGHTS),
)
OFF = {"STAGESCOPE_VERL": "off"}
WEIGHTED = (
    "algorithm.rollout_correction.rollout_is=token",
    "algorithm.rollout_correction.rollout_is_threshold=1.02",
)
TWO_LOOPS = ("actor_rollout_ref.rollout.agent.num_workers=2",)


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    with ray_cluster(num_cpus=16, num_gpus=2, object_store_memory=400_000_000) as address:
        yield address


@pytest.fixture(scope="module")
def service(address: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    service = Service.start(tmp_path_factory.mktemp("service"), address)
    yield service
    service.stop()


@pytest.fixture(scope="module")
def alone(
    address: str, service: Service, tmp_path_factory: pytest.TempPathFactory
) -> Mapping[int, dict[str, object]]:
    """What verl's V0 logs by itself: the same in every run, while V1 draws its batches' order."""
    directory = tmp_path_factory.mktemp("alone") / "v0"
    run = VerlRun(directory, address, "v0", STEPS, (*WEIGHTED, *TWO_LOOPS), OFF)
    run.train()
    with service.session() as session:
        assert list(session.runs()) == [], "the plugin was off"
    return run.logged()


@pytest.mark.parametrize("trainer", ["v0", "v1"])
def test_a_training_is_reported_and_untouched(
    trainer: str,
    address: str,
    service: Service,
    alone: Mapping[int, Mapping[str, object]],
    tmp_path: Path,
) -> None:
    dumps = tmp_path / "dumps"
    overrides = (*WEIGHTED, *TWO_LOOPS, *precision_debugger(tmp_path, dumps))
    run = VerlRun(tmp_path / f"watched_{trainer}", address, trainer, STEPS, overrides)
    with run.started() as process:
        # The service dies in the middle of a step, and comes back when Ray has made it anew.
        eventually(lambda: service.stages(run.name, 3), SECONDS)
        service.kill("coordinator")
        run.finish(process)
    logged = run.logged()
    for step in range(1, STEPS + 1):
        expect_stages(service, run.name, step)
        expect_one_batch(service, run.name, step, "bfloat16" if trainer == "v1" else "float32")
        if trainer == "v0":
            own = untimed(alone[step])  # under a service, or not: verl's values are verl's
            assert {name: logged[step][name] for name in own} == own, f"step {step} is not verl's"
        # V1 subtracts probabilities in bfloat16, near 1 in steps of 2^-8.
        relative, absolute = (2e-4, 2e-6) if trainer == "v0" else (2**-7, 2**-8)
        expect_numbers(service, run.name, step, logged[step], relative, absolute)
    # What is not answered when verl logs is left out: the first of a new service, or of a dead one.
    assert any("per_round/round_1_abs_diff_mean" in logged[step] for step in (1, 2))
    expect_capture(service, run.name, dumps)
    expect_samples(service)
    with service.session() as session:
        assert list(session.losses(run.name)) == []
        eventually(lambda: session.attempts(run.name)[0]["state"] == "ended")
        (attempt,) = session.attempts(run.name)
        assert attempt["end_reason"] == "finished"  # verl's ranks, too: they do not report it
        assert list(session.findings(run.name, only="error")) == []
        assert attempt["fingerprint"]["packages"]["verl"]
        told = attempt["fingerprint"]["config"]["verl"]
        assert told["actor_rollout_ref.rollout.n"] == 4
        scalars = {row["name"]: row["value"] for row in session.step(2, run=run.name).scalars()}
        assert scalars["actor/grad_norm"] == logged[2]["actor/grad_norm"]


@pytest.mark.parametrize("trainer", ["v0", "v1"])
def test_bypass_mode_and_a_killed_training(
    trainer: str, address: str, service: Service, tmp_path: Path
) -> None:
    bypass = "algorithm.rollout_correction.bypass_mode=true"
    run = VerlRun(tmp_path / f"bypass_{trainer}", address, trainer, STEPS, (bypass,))
    with run.started():
        run.await_step(2)
    with run.started() as process:
        run.finish(process)
    with service.session() as session:
        second, first = session.attempts(run.name)
        assert (first["attempt"], second["attempt"]) == (1, 2)
        assert second["resumed_from_step"] in (1, 2, 3)
        assert second["fingerprint"]["config"]["verl"]["algorithm.adv_estimator"] == "gae"
        assert eventually(lambda: session.step(1, run=run.name, attempt=1).metrics())
        step = session.step(STEPS, run=run.name, attempt=2)
        metrics = eventually(lambda: _settled(step))
        assert (metrics.stage, metrics.about["pair"]) == ("actor_update", ["current", "rollout"])
        assert metrics["counts/tokens"] == metrics["counts/masked_tokens"] > 0
        assert metrics["counts/sequences"] == 16
    # What is not answered when verl logs is left out: a short step, on a busy machine.
    name = "training/rollout_probs_diff_mean"
    resumed = second["resumed_from_step"]
    logged = {step: row for step, row in run.logged().items() if step > resumed and name in row}
    assert logged
    for number, row in logged.items():
        with service.session() as session:
            metrics = session.step(number, run=run.name, attempt=2).metrics()
        assert row[name] == metrics[name], number
        assert row["per_round/total_rounds"] == 2


def precision_debugger(folder: Path, dumps: Path) -> tuple[str, ...]:
    config = folder / "config.json"
    config.write_text(json.dumps({"task": "statistics", "level": "L1", "rank": [], "step": []}))
    block = "global_profiler.global_tool_config.precision_debugger"
    return (
        "global_profiler.tool=precision_debugger",
        "global_profiler.steps=[2]",
        f"global_profiler.save_path={dumps}",
        f"{block}.config_path={config}",
        f"{block}.stages=[{','.join(CAPTURED)}]",
        f"{block}.strict=true",
        "critic.profiler.enable=true",
        "actor_rollout_ref.actor.profiler.enable=true",
        "actor_rollout_ref.ref.profiler.enable=true",
    )


def expect_stages(service: Service, run: str, step: int) -> None:
    """Every stage, on every rank, in every part of it, at its step."""
    wanted = {(stage, ROLES.get(stage, "actor"), r, 0) for stage in FORWARD for r in (0, 1)}
    wanted |= {
        (stage, ROLES.get(stage, "actor"), rank, minibatch)
        for stage in UPDATES
        for rank in (0, 1)
        for minibatch in (0, 1)
    }
    wanted |= {("weight_sync", "actor", rank, 0) for rank in (0, 1)}
    wanted |= {("rollout_generate", "rollout", rank, 0) for rank in (0, 1)}
    wanted |= {(stage, "driver", 0, 0) for stage in ("actor_compute_log_prob", "compute_advantage")}

    # Where one rank's events arrive before another's, the other is `not begun` until its own do.
    rows: list[dict[str, object]] = []

    def seen() -> bool:
        rows[:] = service.stages(run, step)
        found = {(r["stage"], r["role"], r["rank"], minibatch(r)) for r in rows}
        return (
            len(rows) == len(found) and found == wanted and all(r["status"] == "ok" for r in rows)
        )

    with contextlib.suppress(AssertionError):  # the rows say more
        eventually(seen)
    assert [row for row in rows if row["status"] != "ok"] == []
    assert seen()
    with service.session() as session:
        by_step = {row["step"]: row for row in session.steps(run)}
        assert by_step[step]["lost"] == 0


def expect_one_batch(service: Service, run: str, step: int, dtype: str) -> None:
    with service.session() as session:
        metrics = eventually(lambda: _settled(session.step(step, run=run)))
        answer = session.step(step, run=run).metrics()
    assert (answer.stage, answer.about["role"]) == ("actor_compute_log_prob", "driver")
    assert answer.about["streams"]["old"]["dtypes"] == [dtype]
    assert answer.about["coverage"]["parts_counted"] == 1
    assert answer.about["coverage"]["duplicates_left_out"] == 0
    assert metrics["counts/sequences"] == 16
    assert metrics["per_round/total_rounds"] == 2


def expect_numbers(
    service: Service,
    run: str,
    step: int,
    own: Mapping[str, Any],
    relative: float,
    absolute: float,
) -> None:
    """The service's numbers are those that verl computes of the same batch, V1 in bfloat16.

    Where they came in time they stand in verl's log, beside its own.
    """
    with service.session() as session:
        ours = session.step(step, run=run).metrics()
        missing = [name for name in VERLS_OWN if name not in own]
        assert missing == []
        for name in VERLS_OWN:
            # verl sums in float32, and takes this one as a root of a difference of two means.
            power = 2 if name == "rollout_corr/rollout_is_std" else 1
            found, expected = ours[name] ** power, own[name] ** power
            # A mean log-prob of a sequence, between 2 and 4, stands in steps of 2^-6 in bfloat16.
            is_log = "log_ppl" in name
            absolute_path = 4 * absolute if is_log else absolute
            # A perplexity is e to such a mean, and is rounded once more.
            relative_path = 2 * relative if "ppl" in name and not is_log else relative
            assert math.isclose(found, expected, rel_tol=relative_path, abs_tol=absolute_path), name
            if "per_round/round_1_abs_diff_mean" in own:
                assert own[f"stagescope/{name}"] == ours[name]


def expect_capture(service: Service, run: str, dumps: Path) -> None:
    def rows() -> Any:
        with service.session() as session:
            found = list(session.step(2, run=run).dumps())
        return found if found and all(row["state"] == "complete" for row in found) else None

    found = eventually(rows)
    collected = sorted((row["stage"], row["role"], row["rank"], minibatch(row)) for row in found)
    assert collected == sorted(
        (stage, ROLES.get(stage, "actor"), rank, part)
        for stage in CAPTURED
        for rank in (0, 1)
        for part in ((0, 1) if stage in UPDATES else (0,))
    )
    # verl's own debugger has stepped aside: nothing lies there but what is reported.
    assert len(list(dumps.rglob("dump.json"))) == len(found)
    for row in found:
        assert Path(row["path"]).is_relative_to(dumps)
        (dump,) = Path(row["path"]).rglob("dump.json")
        names = json.loads(dump.read_text())["data"]
        assert any("linear" in name for name in names)
        if row["stage"] in UPDATES:
            assert any("backward" in name for name in names)


def expect_samples(service: Service) -> None:
    """The ring holds the batch as verl had it."""
    ring = [
        file
        for file in (service.settings.data_path / "ring").rglob("*.safetensors")
        if {"rollout_log_probs", "old_log_probs", "versions"} <= set(load_file(file))
    ]
    assert ring
    for file in ring:
        held = load_file(file)
        assert held["response_mask"].shape == held["responses"].shape
        assert held["rollout_log_probs"].shape == held["old_log_probs"].shape
        assert set(held["response_mask"].flatten().tolist()) == {0, 1}


def minibatch(row: Any) -> int | None:
    """Return the mini-batch of a row's part, None of a rank that is `not begun`: it has no part."""
    part = row["part"]
    return None if part is None else int(part.split(".")[PART_FIELDS.index("minibatch")])


def _settled(step: Step) -> Any:
    found = step.metrics()
    return (
        found
        if found.about["coverage"]["payloads_pending"] == 0 and "counts/tokens" in found
        else None
    )
