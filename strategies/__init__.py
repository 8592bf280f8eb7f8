"""Strategies, one per file; `tfpar` re-exports them."""

from tfpar.strategies.hybrid import HybridStrategy
from tfpar.strategies.mirrored import MirroredStrategy
from tfpar.strategies.parameter_server import ParameterServerStrategy
from tfpar.strategies.pipeline import PipelineStrategy
from tfpar.strategies.tensor_parallel import TensorParallelStrategy

__all__ = ["HybridStrategy", "MirroredStrategy", "ParameterServerStrategy", "PipelineStrategy", "TensorParallelStrategy"]
