"""Merge consecutive small kernels that start no threads into one function. The virtual machine
takes half a microsecond to allocate memory for a kernel and call it, as long as many gathers and
copies run. Kernels have been scheduled before, and keep their own loops.
"""

from __future__ import annotations

from collections.abc import Mapping

import tvm
from tvm import relax, s_tir, tirx

from tvmify.compiler.kernels.common.attributes import ASSERTS
from tvmify.compiler.kernels.common.bounds import has_symbols
from tvmify.compiler.kernels.common.rewriting import rewrite_body, with_new_variables
from tvmify.compiler.kernels.elementwise.shuffles import SHUFFLES
from tvmify.compiler.kernels.finish.handwritten import STORES_TWICE
from tvmify.compiler.kernels.matmul.pairs import PAIRS
from tvmify.compiler.passes.bind_sizes import Bindings
from tvmify.compiler.passes.compiler_pass import compiler_pass
from tvmify.compiler.sizes import variables_of

#: Functions of more parts would cost more compile time than they save.
_MOST = 128
#: Attributes for `build` that a function inherits from any of its parts.
_SAID = (ASSERTS, SHUFFLES, PAIRS)

Kernels = Mapping[tvm.ir.GlobalVar, tirx.PrimFunc]


@compiler_pass
class MergeSerial:
    """Merge runs of calls of serial kernels in ``main``."""

    def rewrite_module(self, ir_mod: tvm.IRModule) -> tvm.IRModule:
        """Rewrite ``main``, and let FuseTIR concatenate the loops."""
        main = ir_mod["main"]
        kernels = {}
        for variable, function in ir_mod.functions_items():
            if not isinstance(function, tirx.PrimFunc) or not _is_mergeable(function):
                continue
            own = _with_own_variables(function) if has_symbols(function) else function
            if own is not None:
                kernels[variable] = own
                ir_mod.update_func(variable, own)
        builder = relax.BlockBuilder(ir_mod)
        merging = _Merging(builder, kernels, main)
        blocks = [type(block)(merging.rewritten(block)) for block in main.body.blocks]
        if not merging.merged:
            return ir_mod
        ir_mod = builder.get()
        body = relax.SeqExpr(blocks, main.body.body)
        ir_mod["main"] = relax.Function(main.params, body, main.ret_ty, True, main.attrs)
        # Vectors and their tails share variables (`split_tails`), which FuseTIR does not support.
        ir_mod = tirx.transform.ConvertSSA()(ir_mod)
        ir_mod = relax.transform.FuseTIR()(ir_mod)
        for name, attributes in merging.merged.items():
            variable = ir_mod.get_global_var(name)
            flags = dict.fromkeys(("tirx.is_scheduled", *attributes), True)
            ir_mod[variable] = ir_mod[variable].with_attr(flags)
        return relax.transform.DeadCodeElimination()(ir_mod)


class _Merging:
    """Walks the bindings, and delays those of a run until their results are needed.

    Attributes
    ----------
    merged
        Names of the new functions, and the attributes of `_SAID` that their parts have.
    """

    def __init__(self, builder: relax.BlockBuilder, kernels: Kernels, main: relax.Function) -> None:
        self.builder, self.kernels = builder, kernels
        self.merged: dict[str, list[str]] = {}
        self.readers: dict[relax.Var, int] = {}
        for block in main.body.blocks:
            for binding in block.bindings:
                self._count(binding.value)
        self._count(main.body.body)

    def rewritten(self, block: relax.BindingBlock) -> list[relax.Binding]:
        """Return the bindings of a block with its runs merged."""
        done: list[relax.Binding] = []
        run: list[relax.Binding] = []
        for binding in block.bindings:
            if _callee(binding) in self.kernels and len(run) < _MOST:
                run.append(binding)
                continue
            held = {one.var for one in run}
            if held & set(relax.analysis.free_vars(binding.value)):
                done += self._merged(run)
                run = []
            done.append(binding)
        return done + self._merged(run)

    def _count(self, value: relax.Expr) -> None:
        for variable in relax.analysis.free_vars(value):
            self.readers[variable] = self.readers.get(variable, 0) + 1

    def _merged(self, run: list[relax.Binding]) -> list[relax.Binding]:
        if len(run) < 2:
            return run
        inside = {binding.var for binding in run}
        read = [x for binding in run for x in binding.value.args[1].fields]
        given = [x for x in dict.fromkeys(read) if x not in inside]
        sizes = Bindings().of(x.ty.shape.values for x in given)
        # A function can only return sizes that its arguments show.
        shown = set(sizes.variables)
        made = [size for x in inside for ty in _tensors(x.ty) for size in ty.shape.values]
        if not shown.issuperset(v for size in made for v in variables_of(size)):
            return run
        results = [binding.var for binding in run if self._is_read_outside(binding.var, run)]
        function = self._function(run, given, results, sizes)
        kernels = [self.kernels[_callee(binding)] for binding in run]
        self.merged[function.name_hint] = [
            flag for flag in _SAID if any(flag in kernel.attrs for kernel in kernels)
        ]
        return _bound(results, relax.Call(function, given))

    def _function(
        self,
        run: list[relax.Binding],
        given: list[relax.Var],
        results: list[relax.Var],
        sizes: Bindings,
    ) -> tvm.ir.GlobalVar:
        """Make a function that calls the kernels of a run."""
        builder = self.builder
        places = {x: relax.Var(f"p{i}", sizes.apply_to_type(x.ty)) for i, x in enumerate(given)}
        with builder.function("serial", list(places.values()), {"Primitive": True}, private=True):
            with builder.dataflow():
                for binding in run:
                    call = binding.value
                    arguments = relax.Tuple([places[x] for x in call.args[1].fields])
                    types = [sizes.apply_to_type(ty) for ty in call.ty_args]
                    part = relax.Call(call.op, [call.args[0], arguments], call.attrs, types)
                    places[binding.var] = builder.emit(part)
                outputs = [builder.emit_output(places[x]) for x in results]
            return builder.emit_func_output(
                outputs[0] if len(outputs) == 1 else relax.Tuple(outputs)
            )

    def _is_read_outside(self, variable: relax.Var, run: list[relax.Binding]) -> bool:
        within = sum(variable in relax.analysis.free_vars(binding.value) for binding in run)
        return self.readers.get(variable, 0) > within


