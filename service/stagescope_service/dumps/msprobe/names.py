"""What msprobe's name of a record says.

* APIs (L1, mix): `{Functional|Torch|Tensor|NPU|Distributed|...}.{api}.{call}.{forward|backward}`
* modules (L0, mix): `Module.{path}.{Class}.{forward|backward}.{call}`,
  `Module.{path}.{Class}.parameters_grad.{call}`
* debug: `{name}.{call}.debug`, with the gradient as `{name}_grad.{call}.debug`
"""

from __future__ import annotations

import re
from typing import Final, NamedTuple

__all__ = ["OperatorName", "forward_name", "parse_name"]

_MODULE: Final = re.compile(
    r"(?P<kind>Module|Cell)\.(?:(?P<operator>.+)\.)?(?P<module_class>[^.]+)"
    r"\.(?P<direction>forward|backward|parameters_grad)\.(?P<call>\d{1,9})\Z"
)
_API: Final = re.compile(
    r"(?P<kind>[^.]+)\.(?P<operator>.+)\.(?P<call>\d{1,9})\.(?P<direction>forward|backward)\Z"
)
_DEBUG: Final = re.compile(r"(?P<operator>.+)\.(?P<call>\d{1,9})\.(?P<direction>debug)\Z")


class OperatorName(NamedTuple):
    """A name taken apart; what it does not say is None."""

    kind: str | None
    operator: str
    module_class: str | None
    call: int | None
    direction: str | None


def parse_name(name: str) -> OperatorName:
    """Take a name apart; one of an unknown form is an operator of no kind."""
    for pattern, kind in ((_MODULE, None), (_API, None), (_DEBUG, "Debug")):
        found = pattern.match(name)
        if found is not None:
            said = found.groupdict()
            return OperatorName(
                said.get("kind") or kind,
                said["operator"] or "",
                said.get("module_class"),
                int(said["call"]),
                said["direction"],
            )
    return OperatorName(None, name, None, None, None)


def forward_name(name: str) -> str:
    """Return the name of the forward call that a backward call belongs to, else `name`."""
    if name.endswith(".backward"):
        return name.removesuffix(".backward") + ".forward"
    return re.sub(r"\.backward(\.\d{1,9})\Z", r".forward\1", name)
