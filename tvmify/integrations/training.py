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
from tvmify.torch_compat.layouts import inverse, memory_order
from tvmify.torch_compat.multilabel_margin import spell_out

#: Operators with several results: for sizes that vary, the compiler computes only the first.
_DECOMPOSED = (torch.ops.aten.native_layer_norm,)

#: Call an operator that draws random numbers, on the CPU: one returns the state of the generator
#: before it as well, the other takes it.
_SAVES_STATE = torch.ops.higher_order.run_and_save_rng_state
_HAS_STATE = torch.ops.higher_order.run_with_rng_state

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
    spell_out(module)
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
    if not any(isinstance(value, torch.Tensor) and value.is_cuda for value in inputs):
        _read_states(module.graph)
    _keep_layouts(module.graph)
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


def _read_states(graph: fx.Graph) -> None:
    """Read the state of the random generator before operators that a checkpoint will repeat.

    AOTAutograd has one call for both, which takes the operator as an argument.
    """
    for node in graph.find_nodes(op="call_function", target=_SAVES_STATE):
        drawn, *args = node.args
        with graph.inserting_before(node):
            state = graph.call_function(torch.ops.tvmify.rng_state.default)
            result = graph.call_function(drawn, tuple(args), node.kwargs)
        for field in list(node.users):
            field.replace_all_uses_with((state, result)[field.args[1]])
            graph.erase_node(field)
        graph.erase_node(node)
    for node in graph.find_nodes(op="call_function", target=_HAS_STATE):
        # not the recorded example, whose size may be a symbol
        node.args[0].meta["val"] = torch.get_rng_state()


def _keep_layouts(graph: fx.Graph) -> None:
    """Lay arguments out in memory as in eager, where random numbers are drawn in that order."""
    if not any(map(_draws, graph.nodes)):
        return
    for place in graph.find_nodes(op="placeholder"):
        value = place.meta.get("val")
        order = memory_order(value) if isinstance(value, torch.Tensor) else None
        if order is None:
            continue
        readers = [user for user in place.users if user.op != "output"]
        with graph.inserting_after(place):
            permuted = graph.call_function(torch.ops.aten.permute.default, (place, order))
        with graph.inserting_after(permuted):
            laid_out = graph.call_method("contiguous", (permuted,))
        with graph.inserting_after(laid_out):
            restored = graph.call_function(
                torch.ops.aten.permute.default, (laid_out, inverse(order))
            )
        for user in readers:
            user.replace_input_with(place, restored)


def _draws(node: fx.Node) -> bool:
    target = node.args[1] if node.target is _HAS_STATE else node.target
    return torch.Tag.nondeterministic_seeded in getattr(target, "tags", ())


def _contiguous(value: Any) -> Any:
    is_strided = isinstance(value, torch.Tensor) and value.layout is torch.strided
    return value.contiguous() if is_strided else value
