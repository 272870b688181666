"""The interfaces that the integrations rely on, as recorded, and in the trainers' sources.

STAGESCOPE_TRAINER_SOURCES names a folder with a checkout of each repository (by its name, such as
SkyRL): the record is then held to it. Nothing of the sources is imported.
"""

from __future__ import annotations

import ast
import importlib
import json
import os
import re
from pathlib import Path
from typing import Any, Final

import pytest

from stagescope_workers.integrations.registry import integration

CONTRACTS: Final[dict[str, Any]] = json.loads(
    Path(__file__).with_name("fakes").joinpath("contracts.json").read_text()
)
MORE_CALLS: Final = {
    "nemo_rl.algorithms.grpo_sync",
    "nemo_rl.algorithms.ppo",
    "nemo_rl.models.policy.lm_policy",
}
"""Modules whose functions are patched by name alone: their arguments are handed on as they are."""


def sources(name: str) -> Path:
    root = os.environ.get("STAGESCOPE_TRAINER_SOURCES")
    path = Path(root or "/nowhere") / str(CONTRACTS[name]["repository"]).rpartition("/")[2]
    if not path.is_dir():
        pytest.skip(f"needs {CONTRACTS[name]['repository']} below STAGESCOPE_TRAINER_SOURCES")
    return path


def parameters(tree: ast.Module, path: str) -> list[str] | None:
    body: list[ast.stmt] = tree.body
    *holders, name = path.split(".")
    for holder in holders:
        body = next(n.body for n in body if isinstance(n, ast.ClassDef) and n.name == holder)
    for node in body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name == name:
            return [each.arg for each in (*node.args.args, *node.args.kwonlyargs)]
    return None


@pytest.mark.parametrize("name", CONTRACTS)
def test_every_patch_is_of_a_recorded_function(name: str) -> None:
    found = integration(name)
    assert found is not None
    patches = importlib.import_module(found.module).patches()
    recorded = CONTRACTS[name]["functions"]
    patched = {f"{each.module}:{each.path}" for each in patches if each.module not in MORE_CALLS}
    assert patched <= {*recorded}


@pytest.mark.parametrize("name", CONTRACTS)
def test_the_sources_have_the_recorded_functions(name: str) -> None:
    root = sources(name)
    found = integration(name)
    assert found is not None
    for function, recorded in CONTRACTS[name]["functions"].items():
        module, _, path = function.partition(":")
        tree = ast.parse((root / module.replace(".", "/")).with_suffix(".py").read_text())
        assert parameters(tree, path) == recorded, function
    for patch in importlib.import_module(found.module).patches():
        tree = ast.parse((root / patch.module.replace(".", "/")).with_suffix(".py").read_text())
        assert parameters(tree, patch.path) is not None, str(patch)


@pytest.mark.parametrize("name", CONTRACTS)
def test_the_sources_have_the_recorded_names(name: str) -> None:
    root = sources(name)
    for module, names in CONTRACTS[name]["names"].items():
        text = (root / module.replace(".", "/")).with_suffix(".py").read_text()
        missing = [each for each in names if not re.search(rf"\b{each}\b", text)]
        assert not missing, f"{module}: {missing}"
