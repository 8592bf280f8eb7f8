"""Operations that DTensor cannot partition: they run replicated, right but without a speed-up, and say so once.

DTensor has no expansion for some operations. TensorFlow lets such an operation gather its inputs and run whole on every
device, one environment variable per operation, read when the operation is met. Which ones need it is data, below; one
that is missing from the table is found when TensorFlow refuses it, and the step is tried again.
"""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Iterator

import tensorflow as tf

_VARIABLE = "DTENSOR_ENABLE_REPLICATED_SPMD_AS_DEFAULT_TF."
_REFUSED = re.compile(r"'tf\.(\w+)' op does not implement layout propagation")

REPLICATED = (
    # TensorLists hold what loops keep for their gradients.
    "EmptyTensorList",
    "TensorListReserve",
    "TensorListFromTensor",
    "TensorListStack",
    "TensorListGetItem",
    "TensorListSetItem",
    "TensorListPushBack",
    "TensorListPopBack",
    "TensorListLength",
    "TensorListElementShape",
    # Convolutions and pooling
    "AvgPoolGrad",
    "AvgPool3DGrad",
    "DepthwiseConv2dNative",
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
    "LRN",
    "LRNGrad",
    # Order and structure
    "ReverseV2",
    "MatrixDiagPartV3",
    # Element-wise and cumulative
    "Cumprod",
    "SoftsignGrad",
)

_warned: set[str] = set()


def replicate(operation: str) -> None:
    """Lets one TensorFlow operation, named as in a graph ("AvgPoolGrad"), run replicated where it has no expansion."""
    os.environ[_VARIABLE + operation.upper()] = "1"


def is_replicated(operation: str) -> bool:
    """Whether an operation without expansion may run replicated."""
    return _VARIABLE + operation.upper() in os.environ


def refused(error: tf.errors.OpError) -> str | None:
    """The operation that TensorFlow refused for want of an expansion, None where the error says something else."""
    match = _REFUSED.search(error.message)
    return match[1] if match else None


def warn_replicated(graph: tf.Graph, operations: tuple[str, ...] = REPLICATED) -> None:
    """Warns, once per kind of operation, where a traced step has operations that run replicated."""
    wanted = set(operations) - _warned
    for operation in _operations(graph):
        if operation.type in wanted and operation.type not in _warned:
            _warned.add(operation.type)
            warnings.warn(
                f"TensorFlow cannot partition the operation {operation.type} (in {_layer(operation.name)!r}): its inputs are "
                "gathered and every device computes the whole of it. The numbers are right; this part is not sped up.",
                stacklevel=2,
            )


def _operations(graph: tf.Graph) -> Iterator[tf.Operation]:
    yield from graph.get_operations()
    for function in getattr(graph, "_functions", {}).values():
        inner = getattr(function, "graph", None)
        if inner is not None and inner is not graph:
            yield from inner.get_operations()


def _layer(name: str) -> str:
    """The layer part of an operation's name: "gradient_tape/model/pool/AvgPoolGrad" gives "model/pool"."""
    parts = [part for part in name.split("/")[:-1] if part != "gradient_tape"]
    return "/".join(parts) or name


for _operation in REPLICATED:
    replicate(_operation)
