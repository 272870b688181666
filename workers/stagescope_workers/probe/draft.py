"""The payload of one stage while it is recorded: tensors, strings and metadata, each owned."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Final

import numpy as np

from stagescope_wire.errors import InvalidInput, InvalidTensor, StagescopeError
from stagescope_wire.framing import WirePayload
from stagescope_wire.names import misspelt, misspelt_beside, misspelt_streams
from stagescope_wire.nonfinite import Json
from stagescope_wire.policy_versions import VERSION_NAMES, text_versions
from stagescope_wire.schema import SCHEMA
from stagescope_wire.tensors import (
    DTYPE_BYTES,
    PAYLOAD_STRINGS,
    PAYLOAD_TENSORS,
    PER_TOKEN,
    ROUTE_TENSORS,
    ROUTES_REFUSED,
    ROUTING_FLIPS,
    STREAM_TENSORS,
    WRITTEN_AFTER_HAND_OVER,
)
from stagescope_workers import routing
from stagescope_workers.device import (
    BorrowedTensor,
    HostCopy,
    PinnedPool,
    borrow_tensor,
    copy_tensor,
)
from stagescope_workers.payload import (
    Spec,
    WireTensor,
    describe,
    is_tensor_like,
    strings_from,
    wire_spec,
)

STREAM_NAMES: Final = (*STREAM_TENSORS.values(), "ref_log_prob")
_TENSOR_NAMES: Final = frozenset({*STREAM_NAMES, *PAYLOAD_TENSORS})
_FLOATS: Final = frozenset({"float64", "float32", "bfloat16", "float16"})
_BY_TOKEN: Final = frozenset({*PER_TOKEN, "tokens", "loss_mask", "input_ids", "attention_mask"})
_MAX_META_ITEMS: Final = 1000
_MAX_META_TEXT: Final = 10_000


class Draft:
    """Accumulates the arguments of `Stage.record`; the caller shares no memory with it."""

    def __init__(self, pool: PinnedPool) -> None:
        self._pool = pool
        self._tensors: dict[str, WireTensor | HostCopy | BorrowedTensor] = {}
        self._specs: dict[str, Spec] = {}
        self._strings: dict[str, list[str]] = {}
        self._meta: dict[str, object] = {}
        self._whole: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return bool(self._tensors or self._strings or self._meta)

    def add(
        self, values: Mapping[str, object], *, borrowed: bool = False
    ) -> Iterator[StagescopeError]:
        """Add `values`; yield an error for each that is invalid, and add the others.

        Args:
            values: names and values.
            borrowed: the caller does not write them any more: tensors on the host are not copied
                here.
        """
        for name, value in values.items():
            try:
                self._add(name, value, borrowed)
            except StagescopeError as error:  # noqa: PERF203 - the others are still added
                yield error
            except Exception as error:  # out of memory, or an unsupported kind of tensor
                yield InvalidInput(
                    f"{name} is {describe(value)} and could not be copied: {error!r:.300}",
                    expected="a tensor whose data can be read",
                )

    def _add(self, name: str, value: object, borrowed: bool) -> None:
        if value is None:
            return
        if name in self._tensors or name in self._strings:
            raise InvalidInput(
                f"{name} was recorded twice in one stage",
                expected="each name once in a stage",
                advice="give each piece a stage of its own, with microbatch= or minibatch=",
            )
        if name == "versions" and (named := text_versions(value)) is not None:
            self._tensors[name], names = named
            self._specs[name] = wire_spec(named[0])
            self._meta |= {VERSION_NAMES: names} if names else {}
            return
        # Names with one string per row come first: numpy arrays of objects are such lists.
        strings = strings_from(name, value)
        if strings is not None:
            self._strings[name] = strings
        elif name in _TENSOR_NAMES or is_tensor_like(value):
            copy = borrow_tensor if borrowed else copy_tensor
            tensor = self._tensors[name] = copy(name, value, self._pool)
            self._specs[name] = wire_spec(tensor) if isinstance(tensor, tuple) else tensor.spec
        else:
            self._meta[name] = plain(value)

    def specs(self) -> Mapping[str, Spec]:
        """Return the description of each tensor."""
        return self._specs

    def routes(self) -> list[str]:
        """Return the names of the recorded routes."""
        return [name for name in ROUTE_TENSORS if name in self._specs]

    def limit_routes(self, most: int) -> None:
        """Leave out the routes of a payload that has more than `most` bytes with them."""
        routes = self.routes()
        if routes and self.nbytes > most:
            size = sum(self._specs[name].nbytes for name in routes)
            for name in routes:
                del self._tensors[name], self._specs[name]
            self._meta[ROUTES_REFUSED] = (
                f"{', '.join(routes)} have {size} bytes, more than this process buffers: record "
                "them as uint8, or in smaller parts (microbatch=)"
            )

    def send_whole(self, names: Collection[str]) -> None:
        """Send these routes as they were recorded, too: they are kept. Of the others only counts
        are sent."""
        self._whole = frozenset(names)

    def copies(self) -> list[HostCopy]:
        """Return the tensors that a device is still writing."""
        return [item for item in self._tensors.values() if isinstance(item, HostCopy)]

    @property
    def nbytes(self) -> int:
        """Bytes of memory that this occupies until the payload's receipt."""
        texts = sum(sum(map(len, texts)) for texts in self._strings.values())
        return texts + sum(
            spec.nbytes + 8 * ((spec.rows or 0) + 1) for spec in self._specs.values()
        )

    @property
    def tokens(self) -> int:
        """The largest number of tokens of a tensor with one value per token; 0 without any."""
        shapes = (spec.shape for name, spec in self._specs.items() if name in _BY_TOKEN)
        return max(map(math.prod, shapes), default=0)

    def description(self, *, reported: bool = False) -> dict[str, Json]:
        """Return the PAYLOAD_FIELDS of an END event; see there for `reported`."""
        fields: dict[str, object] = {"reported": True} if reported else {}
        sent = {name: spec for name, spec in self._specs.items() if self._is_sent(name)}
        if len(sent) < len(self._specs) and (mask := sent.get("response_mask")) is not None:
            sent[ROUTING_FLIPS] = mask._replace(tag="int16")
        return fields | {
            "tensors": {
                name: [tag, list(shape), rows] for name, (tag, shape, rows) in sent.items()
            },
            "bytes": sum(spec.nbytes for spec in sent.values()),
            "meta": dict(self._meta),
        }

    def finish(self) -> WirePayload:
        """Return the payload in its wire form; waits for a device that still copies.

        A tensor that was written after it was handed over is omitted, and named in the metadata.
        """
        tensors: dict[str, WireTensor] = {}
        written = []
        for name, item in self._tensors.items():
            wire = item if isinstance(item, tuple) else item.finish()
            if wire is None:
                written.append(name)
            else:
                tensors[name] = wire
        meta = {**self._meta, **({WRITTEN_AFTER_HAND_OVER: written} if written else {})}
        try:
            counts = routing.count(tensors)
        except Exception as error:  # the other numbers do not depend on routes
            counts, meta[ROUTES_REFUSED] = {}, str(error)
        tensors = {name: wire for name, wire in tensors.items() if self._is_sent(name)} | counts
        return {"schema": SCHEMA, "tensors": tensors, "strings": dict(self._strings), "meta": meta}

    def problems(self) -> list[InvalidTensor]:
        """Return the errors between the tensors, by their shapes and dtypes alone."""
        specs = self._specs
        found = list(_wrong_dtypes(specs))
        streams = [name for name in STREAM_NAMES if name in specs]
        if self._lacks_mask():
            shapes = ", ".join(f"{name} {_form(specs[name])}" for name in streams)
            advice = "record it in the same stage: 1 = model token, 0 = anything else"
            for name, intended in self._misspelt():
                if intended == "response_mask":
                    advice = f"rename {name}, which no statistic reads, in stage.record"
            found.append(
                InvalidTensor(
                    f"response_mask is missing beside {shapes}",
                    expected=f"response_mask of the same shape as {streams[0]}",
                    advice=advice,
                )
            )
        found.extend(_wrong_shapes(specs))
        found.extend(self._wrong_ids(specs))
        found.extend(routing.problems(specs))
        return found

    def _is_sent(self, name: str) -> bool:
        return name not in ROUTE_TENSORS or name in self._whole

    def misspelt(self) -> Iterator[tuple[str, InvalidTensor]]:
        """Yield (name, error) for names that no statistic reads because of their spelling.

        A name that causes one of `problems` is mentioned there.
        """
        for name, intended in self._misspelt():
            if intended == "response_mask" and self._lacks_mask():
                continue
            yield (
                name,
                InvalidTensor(
                    f"{name} is kept, but no statistic reads it: there is no such name",
                    expected=f"{intended}, which is the closest",
                    advice="rename it in stage.record",
                ),
            )
        for name, known in misspelt_beside([*self._tensors, *self._strings]):
            yield (
                name,
                InvalidTensor(
                    f"{name} is kept beside {known}, and no statistic reads it: it looks like a "
                    f"misspelling of {known}",
                    expected=f"{known} alone, which is the closest name",
                    advice="leave it out of stage.record, or give it a name of its own",
                ),
            )
        for field in ("producers", "streams"):
            streams = self._meta.get(field)
            names = [*streams] if isinstance(streams, Mapping) else []
            for name, intended in misspelt_streams(names):
                advice = f"rename it there: until then {field} is ignored for that stream"
                if intended in names:
                    advice = f"remove it: {field} has {intended} too, which counts"
                yield (
                    f"{field}.{name}",
                    InvalidTensor(
                        f"{field} names {name:.100}, which is not a stream",
                        expected=f"{intended}, which is the closest",
                        advice=advice,
                    ),
                )

    def _misspelt(self) -> Iterator[tuple[str, str]]:
        return misspelt([*self._tensors, *self._strings])

    def _lacks_mask(self) -> bool:
        """Return whether there are streams to compare, and no mask for them."""
        streams = [name for name in STREAM_NAMES if name in self._specs]
        return len(streams) > 1 and "response_mask" not in self._specs

    def _wrong_ids(self, specs: Mapping[str, Spec]) -> Iterator[InvalidTensor]:
        rows = _row_count(specs)
        for name in PAYLOAD_STRINGS:
            ids = self._strings.get(name)
            if ids is not None and rows is not None and len(ids) != rows:
                yield InvalidTensor(f"{name} has {len(ids)} ids", expected=f"one per row: {rows}")


