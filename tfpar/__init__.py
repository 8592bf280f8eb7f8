"""tfpar: hybrid parallel training for Keras on TensorFlow."""

from tfpar import layouts, pipeline
from tfpar.autolayout import AutoLayout
from tfpar.devices import use_logical_cpus
from tfpar.layouts import LayoutMap
from tfpar.mesh import Mesh
from tfpar.strategies import HybridStrategy, MirroredStrategy, PipelineStrategy, TensorParallelStrategy

__version__ = "0.1.0"

__all__ = [
    "AutoLayout",
    "HybridStrategy",
    "LayoutMap",
    "Mesh",
    "MirroredStrategy",
    "PipelineStrategy",
    "TensorParallelStrategy",
    "layouts",
    "pipeline",
    "use_logical_cpus",
]
