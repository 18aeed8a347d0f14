"""Names for packed weights, equal if and only if the same weights are packed the same way."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

import tvm
from tvm import relax, tirx
from tvm.ir.expr import GenericConst


def packed_keys(ir_mod: tvm.IRModule, weights: Sequence[str]) -> tuple[str, ...]:
    """Name the results of the function ``pack`` of a module. Programs for different input shapes
    mostly pack weights alike, and share copies by these names.

    Parameters
    ----------
    ir_mod
        Legalized, with the function ``pack(*weights) -> tuple``, or without it.
    weights
        Dotted names of the parameters of ``pack``.

    Returns
    -------
    tuple of str
        For an unpacked weight, its name, dtype and shape; for a packed one also the digest of the
        expression that packs it: operators, their TIR, constants, and names.
    """
    if "pack" not in {variable.name_hint for variable in ir_mod.get_global_vars()}:
        return ()
    return _Namer(ir_mod, weights).names()


class _Namer:
    """Names every value of ``pack``, from its parameters to its results."""

    def __init__(self, ir_mod: tvm.IRModule, weights: Sequence[str]) -> None:
        self.ir_mod = ir_mod
        self.pack = ir_mod["pack"]
        self.known: dict[relax.Expr, str] = {
            parameter: f"{name}: {_type(parameter)}"
            for parameter, name in zip(self.pack.params, weights, strict=True)
        }
        self.functions: dict[str, str] = {}

    def names(self) -> tuple[str, ...]:
        for block in self.pack.body.blocks:
            for binding in block.bindings:
                self.known[binding.var] = self.name(binding.value)
        result = self.known.get(self.pack.body.body) or self.name(self.pack.body.body)
        return tuple(result.split("\n"))

    def name(self, expr: relax.Expr) -> str:
        if expr in self.known:
            return self.known[expr]
        if isinstance(expr, relax.Tuple):
            return "\n".join(self.name(field) for field in expr.fields)
        if isinstance(expr, relax.TupleGetItem):
            return self.name(expr.tuple_value).split("\n")[expr.index]
        if isinstance(expr, GenericConst):
            return f"constant: {_type(expr)} {_digest(expr.value.numpy().tobytes())}"
        if isinstance(expr, tvm.ir.GlobalVar):
            return self.function(expr)
        if isinstance(expr, relax.Call):
            parts = [str(expr.op) if isinstance(expr.op, tvm.ir.Op) else self.name(expr.op)]
            parts += [self.name(argument) for argument in expr.args]
            parts += [str(expr.attrs), str(expr.ty)]
            return f"packed: {_type(expr)} {_digest(chr(0).join(parts).encode())}"
        return str(expr)

    def function(self, variable: tvm.ir.GlobalVar) -> str:
        """Return the digest of a TIR function, without its own name."""
        name = variable.name_hint
        if name not in self.functions:
            function = self.ir_mod[variable]
            if isinstance(function, tirx.PrimFunc):
                function = function.without_attr("global_symbol")
            self.functions[name] = _digest(function.script().encode())
        return self.functions[name]


def _digest(content: bytes) -> str:
    return sha256(content).hexdigest()


def _type(expr: relax.Expr) -> str:
    ty = expr.ty
    if not isinstance(ty, relax.TensorType):
        return str(ty)
    return f"{ty.dtype}[{','.join(str(int(extent)) for extent in ty.shape.values)}]"