def _bound(results: list[relax.Var], call: relax.Call) -> list[relax.Binding]:
    """Bind the results of a call, which is a tuple if there are several."""
    if len(results) == 1:
        return [relax.VarBinding(results[0], call)]
    every = relax.DataflowVar("serial", relax.TupleType([x.ty for x in results]))
    fields = [relax.TupleGetItem(every, i) for i in range(len(results))]
    return [
        relax.VarBinding(every, call),
        *(relax.VarBinding(x, field) for x, field in zip(results, fields, strict=True)),
    ]


def _tensors(ty: tvm.ir.Type) -> list[relax.TensorType]:
    """Return the types of the tensors of a value, which may be a tuple."""
    if isinstance(ty, relax.TupleType):
        return [found for field in ty.fields for found in _tensors(field)]
    return [ty] if isinstance(ty, relax.TensorType) else []


def _callee(binding: relax.Binding) -> tvm.ir.GlobalVar | None:
    value = binding.value
    is_kernel = isinstance(value, relax.Call) and value.op == tvm.ir.Op.get("relax.call_tir")
    return value.args[0] if is_kernel else None


def _is_mergeable(function: tirx.PrimFunc) -> bool:
    """Whether a function starts no threads, and has extents of Relax's type, as FuseTIR requires.
    It must not take numbers, nor store results twice: merged with others, a result could share
    memory with an operand.
    """
    if STORES_TWICE in function.attrs or _is_slow_to_merge(function):
        return False
    if not all(hasattr(parameter.ty, "shape") for parameter in function.params):
        return False
    extents = [extent for parameter in function.params for extent in parameter.ty.shape]
    if not all(isinstance(extent, (tirx.IntImm, tirx.Var)) for extent in extents):
        return False  # the next kernel uses another name for it
    return all(str(extent.ty.dtype) == "int64" for extent in extents) and not _forks(function)


def _with_own_variables(function: tirx.PrimFunc) -> tirx.PrimFunc | None:
    """Return a function in which no two blocks share a variable; None if that is too hard. A vector
    and its tail share variables, which FuseTIR, as it renames symbols, does not support.
    """
    seen: set[tirx.Var] = set()

    def visit(stmt: tirx.Stmt) -> tirx.Stmt | None:
        if not isinstance(stmt, s_tir.SBlockRealize):
            return None
        own = {variable.var for variable in stmt.block.iter_vars}
        if own & seen:
            return with_new_variables(stmt)
        seen.update(own)
        return None

    try:
        return rewrite_body(function, visit)
    except TypeError:
        return None


def _is_slow_to_merge(function: tirx.PrimFunc) -> bool:
    """Whether TVM would take seconds to find the live part of a tensor of symbolic size."""
    root = function.body
    allocates = isinstance(root, s_tir.SBlockRealize) and len(root.block.alloc_buffers) > 0
    return allocates and has_symbols(function)


def _forks(function: tirx.PrimFunc) -> bool:
    found = []

    def visit(stmt: tirx.Stmt) -> None:
        if isinstance(stmt, tirx.For) and stmt.kind == tirx.ForKind.PARALLEL:
            found.append(stmt)

    rewrite_body(function, visit)
    return bool(found)
