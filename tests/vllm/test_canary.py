"""A training with a canary on a real vLLM and one planted fault, as its user sees it.

The doctor's first line names the cause. Its second line is a command, which proves it.
"""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any, Final, NamedTuple

import pytest
import torch
from tests.support.api import Service, service
from tests.support.command_line import invoke
from tests.support.coordinators import wait_for
from tests.support.engines.tiny_qwen import (
    BOS,
    EOS,
    MAX_LENGTH,
    VOCABULARY,
    Kind,
    merged,
    scaled,
    trained,
    write_variant,
)
from tests.support.engines.vllm_server import ADAPTER, NAME, VllmServer
from tests.vllm.conftest import Folders

import stagescope_workers
from stagescope_wire.canary import Canary
from stagescope_wire.engines import Sampling
from stagescope_wire.engines.registry import engine_name
from stagescope_workers.canary.after_syncs import WeightCanary
from stagescope_workers.canary.engine_arms import Question
from stagescope_workers.canary.engine_scorer import named
from stagescope_workers.canary.sequences import choose

SEQUENCES: Final = choose(VOCABULARY, avoid=[BOS, EOS], max_length=MAX_LENGTH - 1)
SICK: Final = 5
"""The first version with the fault; those before are healthy."""
STEP: Final = 0.02
"""Standard deviation of an update, relative to the tensor's own."""
Options = Mapping[str, Any]
WITH_ADAPTER: Final[Options] = {"adapter": ADAPTER, "base": NAME}


class Reported:
    """A probe that keeps its reports."""

    rank = 0
    step = None

    def __init__(self) -> None:
        self.found: list[Canary] = []

    @contextlib.contextmanager
    def guard(self, call: str, work: None) -> Iterator[None]:
        yield

    def report_canary(self, found: Canary, version: int, step: int | None) -> None:
        self.found.append(found)


class Policy:
    """A policy whose weights move a little with each version, the server of it, and its trainer.

    Args:
        server: the engine.
        base: the weights before the first version.
        folder: where the versions are written.
        adapter: directory of the adapter that is trained; None: all weights are.
    """

    def __init__(self, server: VllmServer, base: Path, folder: Path, adapter: Path | None) -> None:
        self.server = server
        self.adapter = adapter
        self.folder = folder
        self._versions = [base]
        self._healthy: list[tuple[Canary, Canary]] = []

    def weights(self, version: int) -> Path:
        """Return the directory of a version's weights, of the base where there is an adapter."""
        while len(self._versions) <= version:
            number = len(self._versions)
            change = trained(number, STEP)
            own = self.folder / f"version-{number}"
            self._versions.append(write_variant(self._versions[-1], own, change))
        return self._versions[version]

    def trainer(self, version: int) -> Any:
        """Return the trainer's model."""
        import transformers

        folder = self.weights(version)
        if self.adapter is not None:
            whole = self.folder / f"merged-{version}"
            folder = whole if whole.exists() else write_variant(folder, whole, merged(self.adapter))
        auto: Any = transformers.AutoModelForCausalLM
        return auto.from_pretrained(folder, dtype=torch.bfloat16)

    def tokenizer(self) -> Any:
        """Return the trainer's tokenizer."""
        import transformers

        auto: Any = transformers.AutoTokenizer
        return auto.from_pretrained(self.server.model)

    @property
    def options(self) -> Options:
        """What the canary is told."""
        return {} if self.adapter is None else WITH_ADAPTER

    def healthy(self) -> list[tuple[Canary, Canary]]:
        """Return both sides of each healthy version; they are scored once for all faults."""
        for version in range(1 + len(self._healthy), SICK):
            probe = Reported()
            question = Question(SEQUENCES, **self.options)
            canary = WeightCanary(probe, question, [named(self.server.url)], 1)
            self.server.load_weights(self.weights(version))
            canary.after_sync(version)
            assert canary.wait()
            canary.score(version, self.trainer(version))
            engine, trainer = probe.found
            self._healthy.append((engine, trainer))
        return self._healthy


Plant = Callable[[Policy, int], AbstractContextManager[object]]
"""Syncs a version with a fault, which ends with the block."""


def serves(other: int | None = None, *, reset_cache: bool = True) -> Plant:
    """Have the engine serve the weights of another version; None: of this one."""

    def plant(policy: Policy, version: int) -> AbstractContextManager[None]:
        folder = policy.weights(version if other is None else other)
        return policy.server.weights(folder, reset_cache=reset_cache)

    return plant


