"""tfpar: hybrid parallel training for Keras on TensorFlow."""

from tfpar.devices import use_logical_cpus
from tfpar.layouts import LayoutMap
from tfpar.mesh import Mesh
from tfpar.strategies import HybridStrategy, MirroredStrategy

__version__ = "0.1.0"

__all__ = ["HybridStrategy", "LayoutMap", "Mesh", "MirroredStrategy", "use_logical_cpus"]
