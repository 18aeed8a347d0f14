"""Shared code of the legalizers: which operands are weights, accumulation dtypes, padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from math import prod

import tvm_ffi
from tvm import relax, te, tirx, topi
from tvm.ir import Call, Expr, GlobalVar, Op

from tvmify.compiler import sizes
from tvmify.compiler.backend import Legalize
from tvmify.compiler.kernels.common.patterns import Pattern
from tvmify.compiler.microarchitecture import bits_of
from tvmify.compiler.sizes import Size

#: Attribute of ``main``: bytes of the weights of products that have been lowered.
WEIGHT_BYTES = "tvmify.weight_bytes"
#: FuseOps' pattern of a function that element-wise ones may follow in one kernel.
FUSIBLE = {"tirx.noalias": True, **Pattern.FUSIBLE.attributes}
#: FuseOps' pattern of a function that is not fused.
OPAQUE = {"tirx.noalias": True, **Pattern.OPAQUE.attributes}


def plain(builder: relax.BlockBuilder, call: Call) -> Expr:
    """Lower an operator as TVM does: one loop per axis, for the general rules."""
    return call.op.get_attr("FLegalize")(builder, call)


def unless_trivial(legalize: Legalize) -> Legalize:
    """Lower a reduction of single elements as a reshape, and others by a legalizer.

    TVM's schedules for GPUs take such a reduction for element-wise code, and write what follows it
    into the sum itself.
    """

    def legalized(builder: relax.BlockBuilder, call: Call) -> Expr:
        shape = sizes.sizes_of(call.args[0].ty.shape)
        axes = range(len(shape)) if call.attrs.axis is None else call.attrs.axis
        if not all(sizes.is_one(shape[int(axis)]) for axis in axes):
            return legalize(builder, call)
        return builder.call_te(topi.reshape, call.args[0], call.ty.shape.values)

    return legalized


def accumulator(dtype: str) -> str:
    """The type to accumulate in: float32 for half types."""
    return "float32" if dtype in ("float16", "bfloat16") else dtype


def or_zero(value: Expr, *axes: tuple[Expr, Size, int]) -> Expr:
    """An element of a tensor, or zero past its ends, where it is padded to whole tiles.

    Parameters
    ----------
    axes
        Of each that may have to be padded: index, extent, and extent of a tile.
    """
    inside = [
        index < extent
        for index, extent, tile in axes
        if not sizes.is_static(extent) or extent % tile
    ]
    if not inside:
        return value
    return tirx.if_then_else(tirx.all(*inside), value, tirx.const(0, str(value.ty.dtype)))


def is_weight(builder: relax.BlockBuilder, expression: Expr) -> bool:
    """Whether an operand depends on weights and constants alone.

    ``relax.transform.LiftTransformParams`` moves the packing of such an operand out of the
    program. Parameters of the function after the first ``num_input`` are its weights.
    """
    if not isinstance(expression, relax.Var):
        return _all_weights(expression, frozenset())
    main = _main(builder)
    return main is not None and expression in weights_of(main)


def product_weight_bytes(builder: relax.BlockBuilder) -> int:
    """Bytes of all weights that the program's matrix products read, each counted once."""
    main = _main(builder)
    return 0 if main is None else _product_weight_bytes(main)


def _main(builder: relax.BlockBuilder) -> relax.Function | None:
    for variable, function in builder.get().functions_items():
        if isinstance(function, relax.Function) and variable.name_hint == "main":
            return function
    return None


@lru_cache(maxsize=2)
def _product_weight_bytes(function: relax.Function) -> int:
    weights = weights_of(function)
    values = _values(function)
    pending: list[Expr] = [
        value.args[1]
        for value in values.values()
        if isinstance(value, Call)
        and isinstance(value.op, Op)
        and value.op.name == "relax.matmul"
        and _all_weights(value.args[1], weights)
    ]
    seen: set[Expr] = set()
    total = int((function.attrs or {}).get(WEIGHT_BYTES, 0))
    while pending:
        expression = pending.pop()
        if expression in seen:
            continue
        seen.add(expression)
        expression = values.get(expression, expression)
        ty = expression.ty
        if isinstance(expression, Call):
            pending.extend(expression.args)
        elif isinstance(expression, relax.Tuple):
            pending.extend(expression.fields)
        elif isinstance(expression, relax.TupleGetItem):
            pending.append(expression.tuple_value)
        elif isinstance(ty, relax.TensorType) and ty.shape is not None:  # parameter or constant
            total += prod(sizes.hints(ty.shape)) * bits_of(str(ty.dtype)) // 8
    return total


def values_of(builder: relax.BlockBuilder) -> dict[relax.Var, Expr]:
    """Return what the variables of the program are bound to, before anything is lowered."""
    main = _main(builder)
    return {} if main is None else _values(main)


@lru_cache(maxsize=2)
def _values(function: relax.Function) -> dict[relax.Var, Expr]:
    return {binding.var: binding.value for binding in _bindings(function)}


