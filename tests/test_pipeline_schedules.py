"""Pipeline schedules: literal orders, published bubbles and memory, and what is no schedule."""

import pytest

from tfpar.pipeline import schedules
from tfpar.pipeline.schedules import Action, Schedule
from tfpar.pipeline.simulation import simulate

SIZES = [(1, 1), (1, 4), (2, 2), (2, 8), (3, 6), (4, 4), (4, 8), (8, 16)]


def test_literal_orders():
    assert str(schedules.gpipe(2, 2)).splitlines()[1:] == ["0: F0.0 F0.1 B0.0 B0.1", "1: F1.0 F1.1 B1.0 B1.1"]
    assert str(schedules.one_forward_one_backward(3, 4)).splitlines()[1:] == [
        "0: F0.0 F0.1 F0.2 B0.0 F0.3 B0.1 B0.2 B0.3",
        "1: F1.0 F1.1 B1.0 F1.2 B1.1 F1.3 B1.2 B1.3",
        "2: F2.0 B2.0 F2.1 B2.1 F2.2 B2.2 F2.3 B2.3",
    ]
    assert str(schedules.interleaved(2, 2, 2)).splitlines()[1:] == [
        "0: F0.0 F0.1 F2.0 F2.1 B2.0 B2.1 B0.0 B0.1",
        "1: F1.0 F1.1 F3.0 B3.0 F3.1 B3.1 B1.0 B1.1",
    ]
    assert str(schedules.zero_bubble_h1(2, 3)).splitlines()[1:] == [
        "0: F0.0 F0.1 I0.0 W0.0 F0.2 I0.1 W0.1 I0.2 W0.2",
        "1: F1.0 I1.0 F1.1 I1.1 W1.0 F1.2 I1.2 W1.1 W1.2",
    ]


@pytest.mark.parametrize("devices, microbatches", SIZES)
def test_bubbles_are_those_published(devices, microbatches):
    waiting = (devices - 1) / (microbatches + devices - 1)
    assert simulate(schedules.gpipe(devices, microbatches)).bubble == pytest.approx(waiting)
    plain = simulate(schedules.one_forward_one_backward(devices, microbatches))
    assert plain.bubble == pytest.approx(waiting)
    work = 3 * microbatches
    for virtual in (1, 2, 3):
        if microbatches % devices == 0:
            costs = {"F": 1 / virtual, "B": 2 / virtual}
            result = simulate(schedules.interleaved(devices, microbatches, virtual), costs)
            assert result.time - work == pytest.approx((plain.time - work) / virtual)
    if microbatches >= devices:
        assert simulate(schedules.zero_bubble_h1(devices, microbatches)).time - work == pytest.approx(
            (plain.time - work) / 3
        )


@pytest.mark.parametrize("devices, microbatches", SIZES)
def test_live_activations_are_those_published(devices, microbatches):
    def live(schedule):
        return simulate(schedule).live_activations

    assert live(schedules.gpipe(devices, microbatches)) == (microbatches,) * devices
    expected = tuple(min(devices - device, microbatches) for device in range(devices))
    assert live(schedules.one_forward_one_backward(devices, microbatches)) == expected
    assert max(live(schedules.zero_bubble_h1(devices, microbatches))) == min(devices, microbatches)
    if microbatches % devices == 0:
        warm = [(devices - device - 1) * 2 + devices + 1 for device in range(devices)]
        assert live(schedules.interleaved(devices, microbatches, 2)) == tuple(min(w, 2 * microbatches) for w in warm)


def test_grid_and_transfers():
    assert simulate(schedules.one_forward_one_backward(2, 2)).grid().splitlines() == [
        "F0 F1 .  .  B0 B0 .  B1 B1",
        ".  F0 B0 B0 F1 B1 B1 .  .",
    ]
    assert simulate(schedules.gpipe(2, 1), transfer=0.5).time == 7.0


def own(*devices, microbatches=1, stages=2):
    parse = lambda text: Action(text[0], *map(int, text[1:].split(".")))  # noqa: E731
    return Schedule("own", microbatches, stages, tuple(tuple(map(parse, actions.split())) for actions in devices))


def test_an_own_schedule():
    assert own("F0.0 B0.0", "F1.0 B1.0").devices == 2
    assert own("F0.0 F1.0 B1.0 B0.0").devices == 1


@pytest.mark.parametrize(
    "devices, message",
    [
        (("F0.0", "F1.0 B1.0"), "lacks the actions B0.0"),
        (("F0.0 B0.0 B0.0", "F1.0 B1.0"), "has the action B0.0 twice"),
        (("F0.0 B0.0 F0.1", "F1.0 B1.0"), r"has the action F0.1, expected one of F0.0"),
        (("B0.0 F0.0", "F1.0 B1.0"), "never ends: device 0 waits to do B0.0"),
        (("F0.0 B0.0", "B1.0 F1.0"), "never ends"),
        (("F0.0 B1.0", "F1.0 B0.0"), r"has stage 0 on the devices \[0, 1\]"),
    ],
)
def test_what_is_no_schedule(devices, message):
    with pytest.raises(ValueError, match=message):
        own(*devices)


def test_impossible_sizes():
    with pytest.raises(ValueError, match="groups of 4 micro-batches.*got 6 micro-batches"):
        schedules.interleaved(4, 6)
    for make in schedules.SCHEDULES.values():
        with pytest.raises(ValueError, match="at least one device and one micro-batch, got 0 devices"):
            make(0, 4)
