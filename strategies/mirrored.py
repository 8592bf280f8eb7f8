"""MirroredStrategy: data parallelism."""

from __future__ import annotations

from collections.abc import Sequence

from tfpar.global_view import GlobalViewStrategy
from tfpar.mesh import Mesh
from tfpar.placement import Placement


class MirroredStrategy(GlobalViewStrategy):
    """Splits the batch over all devices and keeps a copy of every variable on each."""

    def __init__(self, devices: Sequence[str] | None = None):
        mesh = Mesh("data=-1", devices=devices)
        super().__init__(mesh, Placement(mesh))
