"""Starts the servers of a local cluster as copies of one process, so that TensorFlow is imported once.

    python -P launcher.py 1234

A line of JSON on standard input starts a server: {"tf_config": "…", "log": "a file"}. The file gets what the server says
and, once that is over, how it ended. All servers end where the input ends, or the process 1234 that wrote it.

A process may be copied while it has one thread, which TensorFlow's import leaves it with; what has threads of its own
(servers, sessions, devices) is made in the copies.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import traceback
from pathlib import Path

if __package__ in (None, ""):  # run as a file
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # NumPy's library of linear algebra starts threads when it is imported
    sys.path.insert(0, str(Path(__file__).parent))
    import server

    sys.path.pop(0)
else:
    from tfpar.servers import server

CHECK_SECONDS = 0.5  # between looks at whether the parent is there


def become_server(tf_config: str, log: str, parent: int) -> None:
    """Runs the server in a copy of the launcher and does not return."""
    code = 1
    try:
        with open(log, "w") as said:
            os.dup2(said.fileno(), 1)
            os.dup2(said.fileno(), 2)
        os.environ["TF_CONFIG"] = tf_config
        server.run(parent)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(parent: int) -> None:
    """Starts servers as told, until there is nobody to tell."""
    import tensorflow  # noqa: F401  the copies have it

    logs: dict[int, str] = {}

    def note_ends(*_: object) -> None:
        while logs:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            with open(logs.pop(pid), "a") as log:
                log.write(f"{server.ENDED} {os.waitstatus_to_exitcode(status)}\n")

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # an interrupt is meant for the program that trains
    launcher, told = os.getpid(), b""
    while os.getppid() == parent:
        note_ends()
        if not select.select([0], [], [], CHECK_SECONDS)[0]:
            continue
        if not (more := os.read(0, 65536)):
            break
        *lines, told = (told + more).split(b"\n")
        for line in lines:
            task = json.loads(line)
            pid = os.fork()
            if not pid:
                become_server(task["tf_config"], task["log"], launcher)
            logs[pid] = task["log"]
    for pid in logs:
        os.kill(pid, signal.SIGKILL)
    for pid in logs:
        os.waitpid(pid, 0)


if __name__ == "__main__":
    serve(int(sys.argv[1]))
