"""Strategies, one per file; `tfpar` re-exports them."""

from tfpar.strategies.hybrid import HybridStrategy
from tfpar.strategies.mirrored import MirroredStrategy

__all__ = ["HybridStrategy", "MirroredStrategy"]
