"""The layout table of a model: what each device holds, as text and as rows."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from typing import Any

import keras
import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import collectives, compat, transfer
from tfpar.collectives import Collective


@dataclasses.dataclass(frozen=True)
class Row:
    """One variable.

    Attributes:
        kind: "weight", "state" (not trained: statistics, seeds) or "slot" (of the optimizer).
        path: the Keras path.
        shape: all dims, before splitting.
        dtype: such as "float32".
        layout: per dim the axis that splits it, or None.
        bytes: of the whole variable.
        device_bytes: of the part that each device holds.
        reason: the layout rule that matched, or why there is none.
        owner: for a slot, the path of its weight; None for the optimizer's scalars.
        stages: the pipeline stages that hold it; empty without an axis `pipe`.
    """

    kind: str
    path: str
    shape: tuple[int, ...]
    dtype: str
    layout: tuple[str | None, ...]
    bytes: int
    device_bytes: int
    reason: str
    owner: str | None = None
    stages: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True)
class Description:
    """The variables of a model on a mesh; `str()` is a printable table.

    Attributes:
        title: model and strategy.
        rows: one per variable, in the model's order, the optimizer's after them.
        collectives: what devices send each other in a training step; empty before the first one. With pipeline stages,
            of one micro-batch and the update.
        stage_bytes: bytes that each device holds, by its index along the axis `pipe`; empty without it.
    """

    title: str
    rows: tuple[Row, ...]
    collectives: tuple[Collective, ...] = ()
    stage_bytes: tuple[int, ...] = ()

    @property
    def bytes(self) -> int:
        """Bytes of all variables, each counted once."""
        return sum(row.bytes for row in self.rows)

    @property
    def device_bytes(self) -> int:
        """Bytes of variables that each device holds; with pipeline stages, the one that holds most."""
        return max(self.stage_bytes, default=sum(row.device_bytes for row in self.rows))

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __str__(self) -> str:
        slots: dict[str | None, list[Row]] = {}
        for row in self.rows:
            if row.kind == "slot":
                slots.setdefault(row.owner, []).append(row)
        lines = [_HEADER, *(_cells(row, slots.get(row.path, [])) for row in self.rows if row.kind != "slot")]
        rest = slots.get(None, [])
        if rest:
            lines.append((f"optimizer: {len(rest)} scalars", "", "", "replicated", *_sizes([], rest), ""))
        own = [row for row in self.rows if row.kind != "slot"]
        lines.append(("total", "", "", f"{len(self.rows)} variables", *_sizes(own, sum(slots.values(), [])), ""))
        widths = [max(len(line[i]) for line in lines) for i in range(len(_HEADER))]
        text = [_join(line, widths) for line in lines]
        rule = "-" * max(map(len, text))
        held = ", ".join(map(size_text, self.stage_bytes)) or size_text(self.device_bytes)
        each = "The devices of the stages hold" if self.stage_bytes else "Each device holds"
        footer = f"{each} {held} of {size_text(self.bytes)}."
        sent = [f"{number} {kind}s of {size_text(size)}" for kind, number, size in collectives.summary(self.collectives)]
        traffic = [f"A training step has {', '.join(sent)}."] if sent else []
        return "\n".join([self.title, rule, text[0], rule, *text[1:-1], rule, text[-1], footer, *traffic])

    __repr__ = __str__


_collectives: weakref.WeakKeyDictionary[keras.Model, tuple[Collective, ...]] = weakref.WeakKeyDictionary()
_HEADER = ("variable", "shape", "dtype", "layout", "whole", "per device", "slots per device", "why")


def describe(strategy: Any, model: keras.Model) -> Description:
    """Describes a built model and its optimizer, whose slots are made now if the model is compiled.

    Args:
        strategy: the strategy whose scope the model was made in.
        model: a model with variables.

    Returns:
        A `Description`. Layouts that depend on the whole model are decided now.

    Raises:
        ValueError: the model has no variables yet, or a layout rule does not fit it.
    """
    if not model.variables:
        raise ValueError(
            f"The model {model.name!r} has no variables yet, so there is nothing to describe. Build it first: give it an "
            "Input, call it on a batch, or call model.build(shape)."
        )
    strategy.check_owns(model)
    strategy.lay_out(model)
    weights = {id(variable) for variable in model.trainable_variables}
    rows = [_row("weight" if id(v) in weights else "state", v, strategy.placement.reason(model, v)) for v in model.variables]
    rows += _slots(model)
    title = f"{model.name} under {strategy!r}"
    pipeline = strategy.placement.pipeline
    if pipeline is None:
        return Description(title, tuple(rows), _collectives.get(model, ()))
    natives = [compat.native(v) for v in [*model.variables, *getattr(model.optimizer, "variables", ())]]
    rows = [dataclasses.replace(row, stages=_stages(native, pipeline)) for row, native in zip(rows, natives)]
    return Description(title, tuple(rows), _collectives.get(model, ()), _stage_bytes(natives, pipeline))


def _stages(native: Any, pipeline: Any) -> tuple[int, ...]:
    """The stages on the meshes that hold a copy of a variable."""
    held = [layout.mesh for layout in native.layouts]
    return tuple(s for s in range(pipeline.schedule.stages) if pipeline.mesh_of(s).dtensor_mesh in held)


def _stage_bytes(natives: list[Any], pipeline: Any) -> tuple[int, ...]:
    return tuple(
        sum(
            transfer.bytes_per_device(layout, tuple(native.shape), tf.as_dtype(native.dtype))
            for native in natives
            for layout in native.layouts
            if layout.mesh == mesh.dtensor_mesh
        )
        for mesh in pipeline.meshes
    )


def remember_collectives(model: keras.Model, found: tuple[Collective, ...]) -> None:
    """Keeps what a model's newest traced training step sends, for `describe`."""
    if found:
        _collectives[model] = found


