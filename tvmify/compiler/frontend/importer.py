"""Core ATen → Relax: check, and translate operator by operator.

Extends TVM's own importer, but drives it node by node, because TVM's binds buffers as constants,
silently drops mutations, and gets shapes and dtypes of some operators wrong. Here buffers stay
arguments, values written in place become results, and every translated value is compared with the
shape and dtype that torch recorded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
import tvm
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from tvm import relax, te, tirx
from tvm.relax.frontend.torch.exported_program_translator import ExportedProgramImporter

from tvmify.artifact.recorded_shapes import equal_sizes, symbol_names
from tvmify.artifact.structure import structure_text
from tvmify.compiler.aten import operators
from tvmify.compiler.aten.bridge import PARTS, bridge, can_bridge, is_complex, shape_and_dtype
from tvmify.compiler.frontend.constants import constant_of
from tvmify.compiler.frontend.converters import COMPLEX_CONVERTERS, CONVERTERS, STOCK
from tvmify.compiler.frontend.decompositions import Decomposed
from tvmify.compiler.frontend.dtypes import DTYPES, checked_dtype
from tvmify.compiler.frontend.empties import is_empty, refuse_what_raises
from tvmify.compiler.frontend.formulas import Formulas
from tvmify.compiler.frontend.imported import Imported
from tvmify.compiler.frontend.outputs import Outputs
from tvmify.compiler.frontend.parameters import parameters
from tvmify.compiler.frontend.refusals import refuse
from tvmify.compiler.frontend.sharing import ModuleTensor, Sharing, written_bases
from tvmify.compiler.frontend.symbols import Symbols, settle_sizes
from tvmify.compiler.frontend.writes import writes_in_place
from tvmify.compiler.messages import first_line
from tvmify.compiler.sizes import same_shape
from tvmify.errors import NotCompiled, UnsupportedOperator
from tvmify.system import variables
from tvmify.torch_compat.dtypes import dtype_name, wrapped

_LOG = logging.getLogger(__name__)


def import_program(decomposed: Decomposed, unpacked: Sequence[str] = ()) -> Imported:
    """Translate a program into Relax.

    Parameters
    ----------
    decomposed
        The program. Symbolic sizes become the variables ``s0``, ``s1`` … of ``main``.
    unpacked
        Names of weights that become state.

    Raises
    ------
    UnsupportedOperator
        The program contains operators that neither TVM nor PyTorch can compute inside it (the
        message names all of them), or decomposition lost one of its writes.
    UnsupportedInput
        A tensor has a dtype that TVM cannot hold.
    NothingToCompute
        The program only returns arguments or constants.
    """
    known = CONVERTERS.keys() | STOCK
    symbols = Symbols(symbol_names(decomposed.program), equal_sizes(decomposed.program))
    settle_sizes(decomposed.program.graph, symbols)
    refuse(
        node
        for node in operators.calls(decomposed.program.graph)
        if operators.short_name(node) not in known and not can_bridge(node, DTYPES)
    )
    return Importer(decomposed.program, decomposed.shared, symbols, unpacked).run()


class Importer(ExportedProgramImporter):
    """Translates the nodes of one program; the first argument of all `CONVERTERS`.

    Attributes
    ----------
    env
        The Relax value of every node translated so far (a tuple for operators with several
        results).
    in_place
        Operators that may write to the caller's tensor itself.
    """

    def __init__(
        self,
        program: ExportedProgram,
        shared: Sharing,
        symbols: Symbols,
        unpacked: Sequence[str],
    ) -> None:
        super().__init__()
        self.symbols = symbols
        self.formulas = Formulas(self)
        self.program = program
        self.shared = shared
        self.written = written_bases(program)
        self.in_place = writes_in_place(self.written.values(), self._owned())
        lost = shared.written - self.written.keys()
        if lost:
            raise UnsupportedOperator(
                ["aten.copy_.default"], f"its write to {', '.join(map(str, lost))} was lost"
            )
        bases = [*self.written, *(place.base for place in shared.places if place)]
        bases += sorted(shared.contiguous, key=str)
        names = [base.name for base in bases if isinstance(base, ModuleTensor)]
        read = {str(spec.target) for spec in program.graph_signature.input_specs}
        # In the order of `Artifact.state`; the program reads these unpacked.
        self.state = list(dict.fromkeys([*names, *(name for name in unpacked if name in read)]))
        self.block_builder = relax.BlockBuilder()
        self._bridged: list[fx.Node] = []
        self._operands: dict[tuple[fx.Node, torch.dtype], relax.Expr] = {}
        self._drawn: relax.Expr | None = None  # after the last random operator

    # ---------------------------------------------------------------- for converters

    def emit(self, expr: relax.Expr) -> relax.Var:
        """Bind an expression to a variable of the function under construction."""
        return self.block_builder.emit(expr)

    def emit_te(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> relax.Var:
        """Bind a call of a tensor expression, which sees Relax values as TE tensors."""
        kwargs.setdefault("primfunc_name_hint", function.__name__)
        return self.block_builder.emit_te(function, *args, **kwargs)

    def argument(self, node: fx.Node, name: str) -> Any:
        """Return an argument of a call, or its default, by its name in the operator's schema.

        Raises
        ------
        LookupError
            The operator has no such argument.
        """
        given = operators.arguments(node)
        if name not in given:
            raise LookupError(f"{operators.name(node)} has no argument {name!r}")
        return given[name]

    def shape(self, value: Any) -> tuple[Any, ...]:
        """Return the shape of a node of the program: numbers, and expressions over symbols."""
        return self.sizes(value.meta["val"])

    def sizes(self, tensor: torch.Tensor) -> tuple[Any, ...]:
        """Return the shape of one of the results of a node."""
        return tuple(map(self.symbols.size, tensor.shape))

    def held_shape(self, value: fx.Node) -> list[Any]:
        """Return the shape of the Relax value of a node: complex numbers have an axis more."""
        return self.held_sizes(value.meta["val"])

    def held_sizes(self, tensor: torch.Tensor) -> list[Any]:
        """As `held_shape`, of one of the results of a node."""
        return shape_and_dtype(tensor, self.sizes)[0]

    def tensor(self, value: Any, dtype: torch.dtype | None = None) -> relax.Expr:
        """Return a node, or a number, as a Relax tensor, cast to `dtype` if that is given."""
        if not isinstance(value, fx.Node):
            return self.number(value, dtype_name(dtype or torch.get_default_dtype()))
        expr = self.env[value]
        if dtype is None or value.meta["val"].dtype == dtype:
            return expr
        return self.emit(relax.op.astype(expr, dtype_name(dtype)))

    def number(self, value: Any, dtype: str) -> relax.Expr:
        """Return a number, or one that is computed from sizes, as a tensor without axes."""
        if not isinstance(value, tvm.ir.Expr):
            return relax.const(wrapped(value, getattr(torch, dtype)), dtype)

        def size(value: tvm.ir.Expr) -> te.Tensor:  # an argument, as functions have own symbols
            return te.compute((), lambda: value.astype(dtype), name="size")

        return self.emit_te(size, value)

    def operand(self, value: Any, dtype: torch.dtype) -> relax.Expr:
        """As `tensor`, for products: those of one input share its cast, and can be joined."""
        if not isinstance(value, fx.Node):
            return self.tensor(value, dtype)
        if (value, dtype) not in self._operands:
            self._operands[value, dtype] = self.tensor(value, dtype)
        return self._operands[value, dtype]

    def returned(self) -> list[tuple[Any, Any]]:
        """Return the specification and the value of each user output."""
        (results,) = self.program.graph.output_node().args
        specs = self.program.graph_signature.output_specs
        pairs = zip(specs, results, strict=True)  # type: ignore[arg-type]
        return [(spec.arg, node) for spec, node in pairs if spec.kind is OutputKind.USER_OUTPUT]

    # ---------------------------------------------------------------- the translation

    def run(self) -> Imported:
        """Translate the whole program."""
        inputs, state, weights = self._declare()
        params = [*inputs.values(), *state.values(), *weights.values()]
        given = len(inputs) + len(state)
        with self.block_builder.function("main", params, attrs={"num_input": given}):
            self._drawn = next(iter([*inputs.values(), *state.values()]), None)
            try:
                with self.block_builder.dataflow():
                    self._bind_constants()
                    for node in operators.calls(self.program.graph):
                        self.env[node] = self._translate(node)
                    outputs = Outputs(self)
                    result = self.block_builder.emit_output(relax.Tuple(outputs.tensors))
                self.block_builder.emit_func_output(result)
            except Exception:
                self.block_builder._end_block()  # else its destructor prints a complaint
                raise
        return Imported(
            ir_mod=self.block_builder.finalize(),
            inputs=tuple(inputs),
            state=tuple(self.state),
            weights=tuple(weights),
            writes=outputs.writes,
            outputs=outputs.results,
            complex=outputs.complex,
            needs_contiguous=outputs.contiguous,
            output_structure=structure_text(self.program.call_spec.out_spec),
            operators=operators.count(self.program.graph.nodes),
            bridged=operators.count(self._bridged),
            draws=tuple(operators.count(filter(operators.is_random, self._bridged))),
        )

    def _declare(self) -> tuple[dict[int, relax.Var], dict[str, relax.Var], dict[str, relax.Var]]:
        """Make a variable for each parameter of ``main``: by leaf, and by name."""
        # Values whose elements are copied to another tensor.
        copied = {*self.written.values(), *self._owned()}
        inputs: dict[int, relax.Var] = {}
        state: dict[str, relax.Var | None] = dict.fromkeys(self.state)
        weights: dict[str, relax.Var] = {}
        for parameter in parameters(self.program, self.state, copied, self._symbols_of):
            node = parameter.node
            checked_dtype(node.meta["val"], node.name)
            held = shape_and_dtype(node.meta["val"], self.sizes)
            var = relax.Var(node.name, relax.TensorType(*held))
            self.env[node] = var
            if parameter.leaf is not None:
                inputs[parameter.leaf] = var
            elif parameter.name in state:
                state[parameter.name] = var
            else:
                weights[parameter.name] = var
        return inputs, {name: var for name, var in state.items() if var is not None}, weights

    def _symbols_of(self, node: fx.Node) -> set[str]:
        """Return the symbols that an argument shows."""
        return {size.name for size in self.shape(node) if isinstance(size, tirx.Var)}

    def _bind_constants(self) -> None:
        for node in self.program.graph.nodes:
            constant = constant_of(self.program, node)
            if constant is not None and node.users:
                self.env[node] = self._constant(constant)

    def _constant(self, tensor: torch.Tensor) -> relax.Expr:
        # A copy, since the constant must not change with the caller's tensor.
        copy = tensor.detach().cpu().contiguous().clone()
        copy = torch.view_as_real(copy.resolve_conj()) if copy.dtype in PARTS else copy
        dtype = checked_dtype(copy, "a tensor constant")
        if is_empty(copy):
            return self._empty(copy)
        return relax.const(tvm.runtime.from_dlpack(copy), dtype)

    def _empty(self, tensor: torch.Tensor) -> relax.Var:
        # Computed, since TVM can store but not load a constant without elements.
        return self.emit(relax.op.zeros(*shape_and_dtype(tensor, self.sizes)))

    def _translate(self, node: fx.Node) -> Any:
        expected = node.meta.get("val")
        refuse_what_raises(node, self.sizes)
        results = expected if isinstance(expected, (tuple, list)) else [expected]
        if results and all(isinstance(r, torch.Tensor) and is_empty(r) for r in results):
            empty = tuple(map(self._empty, results))
            return empty if isinstance(expected, (tuple, list)) else empty[0]
        name = operators.short_name(node)
        if operators.is_random(node) or node.target is operators.REPLAYED:
            return self._bridge(node)
        of_complex = name != "getitem" and is_complex(node)
        convert = (COMPLEX_CONVERTERS if of_complex else CONVERTERS).get(name)
        if convert is None and (of_complex or name not in STOCK):
            return self._bridge(node)
        try:
            value = convert(self, node) if convert else self.convert_map[name](node)
            value = self._checked(node, value, expected)
            if not _lacks_results(node, value):
                return value
            reason: Exception = UnsupportedOperator(
                [str(node.target)], "some results are not computed"
            )
        except NotCompiled as refusal:
            reason = refusal
        except Exception as error:  # of any kind: TVM's errors share no narrower class
            if convert is not None:
                if variables.strict_compiler():
                    raise
                _LOG.warning("converter of %s: %s", operators.name(node), first_line(error))
            reason = error
        if can_bridge(node, DTYPES):
            _LOG.debug("%s is left to PyTorch: %s", operators.name(node), first_line(reason))
            return self._bridge(node)
        if isinstance(reason, UnsupportedOperator):
            raise reason
        raise UnsupportedOperator([operators.name(node)], first_line(reason)) from reason

    def _bridge(self, node: fx.Node) -> Any:
        """Let PyTorch compute a call."""
        if not can_bridge(node, DTYPES):
            raise UnsupportedOperator(
                [operators.name(node)], "it takes or returns something other than tensors"
            )
        self._bridged.append(node)
        if not operators.is_random(node):
            return bridge(node, self.env, self.emit, self.sizes)
        # Draws happen in order and at each call: each depends on the one before, and the first on
        # an argument. Otherwise TVM would fold them as constants.
        if self._drawn is None:
            raise UnsupportedOperator([operators.name(node)], "the program takes no tensor")
        value = bridge(node, self.env, self.emit, self.sizes, after=self._drawn)
        fields = value if isinstance(value, tuple) else (value,)
        self._drawn = next(field for field in fields if field is not None)
        return value

    def _checked(self, node: fx.Node, value: Any, expected: Any) -> Any:
        """Compare a translated value with what torch recorded, and repair its dtype."""
        if isinstance(expected, (tuple, list)):
            fields = [value[i] for i in range(len(expected))]
            return tuple(self._checked(node, v, e) for v, e in zip(fields, expected, strict=True))
        if value is None or not isinstance(expected, torch.Tensor):
            return value
        value = value if isinstance(value, relax.Var) else self.emit(value)
        if expected.is_complex():
            return value
        shape = tuple(value.ty.shape.values)
        if not same_shape(shape, self.sizes(expected)):
            raise UnsupportedOperator(
                [operators.name(node)],
                f"TVM makes the shape {shape} instead of {self.sizes(expected)}",
            )
        dtype = dtype_name(expected.dtype)
        if dtype not in DTYPES:  # TVM leaves out casts to 8-bit floats and back
            raise UnsupportedOperator([operators.name(node)], f"its result is of {expected.dtype}")
        return value if str(value.ty.dtype) == dtype else self.emit(relax.op.astype(value, dtype))

    def _owned(self) -> set[fx.Node]:
        """Return the results with memory of their own."""
        pairs = zip(self.returned(), self.shared.places, strict=True)
        return {node for (_, node), place in pairs if place is None and isinstance(node, fx.Node)}


def _lacks_results(node: fx.Node, value: Any) -> bool:
    """Whether a converter omitted a used result; statistics are mostly unused."""
    if not isinstance(value, tuple) or all(v is not None for v in value):
        return False
    return any(user.users and value[user.args[1]] is None for user in node.users)  # type: ignore[index]