def _wrong_dtypes(specs: Mapping[str, Spec]) -> Iterator[InvalidTensor]:
    for name in STREAM_NAMES:
        if name in specs and specs[name].tag not in _FLOATS:
            yield InvalidTensor(
                f"{name} is {specs[name].tag}", expected=f"log-probs as one of {sorted(_FLOATS)}"
            )
    for name in ("responses", "positions", "round_ids", "turn_ids", "cu_seqlens"):
        if name in specs and specs[name].tag in _FLOATS:
            integers = sorted(set(DTYPE_BYTES) - _FLOATS - {"bool"})
            yield InvalidTensor(f"{name} is {specs[name].tag}", expected=f"one of {integers}")


def _wrong_shapes(specs: Mapping[str, Spec]) -> Iterator[InvalidTensor]:
    names = [name for name in PER_TOKEN if name in specs]
    reference = "response_mask" if "response_mask" in names else next(iter(names), None)
    if reference is None:
        return
    expected = specs[reference]
    packed = "cu_seqlens" in specs
    for name in names:
        spec = specs[name]
        if name == "responses" and expected.rows is None and spec.rows == expected.shape[0]:
            continue  # lists of token ids: the service pads them as the mask is
        if spec.shape != expected.shape or (spec.rows != expected.rows and not packed):
            yield InvalidTensor(
                f"{name} is {_form(spec)} and {reference} is {_form(expected)}",
                expected="the same rows and tokens in both",
            )


