"""The interfaces that the integrations rely on, as recorded, and in the trainers' sources.

STAGESCOPE_TRAINER_SOURCES names a folder with checkouts or unpacked packages: the records are then
held to them, and always to the packages that are installed. See `tests.support.trainers.contracts`.
"""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Final

import pytest
from tests.support.trainers import contracts, verl_fakes
from tests.workers.integrations import test_nemo_rl, test_openrlhf, test_skyrl

from stagescope_workers.integrations.registry import INTEGRATIONS

OURS: Final = {"run", "attempt_key"}
"""What stagescope itself writes into verl's configuration."""

trainers = pytest.mark.parametrize("name", contracts.NAMES)


def test_every_trainer_has_a_contract() -> None:
    assert {*contracts.NAMES} == {each.name for each in INTEGRATIONS if each.tried is not None}


@trainers
def test_every_patch_is_of_a_recorded_function(name: str) -> None:
    contract = contracts.load(name)
    recorded = {*contract["functions"], *contract.get("older", ())}
    patched = {f"{each.module}:{each.path}" for each in contracts.patches_of(name)}
    assert patched
    assert patched <= recorded


@trainers
def test_every_option_that_is_read_is_recorded(name: str) -> None:
    """An option that a trainer renames differs from its sources, instead of being absent."""
    names = contracts.load(name)["names"].values()
    recorded = {
        word
        for each in names
        for words in each
        for word in ([words] if isinstance(words, str) else words)
    }
    assert contracts.options_read(name) - OURS <= recorded


@pytest.mark.parametrize(
    ("name", "fakes"),
    [("openrlhf", test_openrlhf), ("skyrl", test_skyrl), ("nemo-rl", test_nemo_rl)],
)
def test_the_fakes_are_as_recorded(name: str, fakes: ModuleType) -> None:
    assert contracts.fakes_differ(name, lambda _, path: contracts.at_path(fakes, path)) == []


def test_the_fakes_of_verl_are_as_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    modules = verl_fakes.fake_modules(verl_fakes.Seen(), monkeypatch)

    def find(module: str, path: str) -> object:
        # Both trainers share their fakes, which have V1's arguments.
        shared = path.startswith("RayPPOTrainer.")
        return None if shared else contracts.at_path(modules.get(module), path)

    assert contracts.fakes_differ("verl", find) == []


@trainers
def test_the_newest_version_that_was_tried_is_one_of_those_read(name: str) -> None:
    tried = next(each.tried for each in INTEGRATIONS if each.name == name)
    assert tried is not None
    read = [text.split()[0] for text in contracts.load(name)["read"]]
    assert any(version.startswith(tried.newest) for version in read)
    assert all(not tried.remark(name, version) for version in read)


@trainers
def test_the_sources_have_what_is_recorded(name: str) -> None:
    found = [*contracts.sources(name)]
    if not found:
        pytest.skip(f"needs {contracts.load(name)['repository']} installed, or a checkout")
    for root in found:
        assert contracts.differences(name, root) == [], root


def test_sources_that_differ_are_named(tmp_path: Path) -> None:
    """A function with other arguments, one that moved away, and an option of another name."""
    module = tmp_path / "openrlhf/trainer/ray/ppo_actor.py"
    module.parent.mkdir(parents=True)
    module.write_text(
        "from .elsewhere import helper\n"
        "class ActorPPOTrainer:\n"
        "    def ppo_train(self, other): ...\n"
        "    def broadcast_to_vllm(self): ...\n"
        "metrics = weights = policy_loss = vllm_kl = 0\n"
    )
    (module.parent / "elsewhere.py").write_text("def helper(one, *, two=2, **more): ...\n")
    options = tmp_path / "openrlhf/cli/train_ppo_ray.py"
    options.parent.mkdir(parents=True)
    options.write_text("'--algo.advantage.is_correction_level --algo.advantage.is_correction_kind'")
    told = contracts.differences("openrlhf", tmp_path)
    actor = "openrlhf.trainer.ray.ppo_actor:ActorPPOTrainer"
    assert f"{actor}.ppo_train has ['self', 'other'], recorded is ['self', 'kl_ctl']" in told
    assert any(line.startswith(f"{actor}.training_step has None") for line in told)
    assert not any("broadcast_to_vllm" in line or "vllm_kl" in line for line in told)
    cli = "openrlhf.cli.train_ppo_ray has no"
    assert f"{cli} is_correction_mode and no is_correction_type" in told
    assert not any("is_correction_level" in line for line in told)
    imported = "openrlhf.trainer.ray.ppo_actor:helper"
    assert contracts.of_source(tmp_path, imported) == ["one", "*", "two", "**more"]