def _slots(model: keras.Model) -> list[Row]:
    optimizer = getattr(model, "optimizer", None)
    if optimizer is None:
        return []
    if not optimizer.built:
        with model.distribute_strategy.scope():
            optimizer.build(model.trainable_variables)
    owners = {id(slot): weight.path for weight in model.trainable_variables for slot in compat.native(weight).followers}
    rows = []
    for variable in optimizer.variables:
        owner = owners.get(id(compat.native(variable)))
        row = _row("slot", variable, "optimizer state" if owner is None else "as its weight")
        rows.append(dataclasses.replace(row, owner=owner))
    return rows


def _row(kind: str, variable: keras.Variable, reason: str) -> Row:
    native = compat.native(variable)
    layout, dtype = native.layout, tf.as_dtype(native.dtype)
    shape = tuple(native.shape)
    return Row(
        kind=kind,
        path=variable.path,
        shape=shape,
        dtype=dtype.name,
        layout=tuple(None if axis == dtensor.UNSHARDED else axis for axis in layout.sharding_specs),
        bytes=native.shape.num_elements() * dtype.size,
        device_bytes=transfer.bytes_per_device(layout, shape, dtype),
        reason=reason,
    )


def _cells(row: Row, slots: list[Row]) -> tuple[str, ...]:
    layout = ", ".join(axis or "-" for axis in row.layout) if any(row.layout) else "replicated"
    if row.stages:
        layout += f" on stage {', '.join(map(str, row.stages))}"
    shape = " × ".join(str(dim) for dim in row.shape) or "scalar"
    return row.path, shape, row.dtype, layout, *_sizes([row], slots), row.reason


def _sizes(own: list[Row], slots: list[Row]) -> tuple[str, str, str]:
    whole, device = sum(row.bytes for row in own), sum(row.device_bytes for row in own)
    held = sum(row.device_bytes for row in slots)
    return tuple(size_text(number) if rows else "" for number, rows in ((whole, own), (device, own), (held, slots)))


def _join(cells: tuple[str, ...], widths: list[int]) -> str:
    """Text to the left, sizes to the right."""
    sizes = range(4, len(cells) - 1)
    parts = [cell.rjust(width) if i in sizes else cell.ljust(width) for i, (cell, width) in enumerate(zip(cells, widths))]
    return "  ".join(parts).rstrip()


def size_text(number: int) -> str:
    """A number of bytes in words: 1536 gives "1.5 KiB"."""
    size, units = float(number), ["B", "KiB", "MiB", "GiB", "TiB"]
    while size >= 1024 and len(units) > 1:
        size, units = size / 1024, units[1:]
    return f"{size:.0f} {units[0]}" if units[0] == "B" else f"{size:.1f} {units[0]}"
