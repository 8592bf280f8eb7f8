"""Mesh: devices in a grid with named axes.

`axis` is a mesh's, `dim` is a tensor's. The first axis varies slowest, so `data=2,model=2` puts the two devices of one
data shard side by side:

              model=0   model=1
    data=0    CPU:0     CPU:1
    data=1    CPU:2     CPU:3
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
from tensorflow.experimental import dtensor

from tfpar import compat, devices as device_lib

DATA = "data"
_AXIS = re.compile(r"^\s*([A-Za-z_]\w*)\s*=\s*(-?\d+)\s*$")


class Mesh:
    """Devices arranged in a grid whose axes have names and sizes.

    The axis named `data` splits the batch. Any other axis splits the dims of the variables that a layout names it for.

    Args:
        axes: `"data=2,model=2"`, a mapping `{"data": 2, "model": 2}`, or another `Mesh`. One size may be `-1`: what is
            left of the devices.
        devices: names such as `["CPU:0", "CPU:1"]`, one per grid cell, the last axis varying fastest. Left out: the
            first devices of `device_type`. CPU devices that do not exist yet are made (logical devices), unless
            TensorFlow has started.
        device_type: "CPU", "GPU" or "TPU"; left out: the first of TPU, GPU, CPU that the machine has. GPU and TPU
            have not been run yet.

    Raises:
        ValueError: a malformed or empty text, a name given twice, a size below 1, sizes that do not multiply to the
            number of devices, or a device that does not exist.

    Example:

    >>> mesh = tfpar.Mesh("data=2,model=2")
    >>> mesh.axes
    {'data': 2, 'model': 2}
    >>> mesh.size
    4
    """

    def __init__(
        self,
        axes: str | Mapping[str, int] | Mesh,
        *,
        devices: Sequence[str] | None = None,
        device_type: str | None = None,
    ):
        if isinstance(axes, Mesh):
            devices = axes._devices if devices is None else devices
            device_type = device_type or axes.device_type
            axes = axes.axes
        sizes = _parse(axes)
        self._devices = None if devices is None else _device_names(devices)
        self._device_type = _device_type(device_type, self._devices)
        self._axes = _fill(sizes, self._devices, self._device_type)
        if self._devices is not None and len(self._devices) != self.size:
            raise ValueError(
                f"The mesh {self} has {self._product()} = {self.size} cells, but {len(self._devices)} devices were given: "
                f"{', '.join(self._devices)}. Give as many devices as cells, or change the axis sizes."
            )

    @property
    def axes(self) -> dict[str, int]:
        """Axis names and their sizes, slowest axis first."""
        return dict(self._axes)

    @property
    def size(self) -> int:
        """The number of devices over all processes."""
        return math.prod(self._axes.values())

    @property
    def device_type(self) -> str:
        """ "CPU", "GPU" or "TPU"."""
        return self._device_type

    @property
    def data_size(self) -> int:
        """Into how many shards the batch is split: the size of the axis `data`, 1 where there is none."""
        return self._axes.get(DATA, 1)

    @property
    def devices(self) -> np.ndarray:
        """Device names in the shape of the grid (an array of str, one dim per axis).

        "CPU:0" in one process; with several processes "task:1/CPU:0", the process first.
        """
        local = [_short(name) for name in self.dtensor_mesh.local_devices()]
        clients = dtensor.num_clients()
        names = local if clients == 1 else [f"task:{task}/{name}" for task in range(clients) for name in local]
        return np.array(names, dtype=object).reshape(tuple(self._axes.values()))

    @functools.cached_property
    def dtensor_mesh(self) -> dtensor.Mesh:
        """TensorFlow's own mesh object. The first use makes the devices and starts TensorFlow."""
        dims = list(self._axes.items())
        local = device_lib.prepare(self._device_type, self.size) if self._devices is None else self._given_devices()
        compat.start_dtensor()
        if dtensor.num_clients() > 1:
            return dtensor.create_distributed_mesh(dims, local_devices=local, device_type=self._device_type)
        return dtensor.create_mesh(dims, devices=local)

    def submesh(self, **indices: int) -> Mesh:
        """The devices at one index of some axes, as a mesh of the other axes.

        Args:
            **indices: axis name to index along it.

        Returns:
            A mesh without those axes. Of a mesh whose axes are all given, a mesh of one device, `data=1`.

        Raises:
            ValueError: an axis that the mesh lacks, or an index outside it.

        Example:

        >>> tfpar.Mesh("data=2,model=4").submesh(data=1).axes
        {'model': 4}
        """
        for axis, index in indices.items():
            if axis not in self._axes:
                raise ValueError(f"The mesh {self} has no axis {axis!r}; it has {', '.join(self._axes)}.")
            if not 0 <= index < self._axes[axis]:
                raise ValueError(f"Axis {axis!r} of the mesh {self} has indices 0 to {self._axes[axis] - 1}, got {index}.")
        if dtensor.num_clients() > 1:
            raise NotImplementedError("A sub-mesh of a mesh over several processes is not supported yet.")
        grid = self.devices[tuple(indices.get(axis, slice(None)) for axis in self._axes)]
        rest = {axis: size for axis, size in self._axes.items() if axis not in indices} or {DATA: 1}
        return Mesh(rest, devices=list(np.ravel(grid)))

    def layout(self, spec: Iterable[str | None]) -> dtensor.Layout:
        """TensorFlow's layout object for one axis name, or None for not split, per dim of a tensor."""
        specs = [dtensor.UNSHARDED if axis is None else axis for axis in spec]
        return dtensor.Layout(specs, self.dtensor_mesh)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Mesh):
            return NotImplemented
        return (self.axes, self._devices, self._device_type) == (other.axes, other._devices, other._device_type)

    def __hash__(self) -> int:
        return hash((tuple(self._axes.items()), tuple(self._devices or ()), self._device_type))

    def __str__(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self._axes.items())

    def __repr__(self) -> str:
        return f"Mesh({str(self)!r}, device_type={self._device_type!r})"

    def _product(self) -> str:
        return " × ".join(str(size) for size in self._axes.values())

    def _given_devices(self) -> list[str]:
        highest = max(int(name.rsplit(":", 1)[1]) for name in self._devices) + 1
        if self._device_type == "CPU":
            device_lib.use_logical_cpus(highest)
        have = dtensor.num_local_devices(self._device_type)
        if highest > have:
            missing = [name for name in self._devices if int(name.rsplit(":", 1)[1]) >= have]
            raise ValueError(
                f"The mesh {self} names {', '.join(missing)}, but TensorFlow sees {have} {self._device_type} "
                f"device{'s' * (have != 1)}. Name devices that exist."
            )
        return list(self._devices)