def _row_count(specs: Mapping[str, Spec]) -> int | None:
    if "cu_seqlens" in specs and len(specs["cu_seqlens"].shape) == 1:
        return specs["cu_seqlens"].shape[0] - 1
    for name in PER_TOKEN:
        if name in specs:
            spec = specs[name]
            if spec.rows is not None:
                return spec.rows
            return spec.shape[0] if len(spec.shape) == 2 else None
    return None


def _form(spec: Spec) -> str:
    rows = "" if spec.rows is None else f" in {spec.rows} rows"
    return f"{spec.tag}{list(spec.shape)}{rows}"


def plain(value: object, depth: int = 6) -> object:
    """Return `value` as built-in types, which every version of the service can read."""
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, str):
        return value[:_MAX_META_TEXT]
    if isinstance(value, np.generic):
        return value.item()
    if depth > 0 and isinstance(value, Mapping):
        items = list(value.items())[:_MAX_META_ITEMS]
        return {str(key): plain(item, depth - 1) for key, item in items}
    if depth > 0 and isinstance(value, list | tuple | set | frozenset):
        return [plain(item, depth - 1) for item in list(value)[:_MAX_META_ITEMS]]
    try:
        return describe(value) if hasattr(value, "shape") else str(value)[:_MAX_META_TEXT]
    except Exception:  # it is nested too deep, or its own code raises
        return f"a {type(value).__name__} that cannot be shown"
