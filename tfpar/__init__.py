"""tfpar: hybrid parallel training for Keras on TensorFlow."""

from tfpar import layouts
from tfpar.autolayout import AutoLayout
from tfpar.devices import use_logical_cpus
from tfpar.layouts import LayoutMap
from tfpar.mesh import Mesh
from tfpar.strategies import HybridStrategy, MirroredStrategy, TensorParallelStrategy

__version__ = "0.1.0"

__all__ = [
    "AutoLayout",
    "HybridStrategy",
    "LayoutMap",
    "Mesh",
    "MirroredStrategy",
    "TensorParallelStrategy",
    "layouts",
    "use_logical_cpus",
]
