"""Iterators over what a coordinator reads."""

from __future__ import annotations

import threading

from tfpar.servers.input import ServedIterator


class SlowBatches:
    """An iterator whose end takes as long as the test lets it, as those of tf.data may."""

    def __init__(self, may_end: threading.Event, ended: threading.Event, ended_on: list[str]):
        self._may_end, self._ended, self._ended_on = may_end, ended, ended_on

    def __next__(self) -> int:
        return 1

    def __del__(self):
        self._may_end.wait(timeout=10)
        self._ended_on.append(threading.current_thread().name)
        self._ended.set()


class Source:
    steps_per_epoch = None

    def __init__(self, batches: SlowBatches):
        self._batches = [batches]

    def batches(self) -> SlowBatches:
        return self._batches.pop()


def test_dropping_an_iterator_does_not_wait_for_its_end():
    may_end, ended, ended_on = threading.Event(), threading.Event(), []
    iterator = ServedIterator(Source(SlowBatches(may_end, ended, ended_on)))
    assert next(iterator) == 1
    del iterator
    assert not ended_on
    may_end.set()
    ended.wait(timeout=10)
    assert ended_on == ["tfpar-iterators"]
