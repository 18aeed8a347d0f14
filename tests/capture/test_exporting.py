"""Code that ``torch.export`` cannot record, and the reasons given for it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx, nn

from tvmify import tvmify as decorate
from tvmify.capture import capture
from tvmify.errors import DependsOnValues, NeedsPython

CASES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "aten.equal": lambda x: x + 1 if torch.equal(x, x.abs()) else x - 1,
    "aten.allclose": lambda x: x + 1 if torch.allclose(x, -x) else x - 1,
    "aten.linalg_lstsq": lambda x: torch.linalg.lstsq(x, x + 1).solution,
}


@pytest.mark.parametrize("operator", CASES)
def test_an_operator_that_reads_values_is_named(operator: str) -> None:
    function = decorate(CASES[operator], strict=True, cache=False)
    place = r"depends on the values of tensors \(.*test_exporting.py:\d+\)"
    with torch.inference_mode(), pytest.raises(DependsOnValues, match=f"{operator}.*{place}"):
        function(torch.eye(3))


def test_questions_of_a_graph_module_are_noticed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    offset = graph.call_method("storage_offset", (x,))
    graph.output(graph.call_function(torch.add, (x, offset)))
    module = fx.GraphModule(nn.Module(), graph)
    with pytest.raises(NeedsPython, match="asks for storage_offset"):
        capture(module, (torch.zeros(2),), {})
