"""Calls of production, recorded and read back."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils import _pytree as pytree

from tvmify import NotCompiled, TvmifyWarning, WarmUpError
from tvmify import tvmify as decorate
from tvmify.dispatch import recording
from tvmify.dispatch.recording import Recorded
from tvmify.dispatch.recording.modes import entered, modes_now
from tvmify.dispatch.subject import Name

X = torch.linspace(-1, 1, 12).reshape(3, 4)


class Pair(NamedTuple):
    left: Any
    right: Any


class Net(nn.Module):
    def forward(self, x: torch.Tensor, *rest: Any, **named: Any) -> torch.Tensor:
        return x + 1


@pytest.fixture(autouse=True)
def _nothing_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "_written", set())
    monkeypatch.setattr(recording, "_warned", set())


def recorded_of(*args: Any, **kwargs: Any) -> Recorded:
    return Recorded.of(Name("Net", "forward"), args, kwargs, training=False)


def back(value: Any) -> Any:
    """Return a value after writing it to a line and reading it back."""
    return Recorded.from_json(recorded_of(value).to_json()).call()[0][0]


# ------------------------------------------------------------------------------------ arguments


@pytest.mark.parametrize(
    "value",
    [
        None,
        True,
        1,
        1.0,
        float("inf"),
        -0.0,
        "1.0",
        "",
        torch.float16,
        torch.device("cpu"),
        (),
        [],
        {},
        (1,),
        [1],
        {"a": 1, 2: [None]},
        {"tensor": [1, 2], "dtype": "float32", "device": "cpu"},
        {"float": "1"},
        ((1, 2.0), [True, {"b": (None,)}]),
        Pair(1, [2]),
        OrderedDict(b=1, a=2),
    ],
    ids=repr,
)
def test_values_round_trip(value: Any) -> None:
    result = back(value)
    assert repr(result) == repr(value)
    assert pytree.tree_structure(result) == pytree.tree_structure(value)


def test_nan_round_trips() -> None:
    assert repr(back(float("nan"))) == "nan"


_scalars = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
_trees = st.recursive(
    _scalars,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.lists(inner, max_size=3).map(tuple)
        | st.dictionaries(st.text() | st.integers() | st.booleans(), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(_trees)
def test_trees_round_trip(value: Any) -> None:
    result = back(value)
    assert repr(result) == repr(value)


@pytest.mark.parametrize(
    "tensor",
    [
        X,
        X.t(),
        X[:, :1].expand(3, 4),
        X[:, 1:3],
        X.to(torch.bfloat16),
        torch.zeros(0, 4).t(),
        torch.tensor(3),
        torch.ones(2, 3, 4, 5).to(memory_format=torch.channels_last),
    ],
)
def test_tensors_come_back_as_zeros_of_their_kind(tensor: torch.Tensor) -> None:
    result = back(tensor)
    assert (result.shape, result.dtype, result.device) == (
        tensor.shape,
        tensor.dtype,
        tensor.device,
    )
    assert tensor.is_contiguous() or result.stride() == tensor.stride()
    assert not result.any()


def test_gpu_tensors_are_recreated_without_a_gpu() -> None:
    recorded = recorded_of([torch.zeros(2, 3)], x=torch.zeros(4))
    line = recorded.to_json().replace('"device": "cpu"', '"device": "cuda:1"')
    elsewhere = Recorded.from_json(line)
    with pytest.raises(WarmUpError, match="cannot be made"):
        elsewhere.call()
    (tensors,), named = elsewhere.call(on_cpu=True)
    assert [tuple(x.shape) for x in (*tensors, named["x"])] == [(2, 3), (4,)]


def test_requires_grad_is_recorded_where_gradients_are_enabled() -> None:
    wanted = X.clone().requires_grad_()
    assert back(wanted).requires_grad
    with torch.no_grad():
        assert not back(wanted).requires_grad


def test_a_cache_among_the_arguments_is_said() -> None:
    named = Name("Net", "encode", with_cache=True)
    line = Recorded.of(named, (X,), {}, training=False).to_json()
    recorded = Recorded.from_json(line)
    assert (recorded.module, recorded.method, recorded.with_cache) == ("Net", "encode", True)
    assert str(recorded) == "Net.encode with a cache(float32[3, 4])"
    assert "with_cache" not in recorded_of(X).to_json()  # so that earlier versions can read it
    with pytest.raises(WarmUpError):
        Recorded.from_json(line.replace('"with_cache": true', '"with_cache": 1'))


@pytest.mark.parametrize("value", [object(), 1j, b"", {1, 2}, [X.to_sparse()]])
def test_unrecordable_value_raises(value: Any) -> None:
    with pytest.raises(WarmUpError):
        recorded_of(value)


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        "null",
        '{"version": 2}',
        json.dumps({"version": 1, "module": "Net"}),
        json.dumps(
            {"version": 1, "module": 1, "method": "", "args": [], "kwargs": {}, "modes": {}}
        ),
        recorded_of(1).to_json().replace('"version": 1', '"version": 2'),
        recorded_of(1).to_json()[:-20],
        recorded_of(1).to_json().replace('"threads": ', '"threads": "two", "x": '),
        recorded_of({}).to_json().replace('"dict": []', '"dict": [1]'),
    ],
)
def test_invalid_signature_is_refused(line: str) -> None:
    with pytest.raises(WarmUpError):
        Recorded.from_json(line)


@pytest.mark.parametrize(
    "tree",
    [
        {"tensor": [1], "dtype": "load", "device": "cpu"},
        {"tensor": [-1], "dtype": "float32", "device": "cpu"},
        {"tensor": "ab", "dtype": "float32", "device": "cpu"},
        {"tensor": [2, 3], "dtype": "float32", "device": "cpu", "strides": [1]},
        {"dtype": "os.system"},
        {"device": "nowhere"},
        {"float": "__import__('os')"},
        {"object": "os.system"},
        {"structure": "os.system", "leaves": []},
        {"structure": '[1, {"type": "os.system", "context": null, "children_spec": []}]'},
        {
            "structure": '[1, {"type": "collections.namedtuple", "context": "no.Such", '
            '"children_spec": []}]',
            "leaves": [],
        },
    ],
)
def test_a_forged_tree_makes_nothing(tree: Any) -> None:
    recorded = Recorded("Net", "forward", [tree], {}, {})
    with pytest.raises((WarmUpError, NotCompiled)):
        recorded.call()
    str(recorded)


def test_reading_imports_nothing() -> None:
    tree = {"structure": recorded_of(Pair(1, 2)).args[0]["structure"], "leaves": [1, 2]}
    forged = json.loads(json.dumps(tree).replace(__name__, "antigravity"))
    with pytest.raises((WarmUpError, NotCompiled)):
        Recorded("Net", "forward", [forged], {}, {}).call()


# ---------------------------------------------------------------------------------------- modes


def test_modes_round_trip() -> None:
    with torch.inference_mode(), torch.autocast("cpu", torch.float16):
        torch.set_default_dtype(torch.float64)
        try:
            modes = modes_now()
        finally:
            torch.set_default_dtype(torch.float32)
    before = modes_now()
    assert modes != before
    with entered(json.loads(json.dumps(modes))):
        assert modes_now() == modes
        with entered(before):
            assert modes_now() == before
    assert modes_now() == before


# ----------------------------------------------------------------------------------------- files


def test_each_signature_is_written_once(tmp_path: Path, inference: None) -> None:
    file = tmp_path / "signatures.jsonl"
    nets: list[Any] = [decorate(Net().eval(), record=file, on_miss="eager") for _ in range(2)]
    with pytest.warns(TvmifyWarning, match="no cache has its program"):
        for net in nets:
            for _ in range(3):
                net(X)
                net(X[:1])
    found, unreadable = recording.read(file)
    assert [str(r) for r in found] == ["Net(float32[3, 4])", "Net(float32[1, 4])"]
    assert not unreadable
    assert len(file.read_text().split()) > 2
    assert file.read_bytes().count(b"version") == 2
    assert found[0].modes["grad"] == "inference"
    assert found[0].modes["training"] is False
    assert file.stat().st_mode & 0o777 == 0o600


def test_the_variable_names_a_file_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, inference: None
) -> None:
    file = tmp_path / "signatures.jsonl"
    monkeypatch.setenv("TVMIFY_RECORD", str(file))

    class Codec(nn.Module):
        def encode(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2

    def double(x: torch.Tensor, *, times: int) -> torch.Tensor:
        return x * times

    options: dict[str, Any] = {"on_miss": "eager"}
    with pytest.warns(TvmifyWarning, match="no cache has its program"):
        decorate(Codec().eval(), methods=["encode"], **options).encode(X)
        decorate(double, **options)(X, times=3)
    first, second = recording.read(file).found
    assert (first.module, first.method) == ("Codec", "encode")
    assert (second.module, second.method) == (double.__qualname__, "")
    assert second.kwargs == {"times": 3}


@pytest.mark.filterwarnings("ignore:.*no cache has its program")
@pytest.mark.usefixtures("inference")
def test_a_relative_file_does_not_follow_chdir(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"signatures of {tmp_path.name}"
    monkeypatch.setenv("TVMIFY_RECORD", name)
    net: Any = decorate(Net().eval(), on_miss="eager")
    (tmp_path / "later").mkdir()
    for folder, rows in (("", 3), ("later", 1)):
        monkeypatch.chdir(tmp_path / folder)
        net(X[:rows])
    assert len(recording.read(tmp_path / name).found) == 2


@pytest.mark.usefixtures("inference")
@pytest.mark.filterwarnings("ignore:.*no cache has its program")
def test_a_file_of_an_unknown_home_is_a_warning() -> None:
    with pytest.warns(TvmifyWarning, match="signatures are not recorded: .*No such file"):
        decorate(Net().eval(), record="~nobody of that name/x", on_miss="eager")(X)


def test_torn_line_is_skipped(tmp_path: Path) -> None:
    file = tmp_path / "signatures.jsonl"
    line = recorded_of(X).to_json()
    file.write_text(f"\n{line[: len(line) // 2]}")
    recording.append(file, line)
    found, unreadable = recording.read(file)
    assert [r.to_json() for r in found] == [line]
    assert unreadable == 1


def test_unrecordable_call_warns_once(tmp_path: Path, inference: None) -> None:
    file = tmp_path / "signatures.jsonl"
    net: Any = decorate(Net().eval(), record=file, on_miss="eager")
    with pytest.warns(TvmifyWarning) as record:
        for _ in range(2):
            net(X, X.to_sparse())
            net(X, 1j)
    said = [str(w.message) for w in record if "is not recorded" in str(w.message)]
    assert ["sparse" in message for message in said] == [True, False]
    assert not file.exists()


def test_unwritable_file_warns_once(tmp_path: Path, inference: None) -> None:
    net: Any = decorate(Net().eval(), record=tmp_path)
    with pytest.warns(TvmifyWarning, match="are not recorded: .* Is a directory") as record:
        assert torch.allclose(net(X), X + 1)
        net(X[:1])
    assert len(record) == 1


def test_unread_pipe_does_not_block(tmp_path: Path, inference: None) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    net = decorate(nn.ReLU().eval(), record=pipe, cache=False)
    with pytest.warns(TvmifyWarning, match=r"not recorded: .*pipe"):
        net(torch.ones(2))
    with pytest.raises(OSError, match="not a regular file"):
        recording.read(pipe)


def test_hits_are_not_recorded(tmp_path: Path, inference: None, monkeypatch: Any) -> None:
    net: Any = decorate(Net().eval(), record=tmp_path / "signatures.jsonl")
    net(X)
    monkeypatch.setattr(recording, "record", None)
    net(X)
