"""The one caller of `tf.config`: which devices there are, logical CPU devices, start-up of accelerators and of clients.

Logical devices are fixed once TensorFlow has started, so everything here happens before the first tensor.
"""

from __future__ import annotations

import dataclasses

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import compat


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
    _start_accelerators(device_type)
    have = dtensor.num_local_devices(device_type)
    if have < local:
        raise ValueError(
            f"The mesh needs {local} {device_type} device{'s' * (local != 1)} in this process, but TensorFlow sees {have}. "
            "Choose smaller axis sizes, or device_type='CPU' to try the layout on logical CPU devices."
        )
    return [f"{device_type}:{i}" for i in range(local)]


def _start_accelerators(device_type: str) -> None:
    """Starts what DTensor needs beyond a single process on CPU, once."""
    if _started.accelerators or (device_type == "CPU" and dtensor.num_clients() == 1):
        return
    if compat.tensorflow_has_started():
        raise RuntimeError(
            f"TensorFlow has already started, so {device_type} devices of {dtensor.num_clients()} process(es) can no longer "
            "be joined. Make the strategy before the first tensor, model or other TensorFlow operation."
        )
    dtensor.initialize_accelerator_system(device_type)
    _started.accelerators = True


def host() -> str:
    """The name of this process' first CPU, where whole values are assembled and initial values are computed."""
    return f"/job:{dtensor.job_name()}/replica:0/task:{dtensor.client_id()}/device:CPU:0"
