"""Mixed precision: losses as on one device, and one decision to skip a step for all devices."""

import keras
import numpy as np
import parity
import pytest
from keras import optimizers

X, Y = parity.regression(32)


@pytest.mark.parametrize("policy, rtol", [("mixed_float16", 5e-3), ("mixed_bfloat16", 3e-2), ("float32", 1e-4)])
@pytest.mark.parametrize("mesh", ["data=4", "data=2,model=2"])
def test_losses_and_predictions(policy, rtol, mesh):
    keras.config.set_dtype_policy(policy)

    def fit(m):
        return m.fit(X, Y, batch_size=8, epochs=4, shuffle=False, verbose=0)

    def run(strategy):
        return parity.train(strategy, lambda: parity.compiled(parity.mlp()), fit, lambda m: m.predict(X, verbose=0))

    one, many = run(None), run(parity.strategy_for(mesh))
    assert type(one.model.optimizer) is type(many.model.optimizer)
    assert isinstance(many.model.optimizer, optimizers.LossScaleOptimizer) == (policy == "mixed_float16")
    assert many.model.layers[0].compute_dtype == policy.removeprefix("mixed_")
    assert many.model.layers[0].kernel._value.dtype.name == "float32"
    np.testing.assert_allclose(many.history["loss"], one.history["loss"], rtol=rtol)
    np.testing.assert_allclose(many.checked, one.checked, rtol=rtol, atol=2 * rtol)


def test_an_overflow_on_one_shard_skips_the_step_everywhere():
    keras.config.set_dtype_policy("mixed_float16")
    with parity.strategy_for("data=4").scope():
        model = parity.compiled(parity.mlp(), optimizers.LossScaleOptimizer(optimizers.Adam(0.01), initial_scale=1024.0))
    model.train_on_batch(X[:8], Y[:8])
    before, x = model.get_weights(), X[:8].copy()
    x[0] = 1e30  # only in the first device's shard
    model.train_on_batch(x, Y[:8])
    parity.assert_close(before, model.get_weights(), 0)
    assert float(model.optimizer.dynamic_scale) == 512.0 and int(model.optimizer.iterations) == 1
    model.train_on_batch(X[8:16], Y[8:16])
    assert int(model.optimizer.iterations) == 2 and np.isfinite(model.get_weights()[0]).all()
