"""Threads that carry out a schedule, one per device or sub-mesh, and what they hand to each other."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Hashable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import Any

from tfpar.pipeline.schedules import Action, Schedule, in_order

LIMIT = 600.0  # seconds in which some stage must end an action


class StageError(RuntimeError):
    """A stage failed, and the step with it. `__cause__` is what it raised."""


class Mailbox:
    """Results on their way from one stage to another.

    Args:
        limit: the seconds after which a wait ends if nothing has arrived anywhere.
    """

    def __init__(self, limit: float = LIMIT):
        self._limit, self._changed = limit, threading.Condition()
        self._items: dict[Hashable, Any] = {}
        self._aborted, self._moved = False, time.monotonic()

    def put(self, key: Hashable, item: Any) -> None:
        """Hands something over."""
        with self._changed:
            self._items[key], self._moved = item, time.monotonic()
            self._changed.notify_all()

    def take(self, key: Hashable) -> Any:
        """Waits for something and removes it.

        Raises:
            Aborted: another stage failed.
            TimeoutError: nothing has arrived anywhere within the limit.
        """
        with self._changed:
            while key not in self._items:
                if self._aborted:
                    raise Aborted
                left = self._moved + self._limit - time.monotonic()
                if left <= 0:
                    raise TimeoutError(f"No stage has ended an action for {self._limit:.0f} seconds; waiting for {key}.")
                self._changed.wait(left)
            return self._items.pop(key)

    def check(self) -> None:
        """Raises TimeoutError where nothing has arrived anywhere for longer than a wait lasts."""
        if time.monotonic() > self._moved + self._limit + 5.0:
            raise TimeoutError(f"No stage has ended an action for {self._limit:.0f} seconds; a device does not answer.")

    def abort(self) -> None:
        """Ends all waits."""
        with self._changed:
            self._aborted = True
            self._changed.notify_all()


class Aborted(Exception):
    """Another stage failed, and this one stops."""


class Workers:
    """A thread for each device of a schedule, kept from step to step.

    Args:
        count: how many.
    """

    def __init__(self, count: int):
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"tfpar-pipeline-{i}") for i in range(count)]

    def each(self, count: int, work: Callable[[int], Any], mailbox: Mailbox) -> list[Any]:
        """Calls `work` with the numbers below `count`, each on its thread, and returns when all have ended.

        Args:
            count: of devices.
            work: what a device does.
            mailbox: what they wait for; aborted where one fails.

        Returns:
            What each returned.

        Raises:
            Exception: what the first to fail has raised.
        """

        def guarded(device: int) -> Any:
            with _aborting(mailbox):
                return work(device)

        with _aborting(mailbox):
            futures = [thread.submit(guarded, device) for device, thread in enumerate(self._threads[:count])]
            while wait(futures, timeout=1.0).not_done:
                mailbox.check()
        failures = [error for future in futures if (error := future.exception()) is not None]
        for error in sorted(failures, key=lambda error: isinstance(error, (Aborted, TimeoutError))):
            raise error
        return [future.result() for future in futures]

    def carry_out(self, schedule: Schedule, act: Callable[[int, Action], None], mailbox: Mailbox) -> None:
        """Carries out a schedule, each device in its own order and on its own thread."""

        def work(device: int) -> None:
            for action in schedule.actions[device]:
                act(device, action)

        self.each(schedule.devices, work, mailbox)


def carry_out_in_turn(schedule: Schedule, act: Callable[[int, Action], None], mailbox: Mailbox) -> None:
    """The same on the caller's thread, for the first step, in which functions are made."""
    with _aborting(mailbox):
        for device, action in in_order(schedule):
            act(device, action)


@contextlib.contextmanager
def _aborting(mailbox: Mailbox) -> Iterator[None]:
    try:
        yield
    except BaseException:
        mailbox.abort()
        raise
