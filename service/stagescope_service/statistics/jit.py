"""Decorators that compile the loops of this package.

An `entry` is cached on disk beside the sources, with everything that it calls. Only a change of the
cached function's own file makes numba discard a cache. Here the key covers the sources of all
compiled loops and the layout of a cell.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import pathlib
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeVar, cast

import numba
from llvmlite import ir
from numba.core import event
from numba.extending import intrinsic

_SOURCES: Final = (
    "jit", "cell", "segments", "exponentials", "blocks", "counts", "profile_bins", "profiles",
    "kept", "kernel", "pair_fields", "pair_blocks", "pairwise_kernel",
)  # fmt: skip
Function = TypeVar("Function", bound=Callable[..., Any])


def _loop(**flags: object) -> Callable[[Any], Any]:
    """Return numba's decorator for a loop that allocates nothing.

    Without its runtime numba counts no references to arrays. That took two atomic operations for
    each array of each call, a third of the kernel's time.
    """
    compile_loop: Any = numba.njit  # its annotations lack `_nrt`
    return cast("Callable[[Any], Any]", compile_loop(error_model="numpy", _nrt=False, **flags))


def exact(function: Function) -> Function:
    """Compile a loop that keeps the order of its sums and follows IEEE 754 for NaN and inf."""
    return cast(Function, _loop()(function))


def inlined(function: Function) -> Function:
    """Compile like `exact`, into each caller.

    A call passes seven words for each array, and a tuple of arrays as all its words. In the kernel
    such calls took a tenth of the time.
    """
    return cast(Function, _loop(forceinline=True)(function))


def allocating(function: Function) -> Function:
    """Compile like `exact`, with the right to make arrays."""
    return cast(Function, numba.njit(error_model="numpy")(function))


def fused(function: Function) -> Function:
    """Compile like `exact`, but a product may be fused with a subsequent addition."""
    return cast(Function, _loop(fastmath={"contract"})(function))


def reduction(function: Function) -> Function:
    """Compile a sum over finite values that may be reordered, so that it vectorizes.

    Inputs must be finite (a NaN would be undefined); sums may still overflow to inf.
    """
    flags = {"reassoc", "contract", "nsz", "nnan"}
    return cast(Function, _loop(fastmath=flags)(function))


def _of_two(name: str) -> Callable[[float, float], float]:
    """Return LLVM's intrinsic `name` of two float64.

    LLVM 20 and later does not vectorize the extremes of a loop that are written as comparisons.
    """

    def typed(context: object, a: object, b: object) -> tuple[Any, Callable[..., Any]]:
        def emit(context: object, builder: Any, signature: object, pair: object) -> Any:
            double = ir.DoubleType()
            function = ir.FunctionType(double, [double, double])
            return builder.call(builder.module.declare_intrinsic(name, [double], function), pair)

        return numba.float64(numba.float64, numba.float64), emit

    return cast("Callable[[float, float], float]", intrinsic(typed))


least = _of_two("llvm.minnum")
"""The smaller of two finite numbers, for a `reduction`."""
most = _of_two("llvm.maxnum")
"""The larger of two finite numbers, for a `reduction`."""


def _prefetch(context: Any, raw: object, at: object) -> tuple[Any, Callable[..., Any]]:
    def emit(context: Any, builder: Any, signature: Any, pair: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, pair[0])
        flag = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [array.data.type, flag, flag, flag])
        declared = builder.module.declare_intrinsic("llvm.prefetch", [array.data.type], kind)
        # Read it, keep it near, as data.
        builder.call(declared, [builder.gep(array.data, [pair[1]]), flag(0), flag(3), flag(1)])
        return context.get_dummy_value()

    void: Any = numba.void
    return void(raw, numba.int64), emit


prefetch = cast("Callable[[Any, int], None]", intrinsic(_prefetch))
"""Ask for the cache line of a value of an array before it is needed; it need not exist."""


def entry(*signatures: object, nogil: bool = False) -> Callable[[Function], Function]:
    """Compile like `exact`, for these signatures only, or load from disk, at the first call.

    With `nogil` it releases the GIL.

    One compiled form serves writable arrays and read-only ones of Ray's object store, and importing
    this package compiles nothing.
    """

    def decorate(function: Function) -> Function:
        @functools.cache
        def compiled() -> Callable[..., Any]:
            made: Any = numba.njit(cache=True, error_model="numpy", nogil=nogil)(function)
            # numba has no public way to declare further sources of a cached function.
            index = made._cache._cache_file
            index._source_stamp = (index._source_stamp, _sources_digest())
            for signature in signatures:
                made.compile(signature)
            made.disable_compile()
            return cast("Callable[..., Any]", made)

        @functools.wraps(function)
        def call(*args: object) -> Any:
            return compiled()(*args)

        return cast(Function, call)

    return decorate


def array_type(kind: object, ndim: int = 1, *, readonly: bool = False) -> Any:
    """Return numba's type of a C-contiguous array of `kind`, which numba does not annotate.

    A read-only type accepts both writable arrays and those of Ray's object store.
    """
    return numba.types.Array(kind, ndim, "C", readonly=readonly)


def input_type(kind: object, ndim: int = 1) -> Any:
    """Return numba's type of a read-only argument array."""
    return array_type(kind, ndim, readonly=True)


def tuple_type(*kinds: object) -> Any:
    """Return numba's type of a tuple of these types."""
    return numba.types.Tuple(kinds)  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def announced(compiling: Callable[[], None]) -> Iterator[None]:
    """Call `compiling` once before a loop is compiled in this block, not if it is cached."""
    with event.install_listener("numba:compile", _Announcer(compiling)):
        yield


class _Announcer(event.Listener):
    def __init__(self, compiling: Callable[[], None]) -> None:
        self._compiling: Callable[[], None] | None = compiling

    def on_start(self, event: object) -> None:
        """Announce the first compilation; loops that it calls compile within it."""
        announce, self._compiling = self._compiling, None
        if announce is not None:
            announce()

    def on_end(self, event: object) -> None:
        """Do nothing."""


@functools.cache
def _sources_digest() -> str:
    here = pathlib.Path(__file__).parent
    hashed = hashlib.blake2b(digest_size=16)
    for name in _SOURCES:
        hashed.update((here / f"{name}.py").read_bytes())
    return hashed.hexdigest()