RIGHT: Final = serves()


def one_tensor_not_synced(policy: Policy, version: int) -> AbstractContextManager[None]:
    """Have the engine keep one tensor of the version before."""
    change = trained(version, STEP, without="layers.1.mlp.down_proj")
    folder = policy.folder / f"one-old-{version}"
    return policy.server.weights(write_variant(policy.weights(version - 1), folder, change))


def scaled_expert(policy: Policy, version: int) -> AbstractContextManager[None]:
    """Have the engine scale one expert by 1.05."""
    change = scaled({"layers.1.mlp.experts.3.": 1.05})
    folder = policy.folder / f"scaled-{version}"
    return policy.server.weights(write_variant(policy.weights(version), folder, change))


@contextlib.contextmanager
def reloaded(policy: Policy, version: int) -> Iterator[None]:
    """Have vLLM reload the weights: the experts get a wrong layout."""
    with RIGHT(policy, version):
        policy.server.reload_weights(policy.weights(version))
        yield


@contextlib.contextmanager
def stale_cache(policy: Policy, version: int) -> Iterator[None]:
    """Sync the weights and leave the prefix cache as it was."""
    policy.server.load_weights(policy.weights(version - 1))
    engine = policy.server.connect()
    engine.generate(SEQUENCES.sharing, Sampling(max_tokens=1))
    with serves(reset_cache=False)(policy, version):
        yield


def with_fault(name: str, **arguments: object) -> Plant:
    """Sync the weights; something else is wrong with the engine."""

    @contextlib.contextmanager
    def plant(policy: Policy, version: int) -> Iterator[None]:
        with RIGHT(policy, version), policy.server.fault(name, **arguments):
            yield

    return plant


def sampler(**arguments: object) -> Plant:
    """The engine samples with other settings, and returns processed log-probs."""
    return with_fault("sampler", mode="processed_logprobs", **arguments)


def raw_sampler(**arguments: object) -> Plant:
    """The same, behind raw log-probs."""
    return with_fault("sampler", **arguments)


@contextlib.contextmanager
def adds_bos(policy: Policy, version: int) -> Iterator[None]:
    """The engine's tokenizer adds a BOS."""
    with RIGHT(policy, version), policy.server.adding_bos():
        yield


class Fault(NamedTuple):
    """A fault, and how a user sees it.

    Attributes:
        plant: see `Plant`.
        named: the rest of the doctor's first line, after the engine.
        proof: a part of what the printed command prints.
        kind: of the policy.
        has_adapter: whether the policy trains an adapter.
        has_tokenizer: whether the canary compares tokenizers.
        temperature: of the rollout's requests.
        found_in: the first version in which it is found.
    """

    plant: Plant
    named: str
    proof: str
    kind: Kind = "dense"
    has_adapter: bool = False
    has_tokenizer: bool = False
    temperature: float = 1.0
    found_in: int = SICK


