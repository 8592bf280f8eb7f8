"""One set of 8 logical CPU devices for all tests, made before TensorFlow starts."""

import os

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("KERAS_BACKEND", "tensorflow")

import keras
import pytest
from xdist.scheduler import LoadScopeScheduling

import tfpar

tfpar.use_logical_cpus(8)


class OneForServers(LoadScopeScheduling):
    """Takes tests one by one to the next free worker, those on parameter servers together."""

    def _split_scope(self, nodeid):
        return "servers" if "test_parameter_server" in nodeid else nodeid


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


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Tests on parameter servers run on one worker: they share clusters, and those of two at once would share two cores."""
    return OneForServers(config, log)
