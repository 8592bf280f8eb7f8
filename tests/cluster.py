"""Runs one program in several processes on loopback ports and collects what each prints; kills what is left."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import textwrap


def free_ports(number: int) -> list[int]:
    """Ports that nobody listens on now."""
    sockets = [socket.socket() for _ in range(number)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


def run_clients(program: str, clients: int, timeout: float = 180.0) -> list[str]:
    """Runs `program` as DTensor clients, none of which may fail, and returns each one's standard output."""
    for code, _, err in (ended := end_clients(program, clients, timeout)):
        assert code == 0, err[-3000:]
    return [out for _, out, _ in ended]


def end_clients(program: str, clients: int, timeout: float = 180.0) -> list[tuple[int, str, str]]:
    """Runs `program` as DTensor clients and returns each one's exit code, standard output and error output.

    Raises:
        subprocess.TimeoutExpired: a client did not end within `timeout` seconds.
    """
    jobs = ",".join(f"127.0.0.1:{port}" for port in free_ports(clients))
    processes = []
    for client in range(clients):
        environment = os.environ | {
            "TF_CPP_MIN_LOG_LEVEL": "3",
            "DTENSOR_CLIENT_ID": str(client),
            "DTENSOR_NUM_CLIENTS": str(clients),
            "DTENSOR_JOBS": jobs,
            "DTENSOR_JOB_NAME": "worker",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, "-c", textwrap.dedent(program)],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
        )
    try:
        outputs = [process.communicate(timeout=timeout) for process in processes]
        return [(process.returncode, *output) for process, output in zip(processes, outputs)]
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
