"""When a worker may start a step, and which results make an update. Data, which `loops.py` follows.

async    a worker that is free takes the next batch; each result is an update
bounded  the same, but a worker starts its step n only when every live worker has ended its step n - k - 1
         (stale synchronous parallel: Ho et al., NIPS 2013)
sync     every batch is cut into parts, one per worker; the sum of their gradients is the update, that of one device
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

NAMES = ("async", "sync", "bounded")


@dataclasses.dataclass(frozen=True)
class Mode:
    """How workers keep step.

    Args:
        name: "async", "sync" or "bounded".
        staleness: for "bounded", the k above; 0 or more.
        backup_workers: for "sync", how many workers take no part of their own, but repeat those that are late; the first
            result counts (Chen et al., arXiv 1604.00981, where late gradients are dropped; here none is).

    Raises:
        ValueError: an unknown name, or an option of another mode.
    """

    name: str = "async"
    staleness: int | None = None
    backup_workers: int = 0

    def __post_init__(self):
        if self.name not in NAMES:
            raise ValueError(f"mode is one of {', '.join(map(repr, NAMES))}; got {self.name!r}.")
        if (self.staleness is not None) != (self.name == "bounded"):
            raise ValueError(
                'staleness goes with mode="bounded", which needs it: how many steps the fastest worker may be ahead of the '
                f"slowest; got mode={self.name!r}, staleness={self.staleness}."
            )
        if self.staleness is not None and (not isinstance(self.staleness, int) or self.staleness < 0):
            raise ValueError(f"staleness is a number of steps, 0 or more; got {self.staleness!r}.")
        if not isinstance(self.backup_workers, int) or self.backup_workers < 0:
            raise ValueError(f"backup_workers is a number of workers, 0 or more; got {self.backup_workers!r}.")
        if self.backup_workers and self.name != "sync":
            raise ValueError(f'backup_workers goes with mode="sync"; got mode={self.name!r}.')

    def may_start(self, worker: int, clocks: Mapping[int, int]) -> bool:
        """Whether a worker may start its next step.

        Args:
            worker: its number.
            clocks: how many steps each live worker has ended.
        """
        return self.staleness is None or clocks[worker] - min(clocks.values()) <= self.staleness
