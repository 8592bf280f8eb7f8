"""The one caller of `tf.config`: which devices there are, logical CPU devices, start-up of accelerators and of clients.

Logical devices are fixed once TensorFlow has started, so everything here happens before the first tensor.
"""

from __future__ import annotations

import dataclasses
import faulthandler

import tensorflow as tf
from absl import logging
from tensorflow.experimental import dtensor

from tfpar import compat

START_TIMEOUT = 120.0
"""Seconds that a process waits for the others of its cluster."""


@dataclasses.dataclass
class _Started:
    accelerators: bool = False


_started = _Started()


def preferred_type() -> str:
    """The kind of device a mesh uses when nothing is said: "TPU", "GPU" or "CPU", the first that this machine has."""
    return dtensor.preferred_device_type()


def count(device_type: str) -> int:
    """How many devices of one kind TensorFlow has, or will have once started, over all clients.

    Args:
        device_type: "CPU", "GPU" or "TPU".

    Returns:
        The number of devices. It does not start TensorFlow.
    """
    return dtensor.num_local_devices(device_type) * dtensor.num_clients()


def use_logical_cpus(number: int) -> None:
    """Splits this machine's CPU into `number` logical devices, so that a mesh of that size fits on it.

    A strategy does this by itself. Call it at the top of a program that makes several strategies of different sizes.

    Args:
        number: logical devices to have in this process, at least 1.

    Raises:
        ValueError: `number` is not a positive whole number.
        RuntimeError: TensorFlow has started with fewer devices.

    Example:

    >>> import tfpar
    >>> tfpar.use_logical_cpus(8)
    """
    if not isinstance(number, int) or isinstance(number, bool) or number < 1:
        raise ValueError(f"use_logical_cpus takes a positive whole number of devices, got {number!r}.")
    have = dtensor.num_local_devices("CPU")
    if have >= number:
        return
    if compat.tensorflow_has_started():
        raise RuntimeError(
            f"TensorFlow has already started with {have} logical CPU device{'s' * (have != 1)}, but {number} are needed "
            f"and their number can no longer change. Call tfpar.use_logical_cpus({number}), or make the strategy, before "
            "the first tensor, model or other TensorFlow operation of the program (in a notebook: restart the kernel)."
        )
    cpu = tf.config.list_physical_devices("CPU")[0]
    tf.config.set_logical_device_configuration(cpu, [tf.config.LogicalDeviceConfiguration()] * number)


def prepare(device_type: str, number: int) -> list[str]:
    """Makes `number` devices of one kind ready, over all clients, and returns this client's names ("CPU:0", …).

    Args:
        device_type: "CPU", "GPU" or "TPU". GPU and TPU take this same path; neither has been run yet.
        number: devices of the mesh over all clients.

    Raises:
        ValueError: the machine has fewer devices, or the clients cannot share them evenly.
        RuntimeError: TensorFlow started before enough logical CPU devices were made.
    """
    clients = dtensor.num_clients()
    if number % clients:
        raise ValueError(
            f"The mesh has {number} devices, which {clients} processes cannot share evenly. "
            "Choose axis sizes whose product the number of processes divides."
        )
    local = number // clients
    if device_type == "CPU":
        use_logical_cpus(local)
    elif compat.tensorflow_has_started():
        _check_count(device_type, local)
    _start_accelerators(device_type)
    _check_count(device_type, local)
    return [f"{device_type}:{i}" for i in range(local)]


def _check_count(device_type: str, local: int) -> None:
    have = dtensor.num_local_devices(device_type)
    if have < local:
        raise ValueError(
            f"The mesh needs {local} {device_type} device{'s' * (local != 1)} in this process, but TensorFlow sees {have}. "
            "Choose smaller axis sizes, or device_type='CPU' to try the layout on logical CPU devices."
        )


def _start_accelerators(device_type: str) -> None:
    """Starts what DTensor needs beyond a single process on CPU, once."""
    clients = dtensor.num_clients()
    if _started.accelerators or (device_type == "CPU" and clients == 1):
        return
    if compat.tensorflow_has_started():
        raise RuntimeError(
            f"TensorFlow has already started, so {device_type} devices of {clients} process(es) can no longer be joined. "
            "Make the strategy before the first tensor, model or other TensorFlow operation."
        )
    if clients > 1:
        _wait_for_all_processes(device_type, clients)
    else:
        dtensor.initialize_accelerator_system(device_type)
    _started.accelerators = True


def _wait_for_all_processes(device_type: str, clients: int) -> None:
    """Joins the processes of DTENSOR_JOBS, or ends this one after `START_TIMEOUT`.

    TensorFlow itself waits an hour, and holds Python's lock meanwhile, so that no exception can be raised: only a watchdog
    outside Python's control is left, which says where this process stood and ends it.
    """
    logging.warning(
        "Waiting at most %.0f s for all %d processes of DTENSOR_JOBS=%s. If this process ends here, start all of them in "
        "that time, each with its own DTENSOR_CLIENT_ID, and with ports that nobody uses.",
        START_TIMEOUT,
        clients,
        ",".join(dtensor.jobs()),
    )
    faulthandler.dump_traceback_later(START_TIMEOUT, exit=True)
    try:
        dtensor.initialize_accelerator_system(device_type)
    finally:
        faulthandler.cancel_dump_traceback_later()


def host() -> str:
    """The name of this process' first CPU, where whole values are assembled and initial values are computed."""
    return f"/job:{dtensor.job_name()}/replica:0/task:{dtensor.client_id()}/device:CPU:0"
