"""Which processes a cluster has and which of them this one is, from TF_CONFIG or a resolver, checked.

Imports nothing of this package and not Keras, because every server process reads it: see `server.py`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from typing import Any

EXAMPLE = (
    '{"cluster": {"chief": ["host0:2222"], "worker": ["host1:2222"], "ps": ["host2:2222"]}, '
    '"task": {"type": "chief", "index": 0}}'
)
JOBS = ("chief", "worker", "ps")


@dataclasses.dataclass(frozen=True)
class Cluster:
    """The addresses of a cluster's processes.

    Attributes:
        jobs: for "worker" and "ps", and "chief" if it has an address, the addresses, such as "127.0.0.1:2222".
        job: what this process is.
        index: which of those.

    Raises:
        ValueError: a job is missing or unknown, an address has no port or is used twice, or there is no such task.
    """

    jobs: Mapping[str, tuple[str, ...]]
    job: str = "chief"
    index: int = 0

    def __post_init__(self):
        unknown = [job for job in self.jobs if job not in JOBS]
        if unknown:
            raise ValueError(f"A cluster of parameter servers has the jobs {', '.join(JOBS)}; got {unknown[0]!r}.")
        for job in ("worker", "ps"):
            if not self.jobs.get(job):
                raise ValueError(f"The cluster has no {job!r}; it needs at least one worker and one ps, got {self}.")
        seen: dict[str, str] = {}
        for task, address in self.tasks:
            host, _, port = str(address).rpartition(":")
            if not host or not port.isdigit() or not 0 < int(port) < 65536:
                raise ValueError(f"The address of {task} is {address!r}, expected host:port, such as 'host1:2222'.")
            if address in seen:
                raise ValueError(f"{seen[address]} and {task} have one address, {address}; each process needs its own.")
            seen[address] = task
        count = len(self.jobs.get(self.job, ())) or (self.job == "chief")
        if not isinstance(self.index, int) or not 0 <= self.index < count:
            raise ValueError(
                f"This process is said to be {self.job} {self.index!r}, which is not in the cluster; it has "
                f"{', '.join(f'{len(found)} of {job}' for job, found in self.jobs.items())}."
            )

    @property
    def tasks(self) -> list[tuple[str, str]]:
        """A name such as "ps 0", and the address, of every process."""
        return [(f"{job} {i}", address) for job, found in self.jobs.items() for i, address in enumerate(found)]

    @property
    def address(self) -> str:
        """Of this process."""
        return self.jobs[self.job][self.index]

    def as_config(self, job: str, index: int) -> str:
        """The TF_CONFIG of one of its processes."""
        return json.dumps({"cluster": self.jobs, "task": {"type": job, "index": index}})

    def __str__(self) -> str:
        return ", ".join(f"{job}: {' '.join(map(str, found))}" for job, found in self.jobs.items()) or "no job at all"


def from_environment() -> Cluster:
    """The cluster that TF_CONFIG describes.

    Raises:
        ValueError: it is missing, no JSON, incomplete, or contradicts itself.
    """
    text = os.environ.get("TF_CONFIG", "")
    if not text:
        raise ValueError(
            "There is no cluster: the environment variable TF_CONFIG is not set and no cluster_resolver was given. Start "
            f"every process with TF_CONFIG, such as {EXAMPLE}, or use tfpar.local_cluster() on one machine."
        )
    try:
        config = json.loads(text)
        jobs, task = config["cluster"], config["task"]
        job, index = task["type"], task["index"]
        if any(isinstance(addresses, str) for addresses in jobs.values()):
            raise TypeError("the addresses of a job are a list, also where there is one")
        jobs = {name: tuple(addresses) for name, addresses in jobs.items()}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ValueError(
            f"TF_CONFIG is not as expected ({type(error).__name__}: {error}); got {text!r}, expected such as {EXAMPLE}."
        ) from error
    return Cluster(jobs, job, int(index) if isinstance(index, str) and index.isdigit() else index)


def from_resolver(resolver: Any) -> Cluster:
    """The cluster of a `tf.distribute.cluster_resolver.ClusterResolver`."""
    jobs = {job: tuple(addresses) for job, addresses in resolver.cluster_spec().as_dict().items()}
    return Cluster(jobs, resolver.task_type or "chief", resolver.task_id or 0)


def resolver(cluster: Cluster) -> Any:
    """The resolver that TensorFlow's strategy takes in the coordinator, which need not have an address."""
    import tensorflow as tf

    spec = tf.train.ClusterSpec({job: list(addresses) for job, addresses in cluster.jobs.items()})
    job, index = ("chief", cluster.index) if cluster.jobs.get("chief") else (None, None)
    simple = tf.distribute.cluster_resolver.SimpleClusterResolver
    return simple(spec, task_type=job, task_id=index, rpc_layer="grpc")
