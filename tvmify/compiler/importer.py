"""ATen program → Relax: decompose, check, and translate operator by operator.

TVM's own importer is the base. It is driven node by node from here because, as it stands, it binds
buffers as constants, drops mutations silently, and gets shapes and dtypes of some operators wrong;
here buffers stay arguments, effects are refused, and every translated value is compared with the
shape and dtype that torch recorded for it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import tvm
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from tvm import relax
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from tvmify.compiler import operators
from tvmify.compiler.bridge import bridge, can_bridge, is_complex
from tvmify.compiler.constants import constant_of, fold_constants
from tvmify.compiler.converters import CONVERTERS
from tvmify.compiler.decompositions import decompose
from tvmify.compiler.messages import first_line
from tvmify.compiler.refusals import refuse, refuse_effects
from tvmify.compiler.spelt_attention import recognise_attention
from tvmify.compiler.stock import STOCK
from tvmify.errors import BuildError, UnsupportedInput, UnsupportedOperator
from tvmify.structure import structure_text


@dataclass(frozen=True)
class Imported:
    """A Relax module with one function, ``main(*inputs, *weights)``, and how it is called.

    Attributes
    ----------
    ir_mod
        ``main`` returns a tuple of the tensors that the program computes.
    inputs
        Index, among the flattened arguments of the call, of each tensor that ``main`` takes.
    weights
        Dotted name of each parameter or buffer that ``main`` takes after the inputs.
    outputs
        See `tvmify.artifact.Artifact.outputs`.
    output_structure
        The pytree of the result as text.
    operators
        How often each ATen operator occurs.
    bridged
        How often each of those occurs that PyTorch computes, inside of the program.
    """

    ir_mod: tvm.IRModule
    inputs: tuple[int, ...]
    weights: tuple[str, ...]
    outputs: tuple[tuple[str, Any], ...]
    output_structure: str
    operators: dict[str, int]
    bridged: dict[str, int]


def import_program(program: ExportedProgram) -> Imported:
    """Translate an exported program into Relax.

    Parameters
    ----------
    program
        Not decomposed, with static shapes.

    Raises
    ------
    UnsupportedOperator
        The program contains operators that neither TVM nor PyTorch can compute inside of it (all of
        them are named), or changes its buffers or inputs.
    UnsupportedInput
        A tensor has a dtype that TVM cannot hold.
    """
    mutating = [
        operators.name(node)
        for node in operators.calls(program.graph)
        if operators.is_mutating(node)
    ]
    program = decompose(program)
    fold_constants(program)
    recognise_attention(program)
    refuse_effects(program, mutating)
    known = CONVERTERS.keys() | STOCK
    refuse(
        node
        for node in operators.calls(program.graph)
        if operators.short_name(node) not in known and not can_bridge(node, DTYPES)
    )
    return Importer(program).run()


class Importer(ExportedProgramImporter):
    """Translates the nodes of one program; what `CONVERTERS` functions get as first argument.

    Attributes
    ----------
    env
        The Relax value of every node translated so far (a tuple for operators with several
        results).
    """

    def __init__(self, program: ExportedProgram) -> None:
        super().__init__()
        self.program = program
        self.block_builder = relax.BlockBuilder()
        self._bridged: list[fx.Node] = []
        self._drawn: relax.Expr | None = None  # after the last random operator

    # ---------------------------------------------------------------- for converters

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind an expression to a variable of the function under construction."""
        return self.block_builder.emit(expr)

    def emit_te(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> relax.Var:
        """Bind a call of a tensor expression, which sees Relax values as TE tensors."""
        kwargs.setdefault("primfunc_name_hint", function.__name__)
        return self.block_builder.emit_te(function, *args, **kwargs)

    def call_loop(
        self, function: tvm.tirx.PrimFunc, name: str, arguments: list[relax.Expr], size: int
    ) -> relax.Var:
        """Bind a call of one of `converters.loops` on flat tensors.

        The result is flat, has `size` elements and the dtype of the first argument.
        """
        variable = self.block_builder.add_func(function, name)
        result = relax.TensorType([size], str(arguments[0].ty.dtype))
        return self.emit(relax.call_tir(variable, arguments, result))

    def argument(self, node: fx.Node, index: int, name: str, default: Any = None) -> Any:
        """Return an argument of a call, given by position or by name."""
        if index < len(node.args):
            return node.args[index]
        return node.kwargs.get(name, default)

    def shape(self, value: Any) -> tuple[int, ...]:
        """Return the static shape of a node of the program."""
        return tuple(int(extent) for extent in value.meta["val"].shape)

    def tensor(self, value: Any, dtype: torch.dtype | None = None) -> relax.Expr:
        """Return a node, or a number, as a Relax tensor, cast to `dtype` if that is given."""
        if not isinstance(value, fx.Node):
            return relax.const(value, dtype_name(dtype or torch.get_default_dtype()))
        expr = self.env[value]
        if dtype is None or value.meta["val"].dtype == dtype:
            return expr
        return self.emit(relax.op.astype(expr, dtype_name(dtype)))

    # ---------------------------------------------------------------- the translation

    def run(self) -> Imported:
        """Translate the whole program."""
        inputs, weights = self._declare()
        signature = self.program.graph_signature
        params = [*inputs.values(), *weights.values()]
        with self.block_builder.function("main", params, attrs={"num_input": len(inputs)}):
            self._drawn = next(iter(inputs.values()), None)
            try:
                with self.block_builder.dataflow():
                    self._bind_constants()
                    for node in operators.calls(self.program.graph):
                        self.env[node] = self._translate(node)
                    tensors, outputs = self._outputs()
                    result = self.block_builder.emit_output(relax.Tuple(tensors))
                self.block_builder.emit_func_output(result)
            except Exception:
                self.block_builder._end_block()  # else it complains on the terminal when it dies
                raise
        targets = {spec.arg.name: spec.target for spec in signature.input_specs}
        return Imported(
            ir_mod=self.block_builder.finalize(),
            inputs=tuple(inputs),
            weights=tuple(str(targets[name]) for name in weights),
            outputs=outputs,
            output_structure=structure_text(self.program.call_spec.out_spec),
            operators=operators.count(self.program.graph.nodes),
            bridged=operators.count(self._bridged),
        )

    def _declare(self) -> tuple[dict[int, relax.Var], dict[str, relax.Var]]:
        """Make a parameter of ``main`` for each tensor that the program reads."""
        placeholders = {n.name: n for n in self.program.graph.nodes if n.op == "placeholder"}
        inputs: dict[int, relax.Var] = {}
        weights: dict[str, relax.Var] = {}
        leaf = -1
        for spec in self.program.graph_signature.input_specs:
            is_input = spec.kind is InputKind.USER_INPUT
            leaf += is_input
            if not isinstance(spec.arg, TensorArgument):
                continue
            node = placeholders[spec.arg.name]
            if not any(user.op != "output" or not is_input for user in node.users):
                continue  # not read; what is only handed back never enters the program
            if spec.kind is InputKind.CONSTANT_TENSOR:
                continue  # see `_bind_constants`
            var = relax.Var(node.name, _tensor_type(node.meta["val"], node.name))
            self.env[node] = var
            if is_input:
                inputs[leaf] = var
            else:
                weights[node.name] = var
        return inputs, weights

    def _bind_constants(self) -> None:
        for node in self.program.graph.nodes:
            constant = constant_of(self.program, node)
            if constant is not None and node.users:
                self.env[node] = self._constant(constant)

    def _constant(self, tensor: torch.Tensor) -> relax.Expr:
        if tensor.numel() == 0:
            # Computed, since TVM can store a constant without elements but not load it again.
            return self.emit(relax.op.zeros(list(tensor.shape), dtype_name(tensor.dtype)))
        # A copy: the constant's memory must not change when the caller's tensor does.
        copy = tensor.detach().cpu().contiguous().clone()
        _tensor_type(copy, "a tensor constant")
        return relax.const(tvm.runtime.from_dlpack(copy), dtype_name(copy.dtype))

    def _translate(self, node: fx.Node) -> Any:
        expected = node.meta.get("val")
        if isinstance(expected, torch.Tensor) and expected.numel() == 0:
            return self._constant(expected)
        name = operators.short_name(node)
        if name != "getitem" and (is_complex(node) or operators.is_random(node)):
            return self._bridge(node)
        convert = CONVERTERS.get(name)
        if convert is None and name not in STOCK:
            return self._bridge(node)
        try:
            value = convert(self, node) if convert else self.convert_map[name](node)
            value = self._checked(node, value, expected)
            if not _lacks_results(node, value):
                return value
            reason: Exception = UnsupportedOperator([str(node.target)], "not all is computed")
        except Exception as error:
            reason = error
        if can_bridge(node, DTYPES):
            return self._bridge(node)
        if isinstance(reason, UnsupportedOperator):
            raise reason
        raise UnsupportedOperator([operators.name(node)], first_line(reason)) from reason

    def _bridge(self, node: fx.Node) -> Any:
        """Let PyTorch compute a call."""
        if not can_bridge(node, DTYPES):
            raise UnsupportedOperator(
                [operators.name(node)], "it is not computed with tensors only"
            )
        self._bridged.append(node)
        if not operators.is_random(node):
            return bridge(node, self.env, self.emit)
        # Draws are made in order, and at each call: each comes after the one before, the first
        # after an argument. Else TVM would see constants, to be computed once.
        if self._drawn is None:
            raise UnsupportedOperator([operators.name(node)], "the program takes no tensor")
        value = bridge(node, self.env, self.emit, after=self._drawn)
        self._drawn = value[0] if isinstance(value, tuple) else value
        return value

    def _checked(self, node: fx.Node, value: Any, expected: Any) -> Any:
        """Compare a translated value with what torch recorded, and repair its dtype."""
        if isinstance(expected, (tuple, list)):
            fields = [value[i] for i in range(len(expected))]
            return tuple(self._checked(node, v, e) for v, e in zip(fields, expected, strict=True))
        if value is None or not isinstance(expected, torch.Tensor) or expected.is_complex():
            return value
        value = value if isinstance(value, relax.Var) else self.emit(value)
        shape = tuple(value.ty.shape.values)
        if shape != tuple(expected.shape):
            raise UnsupportedOperator(
                [operators.name(node)],
                f"TVM makes the shape {shape} instead of {tuple(expected.shape)}",
            )
        dtype = dtype_name(expected.dtype)
        return value if str(value.ty.dtype) == dtype else self.emit(relax.op.astype(value, dtype))

    def _outputs(self) -> tuple[list[relax.Expr], tuple[tuple[str, Any], ...]]:
        signature = self.program.graph_signature
        leaves = {
            spec.arg.name: index
            for index, spec in enumerate(
                s for s in signature.input_specs if s.kind is InputKind.USER_INPUT
            )
        }
        (results,) = self.program.graph.output_node().args
        tensors: list[relax.Expr] = []
        position: dict[fx.Node, int] = {}
        outputs: list[tuple[str, Any]] = []
        for spec, node in zip(signature.output_specs, results, strict=True):  # type: ignore[arg-type]
            if spec.kind is not OutputKind.USER_OUTPUT:
                continue
            if isinstance(spec.arg, ConstantArgument):
                outputs.append(("constant", spec.arg.value))
            elif spec.arg.name in leaves:
                outputs.append(("argument", leaves[spec.arg.name]))
            else:
                _tensor_type(node.meta["val"], node.name)  # refuses complex ones
                if node not in position:
                    position[node] = len(tensors)
                    tensors.append(self.env[node])
                outputs.append(("tensor", position[node]))
        if not tensors:
            raise BuildError(
                "the program computes no tensor, it returns arguments or constants only",
                "Nothing would be faster: run it in eager PyTorch.",
            )
        return tensors, tuple(outputs)


def _lacks_results(node: fx.Node, value: Any) -> bool:
    """Whether a converter left out something that is used: statistics mostly are not."""
    if not isinstance(value, tuple) or all(v is not None for v in value):
        return False
    return any(user.users and value[user.args[1]] is None for user in node.users)  # type: ignore[index]


def dtype_name(dtype: torch.dtype) -> str:
    """Return TVM's name of a dtype of torch; they differ only in torch's prefix."""
    return str(dtype).removeprefix("torch.")


#: What TVM's LLVM code generator computes with; complex and quantised dtypes end the process.
DTYPES = frozenset("bool int8 int16 int32 int64 uint8 float16 bfloat16 float32 float64".split())


def _tensor_type(value: torch.Tensor, name: str) -> relax.TensorType:
    dtype = dtype_name(value.dtype)
    if dtype not in DTYPES or value.layout is not torch.strided:
        raise UnsupportedInput(
            f"{name!r} is a {value.layout} tensor of {value.dtype}",
            f"Compiled code takes strided tensors of {', '.join(sorted(DTYPES))}.",
        )
    return relax.TensorType([int(extent) for extent in value.shape], dtype)
