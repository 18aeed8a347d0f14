"""One saved model that many threads call at once; `make soak-serving` makes 100,000 calls."""

from __future__ import annotations

import threading

import pytest
import torch

import tvmify
from benchmarks import serving


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    path = tmp_path_factory.mktemp("saved") / "model.pt"
    inputs = serving.requests()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TVMIFY_CACHE_DIR", str(path.parent / "cache"))
        patch.setenv("TVMIFY_COMPARE", "0")
        tvmify.save(serving.model(), path, signatures=[(inputs[0],), (inputs[1],)])
    return tvmify.load(path, strict=True)


def test_eight_threads_match_one(loaded):
    inputs = serving.requests()
    with torch.inference_mode():
        accepted = [[loaded(x)] for x in inputs]
    serving.under_load(loaded, inputs, accepted, threads=8, calls=800)
    load = serving.under_load(loaded, inputs, accepted, threads=8, calls=4000)
    assert load.wrong == 0
    assert load.growth < 0.01


def test_weight_updates_are_atomic_to_calls(loaded):
    inputs, sets = serving.requests(), serving.two_sets(loaded)
    accepted = serving.answers(loaded, inputs, sets)
    assert not any(torch.allclose(*right) for right in accepted)
    with serving.Reloading(loaded, sets) as reloading:
        load = serving.under_load(loaded, inputs, accepted, threads=4, calls=4000)
    assert load.wrong == 0
    assert reloading.loads > 10
    # afterwards, the next call uses the new weights
    loaded.load_state_dict(sets[1])
    assert torch.equal(loaded(inputs[0]), accepted[0][1])


def test_calls_do_not_wait_for_weight_replacement(loaded):
    inputs, sets = serving.requests(), serving.two_sets(loaded)
    accepted = serving.answers(loaded, inputs, sets)
    native = loaded._tvmify
    native.hold_weights()
    loaded.state_dict()["0.weight"].zero_()
    seen = []
    thread = threading.Thread(target=lambda: seen.append(loaded(inputs[0])))
    thread.start()
    thread.join(60)
    native.release_weights()
    assert torch.equal(seen[0], accepted[0][0])
    assert not torch.equal(loaded(inputs[0]), accepted[0][0])
    loaded.load_state_dict(sets[0])


def test_weights_are_replaced_inside_of_another_module(loaded):
    outer = torch.nn.Sequential(loaded)
    (x, *_), sets = serving.requests(), serving.two_sets(loaded)
    (right,) = serving.answers(loaded, [x], sets)
    outer.load_state_dict({f"0.{name}": value for name, value in sets[1].items()})
    assert torch.equal(outer(x), right[1])
    outer.load_state_dict({f"0.{name}": value for name, value in sets[0].items()})
    assert torch.equal(outer(x), right[0])


def test_unserved_call_does_not_disturb_others(loaded):
    inputs = serving.requests()
    with torch.inference_mode():
        accepted = [[loaded(x)] for x in inputs]
    over = threading.Event()

    def disturb() -> None:
        while not over.is_set():
            with pytest.raises(RuntimeError, match="it holds no code for these arguments"):
                loaded(torch.randn(3, 3, 32, 32))

    thread = threading.Thread(target=disturb)
    thread.start()
    load = serving.under_load(loaded, inputs, accepted, threads=4, calls=1000)
    over.set()
    thread.join()
    assert load.wrong == 0
