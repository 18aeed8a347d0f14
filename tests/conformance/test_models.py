"""Some architectures of ``make models``, and how that command reports its results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from conformance.architectures import ARCHITECTURES
from conformance.comparison import Different, compare
from conformance.libraries import Network
from conformance.models import document, how_it_ran, read
from conformance.trial import SIZES, WAYS, Trial, attempt


# Others, such as BERT, GPT-2 and Llama, have their own tests.
@pytest.mark.filterwarnings("ignore")  # raised by transformers
@pytest.mark.parametrize("name", ["t5", "swin"])
def test_architecture(name: str) -> None:
    pytest.importorskip("transformers")
    trial = attempt(name, ARCHITECTURES[name], SIZES[:2])
    assert trial.right, trial.difference
    assert trial.compiled, trial.reason


def a_network(build: Callable[[], nn.Module]) -> Network:
    return Network(
        "a library",
        build,
        lambda sizes: {"rows": torch.randn(sizes[0], 3)},
        lambda network, inputs: [network(inputs["rows"])],
    )


@pytest.mark.parametrize("way", WAYS)
def test_a_network_may_be_called_in_its_own_way(way: str) -> None:
    trial = attempt("linear", a_network(lambda: nn.Linear(3, 4).eval()), way=way)
    assert trial.right, trial.difference
    assert trial.compiled, trial.reason
    assert trial.programs == 2
    assert trial.graphs == (way == "torch.compile")


class Broken(nn.Module):
    """Has a graph break, and after it a graph that computes nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        torch._dynamo.graph_break()
        return y.t()


def test_graphs_of_torch_compile_are_counted_with_their_reasons() -> None:
    trial = attempt("broken", a_network(lambda: Broken().eval()), way="torch.compile")
    assert trial.right, trial.difference
    assert not trial.compiled
    assert (trial.graphs, trial.eager_graphs) == (2, 1)
    assert "graph_break" in trial.reason
    assert "computes no tensors" in trial.reason
    assert how_it_ran(trial).startswith("2 graphs, 1 in eager: ")


class Twice(nn.Module):
    """Gives other results under ``torch.compile``."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 1 if torch.compiler.is_compiling() else x + 2


def test_wrong_result_of_torch_compile_is_found() -> None:
    trial = attempt("twice", a_network(Twice), way="torch.compile")
    assert not trial.right
    assert "error" in trial.difference


class Cache:
    def __init__(self, value: Any) -> None:
        self.value = value


@pytest.mark.parametrize(
    "result",
    [
        {"a": torch.ones(2), "c": (1, None)},
        {"a": torch.ones(2), "b": [1, None]},
        {"a": torch.ones(2), "b": (1, torch.ones(1))},
        {"a": torch.ones(2).double(), "b": (1, None)},
        {"a": torch.ones(2, 1), "b": (1, None)},
        {"a": torch.tensor([1.0, 1.001]), "b": (1, None)},
        {"a": torch.tensor([1.0, torch.nan]), "b": (1, None)},
        {"a": torch.ones(2), "b": (2, None)},
        Cache(torch.ones(2)),
    ],
    ids="keys sequence number dtype shape values nan constant class".split(),
)
def test_difference_is_found(result: Any) -> None:
    eager = {"a": torch.ones(2), "b": (1, None)}
    compare(eager, eager, eager)
    with pytest.raises(Different):
        compare(result, eager, eager)


def test_objects_are_compared_by_their_attributes() -> None:
    compare(Cache(torch.ones(2)), Cache(torch.ones(2)), None)
    with pytest.raises(Different, match=r"result\.value"):
        compare(Cache(torch.ones(2)), Cache(torch.zeros(2)), None)


def test_last_result_of_an_architecture_counts(tmp_path: Path) -> None:
    trials = [
        Trial("gpt2", right=True, reason="a reason"),
        Trial("bert", right=True, compiled=True),
        Trial("gpt2", right=True, compiled=True, bridged={"aten.topk": 2}),
        Trial("vit", difference="the process died"),
        Trial("bert", difference="result differs", way="torch.compile"),
        Trial("gpt2", right=True, compiled=True, graphs=1, programs=3, way="torch.compile"),
    ]
    lines = [json.dumps(asdict(trial)) for trial in trials]
    (tmp_path / "trials.jsonl").write_text("\n".join(lines))
    decorated, compiled = (read(tmp_path, ARCHITECTURES, way) for way in WAYS)
    assert list(decorated) == ["bert", "gpt2", "vit"]
    assert list(compiled) == ["bert", "gpt2"]
    text = document(decorated, compiled)
    assert text.startswith(
        "2 of 3 networks are right; 2 are one compiled program, 1 of them without a call of "
        "PyTorch's. Through `torch.compile`, 1 of 2 are right; 1 are one graph, all of it "
        "compiled.\n"
    )
    last = [row.split(" | ")[-1] for row in text.splitlines()[-3:]]
    assert last == ["no: result differs |", "compiled; 3 programs |", " |"]
