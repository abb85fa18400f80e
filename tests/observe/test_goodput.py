"""Every second has one cause, and goodput adds up the seconds over all starts of a run."""

import json
import signal
import subprocess
import sys
import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from megajax.observe.goodput import Clock, Ledger, Meter, Start, describe_goodput, goodput, spending

CRASHED = Start(began=1000, resumed=0, step=50, seconds={"start": 20, "host": 10, "device": 80, "input": 5})
AGAIN = Start(began=1125, resumed=40, step=60, seconds={"start": 25, "host": 4, "device": 36, "evaluation": 10})


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


def test_steps_done_again_are_lost():
    """50 steps in 90 s, the last 10 of them again after a restart from step 40, which came 10 s later."""
    seconds = spending([CRASHED, AGAIN])
    assert {cause: spent for cause, spent in seconds.items() if spent} == {
        "productive": 90 * 40 / 50 + 40,
        "lost": 90 * 10 / 50,
        "start": 45,
        "input": 5,
        "evaluation": 10,
        "down": 10,
    }
    assert goodput([CRASHED, AGAIN]) == 112 / 200
    assert describe_goodput([CRASHED, AGAIN]) == (
        "goodput 56.0 % of 3 min 20 s in 2 starts: start 22.5 %, lost 9.0 %, down 5.0 %, evaluation 5.0 %, input 2.5 %"
    )


def test_a_start_that_falls_back_far_loses_the_steps_of_all_before_it():
    starts = [
        Start(began=0, resumed=0, step=10, seconds={"device": 10.0}),
        Start(began=10, resumed=8, step=12, seconds={"device": 4.0}),
        Start(began=14, resumed=4, step=5, seconds={"device": 1.0}),
    ]
    assert spending(starts)["productive"] == 4 + 0 + 1
    assert spending(starts)["lost"] == 6 + 4


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0, "0.0 s"), (59.94, "59.9 s"), (125, "2 min 5 s"), (11_520, "3 h 12 min")]
)
def test_length_of_the_run(seconds, text):
    start = Start(began=0, resumed=0, step=1, seconds={"device": seconds})
    assert describe_goodput([start]) == f"goodput {100.0 if seconds else 0.0} % of {text}"


LIVES = st.lists(
    st.tuples(
        st.floats(0, 1e4),  # down before
        st.integers(0, 100),  # resumed
        st.integers(0, 100),  # steps
        st.dictionaries(st.sampled_from(["start", "input", "host", "device", "checkpoint"]), st.floats(0, 1e4)),
    ),
    min_size=1,
    max_size=5,
)


@given(LIVES)
@example([(0.0, 0, 5, {"host": 6554.078372433011})])  # more than the whole by a rounding
def test_causes_add_up_to_the_life_of_the_run(lives):
    starts, now = [], 1.7e9
    for down, resumed, steps, seconds in lives:
        starts.append(Start(began=now + down, resumed=resumed, step=resumed + steps, seconds=seconds))
        now = starts[-1].began + sum(seconds.values())
    spent = spending(starts)
    assert sum(spent.values()) == pytest.approx(now - starts[0].began, abs=1e-4)
    assert all(seconds >= -1e-4 for seconds in spent.values())
    assert 0 <= goodput(starts) <= 1


def test_ledger_goes_on_where_the_start_before_left_off(tmp_path):
    path = tmp_path / "goodput.json"
    for resumed, last in ((0, 6), (4, 8)):
        clock = Clock()
        with clock.during("restore"):
            pass
        ledger = Ledger(path, clock, resumed)
        clock.steady()
        for step in range(resumed + 1, last + 1):
            ledger.done(step)
        time.sleep(0.02)
        ledger.save()
    record = json.loads(path.read_text())
    assert [(start["resumed"], start["step"]) for start in record["starts"]] == [(0, 6), (4, 8)]
    assert record["starts"][0]["seconds"].keys() == {"start", "restore", "host"}
    assert record["seconds"]["lost"] == pytest.approx(record["starts"][0]["seconds"]["host"] / 3)
    assert record["goodput"] == pytest.approx(goodput(ledger.starts)) and 0 < record["goodput"] < 1


def test_return_to_a_checkpoint(tmp_path):
    clock = Clock()
    ledger = Ledger(tmp_path / "goodput.json", clock, 0)
    clock.steady()
    ledger.done(5)
    time.sleep(0.02)
    ledger.rewind(2)
    assert [(start.resumed, start.step) for start in ledger.starts] == [(0, 5), (2, 2)]
    ledger.done(3)
    assert spending(ledger.starts)["lost"] == pytest.approx(ledger.starts[0].seconds["host"] * 3 / 5)


def test_a_damaged_ledger_stops_no_run(tmp_path, caplog):
    path = tmp_path / "goodput.json"
    path.write_text("{")
    assert len(Ledger(path, Clock(), 0).starts) == 1
    assert "goodput.json is damaged" in caplog.text


WRITER = """
import sys
from pathlib import Path
from megajax.observe.goodput import Clock
from megajax.observe.goodput import Ledger
ledger = Ledger(Path(sys.argv[1]), Clock(), 0)
print("ready", flush=True)
step = 0
while True:
    step += 1
    ledger.done(step)
    ledger.save()
"""


@pytest.mark.slow
def test_survives_kill_9(tmp_path):
    path = tmp_path / "goodput.json"
    for kills in range(1, 5):
        with subprocess.Popen([sys.executable, "-c", WRITER, str(path)], stdout=subprocess.PIPE) as process:
            process.stdout.readline()
            time.sleep(0.01 * kills)
            process.send_signal(signal.SIGKILL)
        starts = json.loads(path.read_text())["starts"]
        assert len(starts) == kills and starts[-1]["step"] > 0
