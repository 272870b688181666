"""How the loops of this package are compiled.

Compiled code is cached on disk beside the sources. numba notices a changed file only for the
functions of that file, so a compiled function calls compiled functions of its own file alone.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba

Function = TypeVar("Function", bound=Callable[..., Any])


def exact(function: Function) -> Function:
    """Compile a loop that keeps the order of its sums and treats NaN and inf as IEEE 754 says."""
    return cast(Function, numba.njit(cache=True, error_model="numpy")(function))


def fused(function: Function) -> Function:
    """As `exact`, but a product may be fused with the addition that follows."""
    compiled = numba.njit(cache=True, error_model="numpy", fastmath={"contract"})
    return cast(Function, compiled(function))


def reduction(function: Function) -> Function:
    """Compile a sum over finite values: it may be reordered, so that it runs in vector lanes.

    Inputs must be finite (a NaN would be undefined); sums may still overflow to inf.
    """
    flags = {"reassoc", "contract", "nsz", "nnan"}
    return cast(Function, numba.njit(cache=True, error_model="numpy", fastmath=flags)(function))


def entry(*signatures: Any) -> Callable[[Function], Function]:
    """As `exact`, for these signatures alone; compiled, or loaded from disk, at the first call.

    One compiled form serves writable arrays and those of Ray's object store alike, and importing
    this package compiles nothing.
    """

    def decorate(function: Function) -> Function:
        @functools.cache
        def compiled() -> Callable[..., Any]:
            made = numba.njit(list(signatures), cache=True, error_model="numpy")(function)
            return cast("Callable[..., Any]", made)

        @functools.wraps(function)
        def call(*args: Any) -> Any:
            return compiled()(*args)

        return cast(Function, call)

    return decorate
