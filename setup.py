"""Package metadata. `strategies/` and `models/` install as `tfpar.strategies` and `tfpar.models`."""

from setuptools import setup

setup(
    name="tfpar",
    version="0.1.0",
    description="Hybrid parallel training for Keras on TensorFlow: layouts change speed and memory, never the numbers.",
    license="Apache-2.0",
    python_requires=">=3.11",
    package_dir={"tfpar": "tfpar", "tfpar.strategies": "strategies", "tfpar.models": "models"},
    packages=["tfpar", "tfpar.strategies", "tfpar.models"],
    package_data={"tfpar": ["py.typed"]},
    install_requires=["tensorflow>=2.21,<2.22", "keras>=3.15,<3.16", "numpy>=1.26", "absl-py>=2.1"],
    extras_require={},
)
