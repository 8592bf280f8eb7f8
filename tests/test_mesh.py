"""Mesh: parsing, sizes, devices, sub-meshes and every wrong input."""

import numpy as np
import pytest
import tensorflow as tf

import tfpar


def test_three_ways_to_write_a_mesh():
    text = tfpar.Mesh("data=2, model = 2")
    assert text == tfpar.Mesh({"data": 2, "model": 2}) == tfpar.Mesh(text)
    assert text.axes == {"data": 2, "model": 2} and text.size == 4 and text.data_size == 2
    assert str(text) == "data=2,model=2" and hash(text) == hash(tfpar.Mesh(text))
    assert tfpar.Mesh("model=4").data_size == 1


def test_devices_lie_in_a_grid_with_the_last_axis_fastest():
    mesh = tfpar.Mesh("data=2,model=2")
    np.testing.assert_array_equal(mesh.devices, [["CPU:0", "CPU:1"], ["CPU:2", "CPU:3"]])
    assert [d.rsplit(":", 2)[1:] for d in mesh.dtensor_mesh.local_devices()] == [["CPU", str(i)] for i in range(4)]
    other = tfpar.Mesh("data=2", devices=["cpu:5", "/job:localhost/replica:0/task:0/device:CPU:1"])
    np.testing.assert_array_equal(other.devices, ["CPU:5", "CPU:1"])


def test_submeshes():
    mesh = tfpar.Mesh("pipe=2,data=2,model=2")
    second = mesh.submesh(pipe=1)
    assert second.axes == {"data": 2, "model": 2}
    np.testing.assert_array_equal(second.devices, [["CPU:4", "CPU:5"], ["CPU:6", "CPU:7"]])
    assert second.submesh(data=0, model=1).axes == {"data": 1}
    with pytest.raises(ValueError, match="no axis 'stage'"):
        mesh.submesh(stage=0)
    with pytest.raises(ValueError, match="indices 0 to 1, got 2"):
        mesh.submesh(pipe=2)


@pytest.mark.parametrize(
    "axes, devices, expected",
    [
        ("data=-1,model=2", None, {"data": 4, "model": 2}),
        ("data=-1", ["CPU:0", "CPU:1", "CPU:2"], {"data": 3}),
        ({"data": 2, "model": -1}, ["CPU:0", "CPU:1", "CPU:2", "CPU:3"], {"data": 2, "model": 2}),
    ],
)
def test_what_is_left(axes, devices, expected):
    assert tfpar.Mesh(axes, devices=devices).axes == expected


@pytest.mark.parametrize(
    "arguments, sentence",
    [
        (("",), 'written like "data=2,model=2"'),
        (("data=two",), 'written like "data=2,model=2"'),
        (("data=2;model=2",), 'written like "data=2,model=2"'),
        (("data=2,data=2",), "names the axis 'data' twice"),
        (("data=0",), "has the size 0"),
        (("data=-2",), "has the size -2"),
        (({"data": 2.0},), "has the size 2.0"),
        (({"data": True},), "has the size True"),
        (({"my axis": 2},), "named like a Python variable"),
        (({},), "at least one axis"),
        ((4,), "got int"),
        (("data=-1,model=-1",), "only one axis may be -1"),
        (("data=-1,model=3",), "does not divide 8"),
    ],
)
def test_wrong_axes(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        tfpar.Mesh(*arguments)


def test_wrong_devices():
    with pytest.raises(ValueError, match="2 × 2 = 4 cells, but 2 devices were given: CPU:0, CPU:1"):
        tfpar.Mesh("data=2,model=2", devices=["CPU:0", "CPU:1"])
    with pytest.raises(ValueError, match="CPU:0 was given more than once"):
        tfpar.Mesh("data=2", devices=["CPU:0", "CPU:0"])
    with pytest.raises(ValueError, match="devices of one kind"):
        tfpar.Mesh("data=2", devices=["CPU:0", "GPU:0"])
    with pytest.raises(ValueError, match="written like \"CPU:0\", got 'zero'"):
        tfpar.Mesh("data=1", devices=["zero"])
    with pytest.raises(ValueError, match="device_type is 'CPU', 'GPU' or 'TPU', got 'NPU'"):
        tfpar.Mesh("data=1", device_type="NPU")


def test_devices_that_do_not_exist():
    tf.constant(0)  # TensorFlow has started with 8 logical CPU devices
    with pytest.raises(RuntimeError, match=r"8 logical CPU devices, but 16 are needed.*Call tfpar.use_logical_cpus\(16\)"):
        tfpar.HybridStrategy("data=16")
    with pytest.raises(RuntimeError, match="but 10 are needed"):
        tfpar.HybridStrategy(tfpar.Mesh("data=2", devices=["CPU:0", "CPU:9"]))
    with pytest.raises((ValueError, RuntimeError), match="GPU"):
        tfpar.HybridStrategy(tfpar.Mesh("data=2", device_type="GPU"))


@pytest.mark.parametrize("number", [0, -1, 2.0, True, "4"])
def test_use_logical_cpus_takes_a_positive_number(number):
    with pytest.raises(ValueError, match="positive whole number"):
        tfpar.use_logical_cpus(number)
