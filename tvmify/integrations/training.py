"""Graphs that need gradients, or have transforms of ``torch.func``: AOTAutograd resolves both.

It makes a forward, and a backward if there are gradients; each is compiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import fx
from torch._decomp import get_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd import runtime_wrappers
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode

from tvmify.integrations.control_flow import calls_of
from tvmify.integrations.dynamo_graph import Origin
from tvmify.options import CompileOptions

#: Operators with several results: for sizes that vary, the compiler computes only the first.
_DECOMPOSED = (torch.ops.aten.native_layer_norm,)

#: A mode of AOTAutograd's; other versions of PyTorch may have none.
_LOOKS_FOR_CUSTOM_OPERATORS = getattr(runtime_wrappers, "_AnalyzeCustomOpInputOutputMode", ())


def with_autograd(
    module: fx.GraphModule, example_inputs: Sequence[Any], origin: Origin, options: CompileOptions
) -> Any:
    """Compile a graph of Dynamo, and the graph of its gradients.

    Weights are arguments of both: they change with each step, so packing them would not pay.

    Parameters
    ----------
    module, example_inputs
        As for `backend`.
    origin
        The origin of the graph.
    options
        The options of the backend.
    """
    varies = any(isinstance(value, torch.SymInt) for value in example_inputs)
    made = aot_autograd(
        fw_compiler=partial(_compile, origin=origin.part("forward"), options=options),
        bw_compiler=partial(_compile, origin=origin.part("backward"), options=options),
        partition_fn=min_cut_rematerialization_partition,
        decompositions=get_decompositions(_DECOMPOSED) if varies else {},
    )
    return made(module, example_inputs)


def _compile(
    module: fx.GraphModule, inputs: Sequence[Any], *, origin: Origin, options: CompileOptions
) -> Callable[[list[Any]], Any]:
    # Results of a compiled forward are contiguous, whatever strides the backward was traced with.
    for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        node.target = torch.ops.aten.reshape.default
    module.recompile()
    calls = calls_of(module, inputs, origin, options, weights_are_state=False)

    as_strided = torch.ops.aten.as_strided.default
    reads_memory = bool(module.graph.find_nodes(op="call_function", target=as_strided))

    def run(*args: Any) -> Any:
        # Strides that decide whether a result is a view or a copy would keep the call in eager. To
        # AOTAutograd the two are the same.
        args = args if reads_memory else tuple(map(_contiguous, args))
        # In the first call, AOTAutograd looks for custom operators; there are none here.
        if isinstance(_get_current_dispatch_mode(), _LOOKS_FOR_CUSTOM_OPERATORS):
            with _disable_current_modes():
                return calls(*args)
        return calls(*args)

    return make_boxed_func(run)


def _contiguous(value: Any) -> Any:
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.contiguous() if is_strided else value
