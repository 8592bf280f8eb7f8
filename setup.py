"""Package metadata. `strategies/` and `models/` install as `tfpar.strategies` and `tfpar.models`."""

from __future__ import annotations

import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent
README = ROOT / "README.md"


def version() -> str:
    """The version in `tfpar/__init__.py`, read as text: importing the package would need TensorFlow at build time."""
    return re.search(r'^__version__ = "(.+)"$', (ROOT / "tfpar" / "__init__.py").read_text(), re.MULTILINE)[1]


NOTEBOOKS = [
    "ipykernel>=7.0",  # the kernel that runs a notebook, in any editor
    "matplotlib>=3.10",  # the pictures
    "scikit-learn>=1.7",  # brings the images of 01_digits.ipynb, so nothing is fetched when it runs
]
COVERAGE = ["keras-hub>=0.32"]  # its backbones are trained on meshes, at tiny sizes and with random weights

setup(
    name="tfpar",
    version=version(),
    description="Hybrid parallel training for Keras on TensorFlow: layouts change speed and memory, never the numbers.",
    long_description=README.read_text() if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Developers",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3",
        "Programming Language :: Python :: 3.11",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
        "Topic :: System :: Distributed Computing",
        "Typing :: Typed",
    ],
    python_requires=">=3.11",
    package_dir={"tfpar": "tfpar", "tfpar.strategies": "strategies", "tfpar.models": "models"},
    packages=["tfpar", "tfpar.compat", "tfpar.pipeline", "tfpar.servers", "tfpar.strategies", "tfpar.models"],
    package_data={"tfpar": ["py.typed"]},
    install_requires=[
        "absl-py>=2.1",  # flags of the demo
        "keras>=3.15,<3.16",  # tfpar/compat replaces private parts of it, so one minor version
        "numpy>=1.26",
        "tensorflow>=2.21,<2.22",  # DTensor and tfpar/compat, as for keras
    ],
    extras_require={
        "coverage": COVERAGE,
        "notebooks": NOTEBOOKS,
        "test": [
            *COVERAGE,  # tests/test_coverage.py runs a few of them
            *NOTEBOOKS,  # tests/test_notebooks.py runs every notebook,
            "nbclient>=0.10",  # with this
            "nbformat>=5.10",  # and reads it with this
            "pytest>=8.3",
            "pytest-xdist>=3.6",  # tests spend their time tracing in Python, on one core each
            "scipy>=1.13",  # a sparse matrix as input
            "tensorboard>=2.20",  # the callback writes through it; TensorFlow no longer brings it
            "setuptools>=77",  # tests/test_packaging.py builds the package without fetching a build environment
        ],
        "lint": ["ruff>=0.14"],
        "bench": ["jax>=0.10", "torch>=2.10"],  # Keras on JAX and torch.distributed.pipelining, to compare with
    },
)
