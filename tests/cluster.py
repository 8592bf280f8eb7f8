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
    """Runs `program` as DTensor clients and returns each one's standard output.

    Raises:
        AssertionError: a client failed or did not end within `timeout` seconds, with the end of its error output.
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
        outputs = []
        for process in processes:
            out, err = process.communicate(timeout=timeout)
            assert process.returncode == 0, err[-3000:]
            outputs.append(out)
        return outputs
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait()
