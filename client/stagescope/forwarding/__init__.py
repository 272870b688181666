"""Forward what the service knows of a run into trackers: `stagescope forward`, `Session.forward`.

`records` reads closed steps and findings from the API. `trackers` and `traces` write them with each
tool's own client. `forwarder` decides what to write and when, and remembers it.
"""

from __future__ import annotations

from typing import Final

PREFIX: Final = "stagescope/service/"
"""Integrations also write under `stagescope/` in a trainer's log, but never these names.
TensorBoard would merge two series of one name, and W&B has one axis for a name."""
