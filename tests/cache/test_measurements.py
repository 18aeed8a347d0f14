from __future__ import annotations

import math
from pathlib import Path

import pytest

from tests.processes import run_python
from tvmify.cache import Measurements
from tvmify.errors import TvmifyWarning

TIMES = {"rule's": 3.0, "other": 2.0, "third": math.inf}
NAMES = list(TIMES)


def test_the_fastest_is_the_best(tmp_path: Path) -> None:
    measurements = Measurements(tmp_path, "cpu")
    assert measurements.best("work", NAMES) is None
    measurements.record("work", TIMES)
    assert measurements.best("work", NAMES) == "other"
    assert measurements.best("work", ["rule's", "third"]) == "rule's"
    assert measurements.best("work", [*NAMES, "new"]) is None


def test_noise_does_not_overrule_the_rule(tmp_path: Path) -> None:
    measurements = Measurements(tmp_path, "cpu")
    measurements.record("work", {"rule's": 1.0, "other": 0.99})
    assert measurements.best("work", ["rule's", "other"]) == "rule's"


def test_unmeasurable_workload_is_left_to_the_rule(tmp_path: Path) -> None:
    measurements = Measurements(tmp_path, "cpu")
    measurements.record("work", dict.fromkeys(NAMES, math.inf))
    assert measurements.best("work", NAMES) == "rule's"


def test_another_process_reads_and_adds(tmp_path: Path) -> None:
    Measurements(tmp_path, "cpu").record("work", TIMES)
    script = (
        "import sys; from pathlib import Path; from tvmify.cache import Measurements\n"
        "m = Measurements(Path(sys.argv[1]), 'cpu')\n"
        "assert m.best('work', ['rule\\'s', 'other']) == 'other'\n"
        "m.record('second', {'a': 2.0, 'b': 1.0})\n"
    )
    run_python(script, tmp_path)
    measurements = Measurements(tmp_path, "cpu")
    assert len(measurements) == 2
    assert measurements.best("second", ["a", "b"]) == "b"


def test_processors_do_not_share(tmp_path: Path) -> None:
    Measurements(tmp_path, "cpu with 2 threads").record("work", TIMES)
    assert Measurements(tmp_path, "cpu with 1 thread").best("work", NAMES) is None


def test_damaged_lines_cost_no_other(tmp_path: Path) -> None:
    measurements = Measurements(tmp_path, "cpu")
    measurements.record("first", TIMES)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    nonsense = [b"[]", b"null", b"\xff\xfe", b"{}", b'{"processor": 3}']
    odd = whole.replace(b"3.0", b'"fast"').replace(b"first", b"odd").strip()
    path.write_bytes(b"\n".join([whole, *nonsense, odd, whole[: len(whole) // 2]]))
    measurements.record("last", TIMES)  # after an incomplete line
    again = Measurements(tmp_path, "cpu")
    assert again.best("first", NAMES) == "other"
    assert again.best("last", NAMES) == "other"
    assert again.best("odd", NAMES) is None


def test_without_a_directory_they_stay_in_memory() -> None:
    measurements = Measurements(None, "cpu")
    measurements.record("work", TIMES)
    assert measurements.best("work", NAMES) == "other"


def test_unwritable_directory_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    measurements = Measurements(tmp_path / "file", "cpu")
    with pytest.warns(TvmifyWarning, match="kept in memory only"):
        measurements.record("work", TIMES)
    measurements.record("more", TIMES)  # warns once
    assert measurements.best("work", NAMES) == "other"


def test_world_writable_file_is_not_read(tmp_path: Path) -> None:
    place = tmp_path / "cache"
    Measurements(place, "cpu").record("work", TIMES)
    assert Measurements(place, "cpu").best("work", NAMES) == "other"
    place.chmod(0o777)
    measurements = Measurements(place, "cpu")
    assert measurements.best("work", NAMES) is None
    with pytest.warns(TvmifyWarning, match="chmod 700"):
        measurements.record("work", TIMES)
    place.chmod(0o700)
    (path,) = place.iterdir()
    path.rename(tmp_path / "other")
    path.symlink_to(tmp_path / "other")
    measurements = Measurements(place, "cpu")
    assert measurements.best("work", NAMES) is None
    with pytest.warns(TvmifyWarning, match="kept in memory only"):
        measurements.record("work", TIMES)
