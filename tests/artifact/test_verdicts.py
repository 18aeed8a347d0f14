"""The keys of verdicts: how they are stored, shown and read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tests.cache.programs import artifact_of
from tvmify.artifact import Artifact, Seconds, VerdictKey

KEYS = st.builds(VerdictKey, st.integers(1, 1 << 20), st.booleans())


@given(KEYS)
def test_keys_round_trip(key: VerdictKey) -> None:
    assert VerdictKey.from_json(key.to_json()) == key


def test_stored_verdicts_are_read_and_those_of_other_versions_left_out() -> None:
    made = artifact_of(0)
    stored = {"8": [1.0, 2.0], "8 with CUDA graphs": [3.0, 4.0], "8 on the moon": [5.0, 6.0]}
    read = Artifact.from_description(made.library, made.description() | {"verdicts": stored})
    plain, graphs = VerdictKey(8), VerdictKey(8, graphs=True)
    assert read.verdicts == {plain: Seconds(1.0, 2.0), graphs: Seconds(3.0, 4.0)}
    assert list(read.description()["verdicts"]) == list(stored)[:2]
    assert (str(plain), str(graphs)) == ("8 threads", "8 threads with CUDA graphs")
