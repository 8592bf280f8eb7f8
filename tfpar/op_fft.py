"""Fourier transforms of real numbers, in operations whose gradients TensorFlow can partition.

The gradients of its own take slices of sizes that are known only when the step runs. The transform of complex numbers
takes none, and twice the work.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import tensorflow as tf


def rfft(rfft: Callable) -> Callable:
    """`tf.signal.rfft`, with the same arguments: half of what the transform of complex numbers gives."""

    def of_complex(input_tensor, fft_length=None, name=None):
        value = tf.convert_to_tensor(input_tensor)
        length = _static_length(fft_length, value.shape[-1])
        if length is None or value.shape[-1] is None:
            return rfft(input_tensor, fft_length, name)
        value = _resized(value, length)
        return tf.signal.fft(tf.complex(value, tf.zeros_like(value)))[..., : length // 2 + 1]

    return of_complex


def irfft(irfft: Callable) -> Callable:
    """`tf.signal.irfft`, with the same arguments: the half that is not given is the conjugate of the other."""

    def of_complex(input_tensor, fft_length=None, name=None):
        value = tf.convert_to_tensor(input_tensor)
        number = value.shape[-1]
        length = _static_length(fft_length, number and 2 * (number - 1))
        if length is None or number is None:
            return irfft(input_tensor, fft_length, name)
        value = _resized(value, length // 2 + 1)
        rest = tf.math.conj(tf.gather(value, np.arange((length - 1) // 2, 0, -1), axis=-1))
        alone = np.isin(np.arange(length), (0, length / 2))  # their imaginary parts do not count
        whole = tf.concat([value, rest], -1)
        whole = tf.where(alone, tf.complex(tf.math.real(whole), tf.zeros_like(tf.math.real(whole))), whole)
        return tf.math.real(tf.signal.ifft(whole))

    return of_complex


def _static_length(fft_length: Any, default: int | None) -> int | None:
    """The number that `fft_length` holds, None where it is not known while tracing."""
    if fft_length is None:
        return default
    length = tf.get_static_value(tf.convert_to_tensor(fft_length))
    return None if length is None else int(np.ravel(length)[0])


def _resized(value: tf.Tensor, length: int) -> tf.Tensor:
    """The value with its last dim cut, or filled up with zeros, to a length."""
    value = value[..., :length]
    missing = length - value.shape[-1]
    return tf.pad(value, [[0, 0]] * (value.shape.rank - 1) + [[0, missing]]) if missing else value
