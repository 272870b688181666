"""The service's own keep policy: the configurations in the YAML file of its settings.

::

    every_n_steps: 10                  # one configuration, for every run
    what: [trajectories, loss]

or, where the first pattern that matches a run counts::

    runs:
      "qwen*": {every_n_steps: 10, what: [trajectories, is_loss, loss]}
      "*": {steps: [0], what: all}
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from pathlib import Path

from stagescope_service.rules.fields import load_yaml
from stagescope_wire.errors import InvalidInput, InvalidPlan
from stagescope_wire.keep import validate_keep
from stagescope_wire.plan import KeepSpec

KeepPolicy = Mapping[str, KeepSpec]
"""Pattern of runs -> a checked configuration, the first that matches counts."""


def parse_keep_policy(document: object) -> dict[str, KeepSpec]:
    """Return the configurations of a document.

    Raises:
        InvalidPlan: not such a document; the run's pattern is named.
    """
    runs: object = None
    if isinstance(document, Mapping) and "runs" not in document:
        runs = {"*": document}
    elif isinstance(document, Mapping) and len(document) == 1:
        runs = document["runs"]
    if not isinstance(runs, Mapping) or not all(isinstance(pattern, str) for pattern in runs):
        raise InvalidPlan(
            f"what runs are to keep is {document!r:.200}",
            expected="fields of a configuration, or runs: {pattern: fields}",
        )
    found = {}
    for pattern, fields in runs.items():
        try:
            found[pattern] = validate_keep(fields)
        except InvalidPlan as error:  # noqa: PERF203 - a handful
            raise InvalidPlan(f"of runs {pattern!r}: {error}") from error
    return found


def read_keep_policy(path: Path) -> dict[str, KeepSpec]:
    """Read the file of `STAGESCOPE_KEEP`.

    Raises:
        InvalidInput: it cannot be read.
        InvalidPlan: not such a document.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(
            f"what is to be kept in {path} cannot be read: {error}",
            expected="a YAML file",
            advice="see STAGESCOPE_KEEP",
        ) from error
    return parse_keep_policy(load_yaml(text))


def keep_policy_of(policies: KeepPolicy, run: str) -> KeepSpec | None:
    """Return the configuration of a run; None if no pattern matches it."""
    for pattern, keep in policies.items():
        if fnmatch.fnmatchcase(run, pattern):
            return keep
    return None