def _bindings(function: relax.Function) -> Iterator[relax.VarBinding]:
    body = function.body
    for block in body.blocks if isinstance(body, relax.SeqExpr) else ():
        yield from (b for b in block.bindings if isinstance(b, relax.VarBinding))


@lru_cache(maxsize=2)
def weights_of(function: relax.Function) -> frozenset[relax.Var]:
    """Return the variables of ``main`` that depend on weights and constants alone."""
    inputs = (function.attrs or {}).get("num_input")
    known = set() if inputs is None else set(function.params[int(inputs) :])
    for binding in _bindings(function):
        if _all_weights(binding.value, known) and _is_static(binding.var.ty):
            known.add(binding.var)
    return frozenset(known)


def _is_static(ty: relax.Type) -> bool:
    """Whether a value has the same shape in all calls; otherwise it is not a weight."""
    if isinstance(ty, relax.TupleType):
        return all(map(_is_static, ty.fields))
    return not isinstance(ty, relax.TensorType) or sizes.is_static(*ty.shape.values)


def _all_weights(expression: Expr, known: set[relax.Var] | frozenset[relax.Var]) -> bool:
    if isinstance(expression, relax.Var):
        return expression in known
    if isinstance(expression, Call):
        return all(_all_weights(argument, known) for argument in expression.args)
    if isinstance(expression, relax.Tuple):
        return all(_all_weights(field, known) for field in expression.fields)
    if isinstance(expression, relax.TupleGetItem):
        return _all_weights(expression.tuple_value, known)
    # Other expressions take no tensor: constants, shapes, attributes, names of functions.
    return not isinstance(expression, relax.Function) or isinstance(expression, GlobalVar)


def call_template(
    builder: relax.BlockBuilder,
    template: Callable[..., te.Tensor],
    arguments: Sequence[Expr],
    out: Sequence[Size],
    inside: Sequence[Size],
    name: str,
) -> Expr:
    """Call a kernel that is described by a template, on tensors of which any size may be symbolic.

    Parameters
    ----------
    template
        Takes a TE tensor for each argument. Its sizes are numbers and plain variables: TVM joins
        the terms of others, and no pass would know them again.
    arguments
        Relax tensors.
    out
        Shape of the result, as the caller has it.
    inside
        What its sizes are in the template: plain variables, and numbers.
    name
        The name of the kernel.
    """
    own = sizes.Variables()
    # Sizes of Relax's type: kernels that are fused must agree on what they share.
    given = [
        te.placeholder([*map(sizes.as_expression, own.of(x.ty.shape))], str(x.ty.dtype))
        for x in arguments
    ]
    result = template(*given)
    shown = {v for x in given for size in x.shape for v in sizes.variables_of(size)}
    # As TVM writes them where it fuses: it compares shapes by their text.
    out = [sizes.simplified(size) for size in out]
    hidden = {
        variable: size
        for variable, size in zip(inside, out, strict=True)
        if isinstance(variable, tirx.Var) and variable not in shown
    }
    kernel = te.create_prim_func([*given, *hidden, result], "int64")
    kernel = kernel.without_attr("global_symbol").with_attrs(FUSIBLE)
    parameters = [*kernel.params[: len(given)], kernel.params[-1]]
    kernel = tirx.PrimFunc(parameters, kernel.body, kernel.ret_type, kernel.attrs)
    kind = relax.TensorType(out, str(result.dtype))
    return call_kernel(builder, kernel, arguments, {**own.meaning(), **hidden}, kind, name)


def call_kernel(
    builder: relax.BlockBuilder,
    kernel: tirx.PrimFunc,
    arguments: Sequence[Expr],
    meaning: Mapping[tirx.Var, Size],
    results: relax.Type | Sequence[relax.Type],
    name: str,
) -> Expr:
    """Call a kernel that is described with plain variables for the sizes of its tensors.

    Kernels that are fused must agree on the shape of what they share, so it gets the caller's
    sizes. Symbols that none of its arguments shows are passed as numbers, until `BindSizes` infers
    them.

    Parameters
    ----------
    meaning
        What the variables stand for.
    results
        The type of its result, or of each result.
    """
    numbers: list[tirx.Var] = []
    if meaning:
        shown = {size for x in arguments for size in x.ty.shape if isinstance(size, tirx.Var)}
        wanted = {v for size in meaning.values() for v in sizes.variables_of(size)} - shown
        numbers = sorted(wanted, key=lambda variable: variable.name)
        kernel = tvm_ffi.structural_map(kernel, [(tirx.Var, lambda v: meaning.get(v, v))])
        place = len(arguments)
        parameters = [*kernel.params[:place], *numbers, *kernel.params[place:]]
        kernel = tirx.PrimFunc(parameters, kernel.body, kernel.ret_type, kernel.attrs)
    operands = relax.Tuple([*arguments, *numbers])
    return relax.call_tir(builder.add_func(kernel, name), operands, results)
