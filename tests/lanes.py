"""Which test files run when: `pytest --lane NAME`, as the Makefile's targets do."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
DURATIONS: Final = ROOT / "tests/durations.json"
"""File -> seconds of an earlier run; `pytest --record-durations` writes it."""
QUICK_SECONDS: Final = 1.0

LANE_OF: Final = {
    "tests": "test",  # make test
    # Real clusters, databases and kills take ten minutes; one of them walks a whole story.
    "tests/integration": "ray",
    "tests/integration/test_story.py": "test",
    # Restarts have a limit in seconds: nothing runs beside it.
    "tests/integration/test_faults.py": "alone",
    # Whole trainings: of the examples, with Ray, Lightning, Hugging Face's Trainer and TRL.
    "tests/examples": "long",
    "tests/examples/attach": "ray",
    "tests/examples/countdown/test_train_on_ray.py": "ray",
    "tests/examples/test_tutorial.py": "ray",
    "tests/workers/integrations/test_trl.py": "long",
    "tests/workers/integrations/test_trl_async.py": "long",
    # Real engines and models: llama.cpp, transformers, CTranslate2.
    "tests/workers/consistency": "long",
    "tests/workers/bisect/test_command.py": "long",
    "tests/workers/bisect/test_transformers_model.py": "long",
    # msprobe in processes of their own: DDP, FSDP, models of three families; its own comparison.
    "tests/workers/capture/test_processes.py": "long",
    "tests/workers/capture/test_shards.py": "long",
    "tests/service/compare/operators/test_evidence.py": "long",
    "tests/service/views/operators/test_layouts.py": "long",
    "tests/service/compare/operators/test_tensors.py": "long",
    # Real trackers, a real kernel for each notebook, a release in empty environments.
    "tests/client/forwarding/test_tensorboard.py": "long",
    "tests/client/forwarding/test_trackers.py": "long",
    "tests/client/test_notebooks.py": "long",
    "tests/test_release.py": "long",
    # A trial of a device whole, on the host.
    "tests/tools/test_trial_device.py"
    "::test_a_trial_on_the_host_passes_and_writes_its_figures": "long",
    # The page, the guide and reports in a browser, but for one way through them.
    "tests/test_site.py::test_a_browser_searches_it_and_asks_nobody_else": "long",
    "tests/service/compare/test_html_in_browser.py": "long",
    "tests/service/figures/test_in_browser.py": "long",
    "tests/service/http/test_behind_a_proxy.py": "long",
    "tests/service/http/test_page.py": "long",
    "tests/service/http/test_page.py::test_from_the_runs_to_the_tokens_and_back": "test",
    "tests/service/http/test_run_list_page.py": "long",
    "tests/service/http/test_hangs_page.py": "long",
    "tests/service/http/test_routing_page.py": "long",
    "tests/service/report/test_report.py::test_it_can_be_read_without_network": "long",
    "tests/client/test_top.py": "long",
    # Sizes: many ranks, steps, calls.
    "tests/service/compare/operators/test_sequences.py"
    "::test_a_hundred_thousand_calls_with_a_few_edits_are_aligned_in_order": "long",
    "tests/service/coordinator/test_memory.py": "long",
    "tests/service/core/test_steps.py::test_memory_stays_bounded_over_a_long_training": "long",
    "tests/service/report/test_report.py"
    "::test_a_long_run_of_many_ranks_stays_below_5_megabytes": "long",
    # Whole bundles, journals of catalogues that are damaged, order of rules in many trainings.
    "tests/service/report/bundle": "long",
    "tests/service/coordinator/test_journal.py": "long",
    "tests/service/coordinator/test_conformance.py": "long",
    "tests/service/rules/test_order.py": "long",
    "tests/service/rules/test_attempts.py": "long",
    "tests/service/rules/test_doctor.py::test_a_planted_fault_is_found": "long",
    "tests/service/rules/benchmark/test_benchmark.py"
    "::test_the_figures_are_those_of_the_documentation": "long",
    # Many cases of what single cases show: requests, layouts, trainings that go wrong.
    "tests/service/http/test_round_trips.py": "long",
    "tests/service/http/test_openapi.py"
    "::test_generated_requests_are_answered_as_documented": "long",
    "tests/service/rules/test_turns.py::test_turns_that_vary_are_none_that_stop": "long",
    # What SQLite shows already, on PostgreSQL.
    "tests/service/http/test_recorded_answers.py"
    "::test_the_same_events_are_answered_alike_from_postgresql": "long",
    # Real verl, in an environment of its own.
    "tests/verl": "verl",
    # A real vLLM, whose process has an environment of its own.
    "tests/vllm": "vllm",
}
"""Folder, file or test -> its lane; the longest counts."""

LOWEST_RAY: Final = (
    "tests/integration/test_clusters.py",
    "tests/integration/test_compare_tasks_over_ray.py",
    "tests/integration/test_probe_over_ray.py",
    "tests/integration/test_writers.py",
    "tests/examples/countdown/test_train_on_ray.py",
)
"""Of the lane `ray`, what calls much of its interface: the others differ in what they ask."""
NOT_LOWEST: Final = (
    "tests/client/agents",
    "tests/deploy",
    "tests/examples/countdown/test_false_alarms.py",
    "tests/service/figures/test_in_browser.py",
    "tests/service/http/test_behind_a_proxy.py",
    "tests/service/http/test_hangs_page.py",
    "tests/service/http/test_page.py",
    "tests/service/http/test_routing_page.py",
    "tests/service/http/test_run_list_page.py",
    "tests/service/compare/operators/test_evidence.py",
    "tests/service/compare/test_html_in_browser.py",
    "tests/service/core",
    "tests/service/rules",
    "tests/test_structure.py",
)
"""What no version of a library can break, at length: our state machine, rules, and the browser."""

LANES: Final = ("quick", "test", "long", "ray", "alone", "verl", "vllm", "lowest", "lowest-ray")


def has(lane: str, path: str) -> bool:
    """Return whether any test of a file runs in a lane; its path is from the project's root."""
    return is_in(lane, path) or any(is_in(lane, each) for each in _single_tests(path))


def is_in(lane: str, name: str) -> bool:
    """Return whether a test runs in a lane; the name is its file's, or pytest's of the test."""
    path = name.partition("::")[0]
    own = next(LANE_OF[each] for each in _around(name) if each in LANE_OF)
    if lane == "quick":
        return own == "test" and durations().get(path, 0.0) < QUICK_SECONDS
    if lane == "lowest":
        return own in ("test", "long") and not any(each in NOT_LOWEST for each in _around(path))
    if lane == "lowest-ray":
        return path in LOWEST_RAY
    return own == lane


def _around(name: str) -> list[str]:
    """Return a test without its parameters, its file and its folders, the longest first."""
    path = name.partition("::")[0]
    return [name.partition("[")[0], path, *(str(each) for each in Path(path).parents)]


def _single_tests(path: str) -> list[str]:
    return [each for each in LANE_OF if each.startswith(f"{path}::")]


@functools.cache
def durations() -> dict[str, float]:
    """Return file -> seconds of an earlier run."""
    found: dict[str, float] = json.loads(DURATIONS.read_text()) if DURATIONS.exists() else {}
    return found
