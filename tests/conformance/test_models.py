"""Some architectures of ``make models``, and how that command reports its results."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from conformance.architectures import ARCHITECTURES
from conformance.comparison import Different, compare
from conformance.libraries import Network
from conformance.models import read, summary
from conformance.trial import SIZES, Trial, attempt


# Others, such as BERT, GPT-2 and Llama, have their own tests.
@pytest.mark.filterwarnings("ignore")  # raised by transformers
@pytest.mark.parametrize("name", ["t5", "wav2vec2"])
def test_architecture(name: str) -> None:
    pytest.importorskip("transformers")
    trial = attempt(name, ARCHITECTURES[name], SIZES[:2])
    assert trial.right, trial.difference
    assert trial.compiled, trial.reason


def test_a_network_may_be_called_in_its_own_way() -> None:
    network = Network(
        "a library",
        lambda: torch.nn.Linear(3, 4).eval(),
        lambda sizes: {"rows": torch.randn(sizes[0], 3)},
        lambda network, inputs: [network(inputs["rows"])],
    )
    trial = attempt("linear", network)
    assert trial.right, trial.difference
    assert trial.compiled, trial.reason
    assert trial.programs == 2


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
    ]
    lines = [json.dumps(asdict(trial)) for trial in trials]
    (tmp_path / "trials.jsonl").write_text("\n".join(lines))
    known = read(tmp_path, ARCHITECTURES)
    assert list(known) == ["bert", "gpt2", "vit"]
    assert summary(known.values()) == (
        "2 of 3 networks are right; 2 are one compiled program, 1 of them without a call of "
        "PyTorch's."
    )
