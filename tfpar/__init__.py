"""tfpar: hybrid parallel training for Keras on TensorFlow."""

from tfpar import layouts, pipeline, servers
from tfpar.autolayout import AutoLayout
from tfpar.devices import use_logical_cpus
from tfpar.layouts import LayoutMap
from tfpar.mesh import Mesh
from tfpar.servers.local import local_cluster
from tfpar.strategies import (
    HybridStrategy,
    MirroredStrategy,
    ParameterServerStrategy,
    PipelineStrategy,
    TensorParallelStrategy,
)

__version__ = "0.1.0"

__all__ = [
    "AutoLayout",
    "HybridStrategy",
    "LayoutMap",
    "Mesh",
    "MirroredStrategy",
    "ParameterServerStrategy",
    "PipelineStrategy",
    "TensorParallelStrategy",
    "layouts",
    "local_cluster",
    "pipeline",
    "servers",
    "use_logical_cpus",
]
