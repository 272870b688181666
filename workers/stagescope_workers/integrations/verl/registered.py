"""Replacing methods that verl registers with its single controller.

`register` puts two layers round a worker's method: one reads futures, one fetches a KVBatchMeta's
tensors (and takes the output back). A stage belongs inside both: it works on tensors, and neither
its time nor its dump shall hold the transport. So the layers are taken off and put on again.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any, Final

Function = Callable[..., Any]

_LAYERS: Final = ("single_controller/base/decorator.py", "utils/transferqueue_utils.py")


def inside(wrap: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Return `wrap` for registered methods: what it returns is registered as the method was.

    The returned function raises LookupError where a method was not registered, or as another
    version of verl does it.
    """

    def rewrap(method: Function) -> Function:
        from verl.single_controller.base.decorator import MAGIC_ATTR, register  # pyright: ignore[reportMissingImports]

        attributes = getattr(method, MAGIC_ATTR, None)
        if not isinstance(attributes, dict):
            raise LookupError("the method is not registered with the single controller")
        inner = _peel(method)
        replacement = functools.wraps(inner)(wrap(inner))
        known = inspect.signature(register).parameters
        options = {name: value for name, value in attributes.items() if name in known}
        if set(options) != set(attributes):
            raise LookupError(f"registered with {sorted(attributes)}")
        registered: Function = register(**options)(replacement)
        return registered

    return rewrap


def outside(wrap: Callable[[Function], Function]) -> Callable[[Function], Function]:
    """Return `wrap` so that what it makes is known by the original's name."""

    def rewrap(function: Function) -> Function:
        return functools.wraps(function)(wrap(function))

    return rewrap


def _peel(method: Function) -> Function:
    layer: Any = method
    while hasattr(layer, "__wrapped__") and _is_layer(layer):
        layer = layer.__wrapped__
    return layer  # type: ignore[no-any-return]


def _is_layer(function: Any) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and code.co_filename.replace("\\", "/").endswith(_LAYERS)
