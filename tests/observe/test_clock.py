"""Every second is booked to one cause."""

import pytest

from megajax.observe.goodput import Clock, Meter


def test_seconds_by_cause():
    now = iter([0.0, 2.0, 3.0, 5.0, 6.0, 7.0, 10.0]).__next__
    clock = Clock(now)
    with clock.during("evaluation"), clock.during("input"):  # 2 to 6, 3 to 5
        pass
    clock.steady()  # at 7
    assert clock.seconds == {"start": 3.0, "evaluation": 2.0, "input": 2.0, "host": 3.0}


def test_what_raises_is_booked_too():
    now = iter([0.0, 1.0, 3.0, 4.0]).__next__
    clock = Clock(now)
    with pytest.raises(KeyError), clock.during("checkpoint"):
        raise KeyError
    assert clock.seconds == {"start": 2.0, "checkpoint": 2.0}


def test_meter_reads_what_is_new():
    now = iter([0.0, 1.0, 2.0, 5.0, 9.0]).__next__
    clock = Clock(now)
    meter = Meter(clock)
    assert meter.read() == {"start": 1.0}
    with clock.during("input"):
        pass
    assert meter.read() == {"start": 5.0, "input": 3.0}
