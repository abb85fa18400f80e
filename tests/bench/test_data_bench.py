"""The benchmarks of the data path run, also where megatron-core is not installed."""

from pathlib import Path

import pytest

from bench import blend_fifteen, index_building, loader_speed


def test_shares_of_fifteen_sources(capsys: pytest.CaptureFixture[str]):
    assert blend_fifteen.main(["--samples", "100000"]) == 0
    assert "OpenWebText2        0.19336    19,336  0.19336   0.0000%" in capsys.readouterr().out


def test_builds_are_called_equal_only_if_they_are():
    ours, theirs = index_building.builds_of(documents=1000, epochs=4)
    seconds, _, equal = index_building.compare(ours, theirs, rounds=1)
    assert seconds > 0
    assert equal is (None if theirs is None else True)  # nothing is said where there is nothing to compare
    assert index_building.compare(ours, ours, rounds=1)[2] is True

    def other():
        document_index, *rest = ours()
        return [document_index[::-1], *rest]

    assert index_building.compare(ours, other, rounds=1)[2] is False


def test_readers_agree(tmp_path: Path):
    readers = loader_speed.readers_of(tmp_path, documents=200)
    one, *others = [[row.tolist() for batch in read(5, 20) for row in batch] for read in readers.values()]
    assert len(one) == 20
    assert all(other == one for other in others)
