"""TRL's own GRPO with a real vLLM as its server, and a canary after each of its weight syncs.

Only the way of the weights is the test's: vLLM on CPU has no NCCL, so they go through files.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tests.support.coordinators import FakeCoordinator, FakeService, wait_for
from tests.support.engines.vllm_server import VllmServer
from tests.vllm.conftest import Folders

from stagescope_wire.canary import CACHED, DECODED, DECODED_SCORED, FIXED, UNCACHED, Arm, Canary
from stagescope_wire.engines import Sampling
from stagescope_workers.integrations.trl import grpo
from stagescope_workers.probe import handshake

pytest.importorskip("trl")
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:FutureWarning")  # TRL's own
STEPS = 3


class Generation:
    """TRL's `VLLMGeneration` in server mode; `skips` is the number of the sync that it forgets."""

    mode = "server"
    server: VllmServer
    folder: Path
    skips: int | None = None
    coordinator: FakeCoordinator

    def __init__(self, *, model: Any, **options: Any) -> None:
        self._model = model
        self._syncs = 0
        self.vllm_client = self

    @property
    def base_url(self) -> str:
        return self.server.url

    def get_server_info(self) -> dict[str, dict[str, str]]:
        return {"model_config": {"logprobs_mode": "processed_logprobs"}}

    def sync_weights(self) -> None:
        self._syncs += 1
        if self._syncs != self.skips:
            folder = self.folder / str(self._syncs)
            shutil.copytree(self.server.model, folder)
            self._model.save_pretrained(folder)
            self.server.load_weights(folder)

    def generate(self, prompts: list[list[int]], **options: Any) -> tuple[Any, ...]:
        engine = self.server.connect()
        found = engine.generate(prompts, Sampling(max_tokens=8, temperature=1.0))
        engine.close()
        # Steps of a real training take longer than a canary.
        wait_for(lambda: len(self.coordinator.of_kind("canary")) == 2 * self._syncs)
        log_probs = [[[value] for value in each.log_probs] for each in found]
        return None, [list(each.token_ids or ()) for each in found], log_probs, None


def difference(one: Arm, other: Arm) -> float:
    """Return the mean |d| of two arms in nats."""
    assert one.rows == other.rows
    parts = [np.abs(np.subtract(a, b)) for a, b in zip(one.log_probs, other.log_probs, strict=True)]
    return float(np.concatenate(parts).mean())


@pytest.fixture
def coordinator(monkeypatch: pytest.MonkeyPatch) -> FakeCoordinator:
    service = FakeService(FakeCoordinator())
    monkeypatch.setattr(handshake, "find_link", service.find)
    assert service.coordinator is not None
    return service.coordinator


@pytest.fixture
def patched(monkeypatch: pytest.MonkeyPatch) -> None:
    from trl.trainer.grpo_trainer import GRPOTrainer

    for patch in grpo.patches():
        name = patch.path.removeprefix("GRPOTrainer.")
        monkeypatch.setattr(GRPOTrainer, name, patch.wrap(vars(GRPOTrainer)[name]))


def trained(server: VllmServer, folders: Folders, directory: Path) -> Any:
    """Train for STEPS steps of one sync each."""
    import transformers
    from datasets import Dataset
    from trl.trainer.grpo_config import GRPOConfig
    from trl.trainer.grpo_trainer import GRPOTrainer

    auto: Any = transformers.AutoTokenizer
    model: Any = transformers.AutoModelForCausalLM
    arguments = GRPOConfig(
        output_dir=str(directory),
        max_steps=STEPS,
        per_device_train_batch_size=4,
        num_generations=2,
        max_completion_length=8,
        learning_rate=1e-2,
        use_vllm=False,
        use_cpu=True,
        bf16=False,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    arguments.use_vllm, arguments.vllm_mode = True, "server"
    tokenizer = auto.from_pretrained(folders.base)
    tokenizer.pad_token = tokenizer.eos_token
    trainer = GRPOTrainer(
        model=model.from_pretrained(folders.base, dtype=torch.float32),
        # Of the tokens, so that the rewards of a group differ and the weights change.
        reward_funcs=lambda completion_ids, **_: [float(sum(ids) % 97) for ids in completion_ids],
        args=arguments,
        train_dataset=Dataset.from_dict({"prompt": ["one", "two", "three", "four"]}),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


def test_each_sync_is_scored_by_both_sides(
    dense32: VllmServer,
    dense_folders: Folders,
    coordinator: FakeCoordinator,
    patched: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("STAGESCOPE_CANARY", "1")
    monkeypatch.setenv("STAGESCOPE_RUN", "trl-canary")
    monkeypatch.setattr("trl.trainer.grpo_trainer.VLLMGeneration", Generation)
    for name, value in {
        "server": dense32,
        "folder": tmp_path,
        "skips": 3,
        "coordinator": coordinator,
    }.items():
        monkeypatch.setattr(Generation, name, value, raising=False)
    trained(dense32, dense_folders, tmp_path / "out")
    wait_for(lambda: len(coordinator.of_kind("canary")) == 2 * STEPS)
    found: dict[int, dict[str, Canary]] = {}
    for event in coordinator.of_kind("canary"):
        assert event.fields["step"] == event.fields["policy_version"] + 1
        canary = Canary.parse(event.fields)
        found.setdefault(event.fields["policy_version"], {})[canary.side] = canary
    assert sorted(found) == [0, 1, 2]
    for version, sides in found.items():
        engine, trainer = sides["engine"], sides["trainer"]
        assert engine.problem == ""
        fixed = engine.arms[FIXED]
        own = dict(zip(trainer.arms[FIXED].rows, trainer.arms[FIXED].log_probs, strict=True))
        # The longest of the tokenizer's sequences is longer than this engine allows.
        assert len(fixed.rows) == len(own) - 1
        unlike = difference(Arm(fixed.rows, tuple(own[row] for row in fixed.rows)), fixed)
        # The third sync was forgotten; trained weights are larger than random ones.
        assert unlike > 0.01 if version == 2 else unlike < 1e-3, (version, unlike)
        assert difference(engine.arms[DECODED], engine.arms[DECODED_SCORED]) < 1e-4
        assert difference(engine.arms[CACHED], engine.arms[UNCACHED]) < 1e-4
    dense32.load_weights(dense_folders.base)
