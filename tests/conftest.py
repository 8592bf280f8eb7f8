"""One set of 8 logical CPU devices for all tests, made before TensorFlow starts."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import pytest

import tfpar

tfpar.use_logical_cpus(8)


@pytest.fixture(autouse=True)
def fresh_keras():
    """Every test starts with default precision, seeds and layer names."""
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")
    keras.utils.clear_session(free_memory=False)
    keras.utils.set_random_seed(0)
    yield
    keras.config.set_floatx("float32")
    keras.config.set_dtype_policy("float32")


@pytest.fixture
def float64():
    """Parity is measured in float64, where rounding is far below any mistake."""
    keras.config.set_floatx("float64")
    keras.config.set_dtype_policy("float64")