TEMPERATURE: Final = "temperature: requested 1, the engine's is "
FAULTS: Final[Mapping[str, Fault]] = {
    "base-weights": Fault(
        serves(1), "serves its base weights, those of version 1", "has the log-probs of version 1"
    ),
    "not-synced": Fault(
        serves(SICK - 1), "serves old weights, those of version 4", "has the log-probs of version 4"
    ),
    "one-tensor-not-synced": Fault(
        one_tensor_not_synced, "does not have the trainer's weights", "trainer vs engine: 0.03",
    ),
    "scaled-expert": Fault(
        scaled_expert, "does not have the trainer's weights",
        # Below the rounding of bfloat16, but the same in two versions.
        "of the difference from the trainer is that of an earlier version", kind="moe",
        found_in=SICK + 1,
    ),
    "reloaded-experts": Fault(
        reloaded, "does not have the trainer's weights", "trainer vs engine: ", kind="moe",
    ),
    "stale-cache": Fault(
        stale_cache, "reuses a prefix cache of earlier weights", "cached vs uncached: 0.0"
    ),
    "base-for-adapter": Fault(
        with_fault("base_for_adapters", on=True),
        "answers with the base model instead of the adapter",
        "adapter vs base: 0 nat on average over", has_adapter=True,
    ),
    "temperature": Fault(
        sampler(temperature=0.7), "samples at temperature 0.7, and 1 was requested",
        f"{TEMPERATURE}0.7: ",
    ),
    "high-temperature": Fault(
        sampler(temperature=1.1), "samples at temperature 1.1, and 1 was requested",
        f"{TEMPERATURE}1.1: ",
    ),
    "another-than-requested": Fault(
        sampler(temperature=0.9), "samples at temperature 0.9, and 0.7 was requested",
        "temperature: requested 0.7, the engine's is 0.9: ", temperature=0.7,
    ),
    "raw-temperature": Fault(
        raw_sampler(temperature=0.7), "samples at a temperature of about 0.",
        f"{TEMPERATURE}about 0.",
    ),
    "top-p": Fault(
        sampler(top_p=0.9), "samples with top_p 0.9, which was not requested",
        "truncation: requested no cut, the engine's is as with top_p 0.9",
    ),
    "raw-top-k": Fault(
        raw_sampler(top_k=10), "samples with top_k 10, which was not requested",
        "truncation: requested no cut, the engine's is as with top_k 10",
    ),
    "bos": Fault(
        adds_bos,
        "tokenises texts unlike the trainer: the engine has 0 in front of the trainer's tokens",
        "tokenizer: the engine has 0 in front of the trainer's tokens", has_tokenizer=True,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    with service(tmp_path_factory.mktemp("service")) as running:
        yield running


Policies = Callable[[Kind, bool], Policy]


@pytest.fixture(scope="module")
def policies(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Policies:
    @cache
    def made(kind: Kind, has_adapter: bool) -> Policy:
        server: VllmServer = request.getfixturevalue(kind)
        folders: Folders = request.getfixturevalue(f"{kind}_folders")
        adapter = folders.adapter if has_adapter else None
        return Policy(server, folders.base, tmp_path_factory.mktemp(kind), adapter)

    return made


def train(
    live: Service, policy: Policy, run: str, plant: Plant, last: int = SICK, **options: Any
) -> None:
    """Train for healthy versions, and then with a fault up to the version `last`."""
    healthy = policy.healthy()
    assert live.tokens is not None
    url, token = live.server.url, live.tokens.operate
    with stagescope_workers.init(run, attempt_key="a", url=url, token=token) as probe:
        for version, sides in enumerate(healthy, 1):
            for side in sides:
                probe.report_canary(side, version, version)
        canary = probe.canary(
            engine=policy.server.url, sequences=SEQUENCES, **policy.options, **options
        )
        for version in range(SICK, last + 1):
            with plant(policy, version):
                canary.after_sync(version, version)
                assert canary.wait()
            canary.score(version, policy.trainer(version), version)

    def is_judged() -> bool:
        rows = live.get("/canary", run=run)["rows"]
        pairs = [pair["verdict"] for pair in rows[0]["pairs"]] if rows else []
        return len(rows) == last and pairs[:1] not in ([], ["not compared"])

    wait_for(is_judged)


def typed(live: Service, command: str) -> list[str]:
    """Return what a command prints."""
    done = invoke(*shlex.split(command, comments=True), env=live.environment())
    assert done.exit_code == 0, done.output
    return done.stdout.splitlines()


@pytest.mark.parametrize("name", FAULTS)
def test_the_doctor_names_a_fault_and_its_command_proves_it(
    name: str, live: Service, policies: Policies
) -> None:
    fault = FAULTS[name]
    policy = policies(fault.kind, fault.has_adapter)
    tokenizer = policy.tokenizer() if fault.has_tokenizer else None
    options = {"tokenizer": tokenizer, "temperature": fault.temperature}
    train(live, policy, name, fault.plant, fault.found_in, **options)
    first, second, *_ = typed(live, f"doctor {name}")
    engine = engine_name(policy.server.url)
    assert first.startswith(f"Engine {engine} {fault.named}")
    assert first.endswith(f", since step {fault.found_in}, in 1 of 1 version")
    before, proof = second.split("stagescope ")
    assert before == "  prove it: "
    printed = " ".join(" ".join(typed(live, proof)).split())
    assert fault.proof in printed


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_healthy_training(kind: Kind, live: Service, policies: Policies) -> None:
    train(live, policies(kind, False), f"healthy-{kind}", RIGHT, SICK + 1)
    assert typed(live, f"doctor healthy-{kind}")[0].startswith("Nothing is wrong")
