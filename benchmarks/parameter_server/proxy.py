"""Workers and parameter servers behind TCP proxies that count what passes.

Started by `run.py`. Every address of the cluster is a proxy's; the server behind it listens on another port. So all that
goes to a worker or a server passes a proxy, with the answer to it. Nobody calls the coordinator: it fetches what it needs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys

CHUNK = 1 << 18


class CountedCluster:
    """Processes on 127.0.0.1, each behind a proxy; leaving the `with` block ends them.

    Args:
        workers: how many compute.
        ps: how many hold variables.
    """

    def __init__(self, workers: int, ps: int):
        tasks = [("worker", i) for i in range(workers)] + [("ps", i) for i in range(ps)]
        ports = free_ports(2 * len(tasks))
        known, real = ports[: len(tasks)], ports[len(tasks) :]
        addresses = [f"127.0.0.1:{port}" for port in known]
        self.cluster = {"worker": addresses[:workers], "ps": addresses[workers:]}
        self.tasks = [f"{job} {index}" for job, index in tasks]
        self._servers = []
        for (job, index), port in zip(tasks, real):
            about = json.dumps([self.cluster, job, index, port])
            self._servers.append(self._start("serve", about))
        for server in self._servers:
            server.stdout.readline()
        self._proxy = self._start("relay", json.dumps(list(zip(known, real))))
        self._proxy.stdout.readline()

    def bytes(self) -> dict[str, tuple[int, int]]:
        """For each worker and server the bytes that went to it and that came from it on its port, so far."""
        self._proxy.stdin.write("\n")
        self._proxy.stdin.flush()
        return dict(zip(self.tasks, map(tuple, json.loads(self._proxy.stdout.readline()))))

    def _start(self, *arguments: str) -> subprocess.Popen:
        command = [sys.executable, __file__, *arguments]
        return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def __enter__(self) -> CountedCluster:
        return self

    def __exit__(self, *error: object) -> None:
        for process in [*self._servers, self._proxy]:
            process.kill()
            process.wait()


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on now."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(socket.socket()) for _ in range(count)]
        for one in found:
            one.bind(("127.0.0.1", 0))
        return [one.getsockname()[1] for one in found]


def serve(cluster: dict[str, list[str]], job: str, index: int, port: int) -> None:
    """A TensorFlow server that listens on another port than the cluster says, until standard input ends."""
    import tensorflow as tf

    spec = tf.train.ClusterSpec(cluster).as_cluster_def()
    threads = tf.compat.v1.ConfigProto(inter_op_parallelism_threads=16)
    about = tf.train.ServerDef(
        cluster=spec, job_name=job, task_index=index, protocol="grpc", port=port, default_session_config=threads
    )
    server = tf.distribute.Server(about)
    print("ready", flush=True)
    sys.stdin.read()  # ends with the process that started this one
    del server
    os._exit(0)


async def relay(ports: list[tuple[int, int]]) -> None:
    """Listens on the first port of each pair, connects to the second, and answers every input line with the counts."""
    counts = [[0, 0] for _ in ports]

    async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter, count: list[int], way: int) -> None:
        with contextlib.suppress(OSError):
            while data := await source.read(CHUNK):
                count[way] += len(data)
                target.write(data)
                await target.drain()
        target.close()

    def meet(port: int, count: list[int]):
        async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                to_reader, to_writer = await asyncio.open_connection("127.0.0.1", port)
            except OSError:
                writer.close()
                return
            await asyncio.gather(copy(reader, to_writer, count, 0), copy(to_reader, writer, count, 1))

        return accept

    for (known, real), count in zip(ports, counts):
        await asyncio.start_server(meet(real, count), "127.0.0.1", known)
    print("ready", flush=True)
    loop = asyncio.get_running_loop()
    while await loop.run_in_executor(None, sys.stdin.readline):
        print(json.dumps(counts), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "serve":
        serve(*json.loads(sys.argv[2]))
    asyncio.run(relay(json.loads(sys.argv[2])))