def _parse(axes: str | Mapping[str, int]) -> dict[str, int]:
    """The axis sizes of a text or a mapping, -1 left as it is."""
    if isinstance(axes, str):
        pairs = [_AXIS.match(part) for part in axes.split(",")]
        if not all(pairs):
            raise ValueError(f'A mesh is written like "data=2,model=2", got {axes!r}.')
        pairs = [(match[1], int(match[2])) for match in pairs]
    elif isinstance(axes, Mapping):
        pairs = list(axes.items())
    else:
        raise ValueError(f'A mesh is given as "data=2,model=2", a dict of axis sizes or a Mesh, got {type(axes).__name__}.')
    names = [name for name, _ in pairs]
    for name, size in pairs:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"A mesh axis is named like a Python variable, got {name!r} in {axes!r}.")
        if names.count(name) > 1:
            raise ValueError(f"The mesh {axes!r} names the axis {name!r} twice. Give each axis one size.")
        if not isinstance(size, (int, np.integer)) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(f"The axis {name!r} has the size {size!r}; a size is 1 or more, or -1 for what is left.")
    if not pairs:
        raise ValueError('A mesh needs at least one axis, for example "data=2".')
    return {name: int(size) for name, size in pairs}


def _fill(sizes: dict[str, int], devices: list[str] | None, device_type: str) -> dict[str, int]:
    """Replaces -1 by what is left of the devices."""
    open_axes = [axis for axis, size in sizes.items() if size == -1]
    if not open_axes:
        return sizes
    text = ",".join(f"{axis}={size}" for axis, size in sizes.items())
    if len(open_axes) > 1:
        raise ValueError(f"The mesh {text} leaves {' and '.join(open_axes)} open; only one axis may be -1.")
    others = math.prod(size for size in sizes.values() if size != -1)
    have = device_lib.count(device_type) if devices is None else len(devices)
    if have % others:
        raise ValueError(
            f"The mesh {text} cannot use all {have} {device_type} devices: the other axes take {others}, which does not "
            f"divide {have}. Change the axis sizes, or name the devices to use."
        )
    return {axis: have // others if size == -1 else size for axis, size in sizes.items()}


def _device_names(devices: Sequence[str]) -> list[str]:
    if not isinstance(devices, (list, tuple)) or not devices:
        raise ValueError(f'devices is a list of names such as ["CPU:0", "CPU:1"], got {devices!r}.')
    names = [_short(name) for name in devices]
    doubled = sorted({name for name in names if names.count(name) > 1})
    if doubled:
        raise ValueError(f"A mesh uses each device once, but {', '.join(doubled)} was given more than once.")
    return names


def _short(name: str) -> str:
    """ "CPU:0" for any of TensorFlow's ways to write it."""
    match = re.search(r"(?:^|device:|/)([A-Za-z]+):(\d+)$", str(name))
    if match is None:
        raise ValueError(f'A device is written like "CPU:0", got {name!r}.')
    return f"{match[1].upper()}:{match[2]}"


def _device_type(device_type: str | None, devices: list[str] | None) -> str:
    if devices is not None:
        types = sorted({name.split(":")[0] for name in devices})
        if len(types) != 1 or (device_type and device_type.upper() != types[0]):
            raise ValueError(f"A mesh has devices of one kind, got {', '.join(types)} with device_type={device_type!r}.")
        return types[0]
    chosen = (device_type or device_lib.preferred_type()).upper()
    if chosen not in ("CPU", "GPU", "TPU"):
        raise ValueError(f"device_type is 'CPU', 'GPU' or 'TPU', got {device_type!r}.")
    return chosen
