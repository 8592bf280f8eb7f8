"""Runs coordinator programs of parameter-server tests against real server processes; kills what is left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

TESTS = Path(__file__).parent
PREAMBLE = """
import collections, contextlib, os, sys, time, warnings
import keras
import numpy as np
import tensorflow as tf
from keras import layers
import tfpar
"""


def start(program: str, tf_config: str = "", **environment: str) -> subprocess.Popen:
    """Starts a coordinator program; `tf_config` is that of its cluster, empty for none."""
    variables = os.environ | {"TF_CPP_MIN_LOG_LEVEL": "3", "KERAS_BACKEND": "tensorflow", "PYTHONPATH": str(TESTS)}
    variables |= environment | {"TF_CONFIG": tf_config}
    command = [sys.executable, "-u", "-c", PREAMBLE + textwrap.dedent(program)]
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    return subprocess.Popen(command, env=variables, start_new_session=True, text=True, **pipes)


def finish(process: subprocess.Popen, timeout: float = 240.0) -> str:
    """Waits for a program, which may not fail, and returns its standard output."""
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        end(process)
        out, err = process.communicate()
        raise AssertionError(f"The program took longer than {timeout} s. It said:\n{out[-2000:]}\n{err[-3000:]}") from None
    assert process.returncode == 0, f"{out[-2000:]}\n{err[-4000:]}"
    return out


def run(program: str, tf_config: str = "", timeout: float = 240.0, **environment: str) -> str:
    """Runs a coordinator program to its end and returns its standard output."""
    process = start(program, tf_config, **environment)
    try:
        return finish(process, timeout)
    finally:
        end(process)


def end(process: subprocess.Popen) -> None:
    """Kills a program and what it has started."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def read_until(process: subprocess.Popen, wanted: Callable[[str], bool]) -> list[str]:
    """Reads a program's lines until one is wanted, which is the last of those returned."""
    lines = []
    for line in process.stdout:
        lines.append(line.rstrip("\n"))
        if wanted(lines[-1]):
            return lines
    raise AssertionError(f"The program ended with {process.wait()}:\n{''.join(lines)}\n{process.stderr.read()[-3000:]}")
