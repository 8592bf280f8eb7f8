"""Operations that DTensor partitions wrongly or not at all.

    none     no expansion: TensorFlow gathers the inputs and runs the operation whole on every device, if an environment
             variable per operation says so. Right but without a speed-up; said once. An operation that is missing from
             the table is found when TensorFlow refuses it, and the step is tried again.
    some     an expansion for some splits only: what else is split is gathered before, see `op_gathers.py`.
    wrong    an expansion that gives other numbers without an error where a certain dim is split, or none that a table
             mends: another function takes its place in a step (`op_routes.py`, `op_convs.py`, `op_loops.py`, `op_ctc.py`,
             `op_fft.py`) or, where nothing helps, it is refused.

The audit, `python -m tfpar.op_support --audit`, finds them; docs/op_support.md is what it found last. Each entry of
`WRONG` and `KERAS` has a test with the right value.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable

import tensorflow as tf
from tensorflow.experimental import dtensor

from tfpar import compat, op_convs, op_ctc, op_fft, op_gathers, op_loops, op_routes, variables
from tfpar.compat import functions

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
    "DepthwiseConv2dNativeBackpropFilter",
    "DepthwiseConv2dNativeBackpropInput",
    "LRN",
    "LRNGrad",
    # Order and structure
    "ReverseV2",
    "Roll",
    "MirrorPad",
    "MirrorPadGrad",
    "Size",
    "MatrixDiagPartV3",
    "MatrixDiagV3",
    "MatrixSetDiagV3",
    "MatrixBandPart",
    "MatrixInverse",
    "MatrixSolve",
    "MatrixTriangularSolve",
    "SpaceToDepth",
    "DepthToSpace",
    "SpaceToBatchND",
    "BatchToSpaceND",
    "DynamicStitch",
    "TensorScatterSub",
    "TensorScatterMax",
    "TensorScatterMin",
    "UnsortedSegmentMax",
    "DenseBincount",
    "Bucketize",
    "ArgMin",
    # Element-wise and cumulative
    "Cumprod",
    "CumulativeLogsumexp",
    "SoftsignGrad",
)


def replicate(operation: str) -> None:
    """Lets one TensorFlow operation, named as in a graph ("AvgPoolGrad"), run replicated where it has no expansion."""
    os.environ[_VARIABLE + operation.upper()] = "1"


def is_replicated(operation: str) -> bool:
    """Whether an operation without expansion may run replicated."""
    return _VARIABLE + operation.upper() in os.environ


def replicates(error: BaseException | None) -> bool:
    """Lets the operation that an error is about run replicated from now on.

    Returns:
        Whether TensorFlow refused it for want of an expansion, so that a step that is traced anew may succeed.
    """
    operation = refused(error) if isinstance(error, tf.errors.OpError) else None
    if operation is None or is_replicated(operation):
        return False
    replicate(operation)
    return True


def refused(error: tf.errors.OpError) -> str | None:
    """The operation that TensorFlow refused for want of an expansion, None where the error says something else."""
    match = _REFUSED.search(error.message)
    return match[1] if match else None


WRONG = {
    "einsum": op_routes.einsum,
    "arg_max": op_routes.argmax,
    "gather_v2": op_routes.lookup,
    "scatter_nd": op_routes.scatter_nd,
    "gather_nd": op_routes.whole,
    "tensor_scatter_update": op_routes.tensor_scatter,
    "tensor_scatter_add as tensor_scatter_nd_add": op_routes.tensor_scatter,
    "tensor_scatter_sub as tensor_scatter_nd_sub": op_routes.tensor_scatter,
    "tensor_scatter_min as tensor_scatter_nd_min": op_routes.tensor_scatter,
    "tensor_scatter_max as tensor_scatter_nd_max": op_routes.tensor_scatter,
    "where": op_routes.refused,
    "boolean_mask": op_routes.refused,
    "sparse_softmax_cross_entropy_with_logits": op_routes.sparse_cross_entropy,
    "strided_slice": op_routes.strided_slice,
    "_slice": op_routes.static_slice,
    "squeeze": op_routes.squeeze,
    "transpose": op_routes.transpose,
    "conv2d": op_convs.grouped_conv,
    "conv3d": op_convs.grouped_conv,
    "depthwise_conv2d_native_backprop_input": op_convs.depthwise_input_gradient,
    "depthwise_conv2d_native_backprop_filter": op_convs.depthwise_filter_gradient,
    "avg_pool_grad": op_convs.average_gradient,
    "pack": op_routes.pack,
    "unpack": op_routes.unpack,
    "bincount as bincount": op_routes.bincount,
    "repeat": op_routes.repeat,
    "rfft as rfft": op_fft.rfft,
    "irfft as irfft": op_fft.irfft,
    "matrix_exponential as expm": op_routes.fatal,
    "map_fn_v2 as map_fn": op_loops.map_fn,
    "foldl_v2 as foldl": op_loops.fold(reverse=False),
    "foldr_v2 as foldr": op_loops.fold(reverse=True),
    "scan_v2 as scan": op_loops.scan,
    "switch_case": op_loops.switch_case,
    "while_loop_v2 as while_loop": op_loops.while_loop,
    "fake_param": op_loops.branch_values,
}
KERAS = {
    "core.scan": op_loops.keras_scan,
    "core.associative_scan": op_loops.keras_associative_scan,
    "nn.conv": op_convs.keras_conv,
    "nn.ctc_loss": op_ctc.ctc_loss,
    "numpy.inner": op_routes.inner,
}


def _in_steps(wrapper: Callable[[Callable], Callable]) -> Callable[[Callable], Callable]:
    """Applies a wrapper in steps on a mesh only, and only where every tensor has a known rank."""

    def wrap(operation: Callable) -> Callable:
        routed = wrapper(operation)

        def choose(*args, **kwargs):
            routes = variables.step_owner() is not None and not any(
                isinstance(arg, tf.Tensor) and arg.shape.rank is None for arg in args
            )
            return (routed if routes else operation)(*args, **kwargs)

        return choose

    return wrap


def _as_constant(tensor: tf.Tensor) -> tf.Tensor:
    """Tensors from outside of a step, such as a table of positions, are constants in it: DTensor takes no others."""
    if variables.step_owner() is None or tf.is_symbolic_tensor(tensor) or tensor.dtype in _NO_NUMBERS:
        return tensor
    with tf.init_scope():
        on_the_mesh = dtensor.is_dtensor(tensor)
    return tensor if on_the_mesh else tf.constant(tensor.numpy())


_NO_NUMBERS = (tf.resource, tf.variant, tf.string)


def main() -> None:
    """`python -m tfpar.op_support --audit`"""
    from absl import app

    from tfpar import op_audit

    app.run(op_audit.main)


if __name__ == "__main__":
    main()  # the operations are routed already: tfpar imports this file
else:
    functions.before_operations(op_gathers.gather_inputs)
    functions.place_operations(op_gathers.mesh_of)
    functions.forgo_optionals(lambda: variables.step_owner() is not None)
    functions.before_captures(_as_constant)
    for _operation in op_gathers.functions():
        compat.route(_operation, _in_steps(op_gathers.gather_results))
    for _operation in REPLICATED:
        replicate(_operation)
    for _operation, _wrapper in WRONG.items():
        compat.route(_operation, _in_steps(_wrapper))
    for _operation, _wrapper in KERAS.items():
        compat.route_keras(_operation, _in_steps(_wrapper))
