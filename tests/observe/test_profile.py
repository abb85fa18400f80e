"""A profiler window leaves a trace of its steps."""

import jax
import jax.numpy as jnp
import pytest

from megajax.config.base import InputError
from megajax.config.config import ProfileConfig
from megajax.observe.profile import ProfileWindow

square = jax.jit(lambda x: x @ x / 8)


def run_steps(config, directory, steps):
    state = jnp.ones((8, 8))
    with ProfileWindow(config, directory) as profile:
        for step in steps:
            with profile.step(step, state):
                state = square(state)


def traces(directory):
    return list(directory.rglob("*.xplane.pb"))


@pytest.mark.parametrize(
    ("config", "steps"),
    [
        (ProfileConfig(start=3, stop=4), range(1, 8)),
        (ProfileConfig(start=3), range(1, 8)),
        (ProfileConfig(start=3, stop=10), range(1, 5)),  # training ends inside
        (ProfileConfig(start=3, stop=10), range(6, 13)),  # resumed inside
    ],
)
def test_trace_is_written(tmp_path, capsys, config, steps):
    run_steps(config, tmp_path / "profile", steps)
    (trace,) = traces(tmp_path)
    assert b"train" in trace.read_bytes()
    assert capsys.readouterr().out == f"profile written: pip install xprof && xprof --logdir={tmp_path / 'profile'}\n"


def test_only_steps_of_the_window_are_in_the_trace(tmp_path):
    run_steps(ProfileConfig(start=3, stop=4), tmp_path, range(1, 8))
    data = jax.profiler.ProfileData.from_file(str(traces(tmp_path)[0]))
    names = [event.name for plane in data.planes for line in plane.lines for event in line.events]
    assert names.count("train") == 2


@pytest.mark.parametrize(
    ("config", "steps"),
    [(ProfileConfig(), range(1, 5)), (ProfileConfig(start=3, stop=4), range(5, 9))],
    ids=["no window", "resumed behind it"],
)
def test_nothing_is_written(tmp_path, config, steps):
    run_steps(config, tmp_path / "profile", steps)
    assert not list(tmp_path.iterdir())


def test_a_run_that_fails_inside_leaves_its_trace(tmp_path):
    with pytest.raises(KeyError), ProfileWindow(ProfileConfig(start=1), tmp_path) as profile, profile.step(1, ()):
        raise KeyError
    assert len(traces(tmp_path)) == 1


@pytest.mark.parametrize("config", [ProfileConfig(stop=3), ProfileConfig(start=4, stop=3)])
def test_empty_window(tmp_path, config):
    with pytest.raises(InputError, match=r"profile.stop 3 needs a profile.start up to it"):
        ProfileWindow(config, tmp_path)
