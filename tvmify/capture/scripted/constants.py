"""The constant expressions of a function: which ones TorchScript would fold, and their values."""

from __future__ import annotations

import ast
import builtins
import contextlib
import math
import types
from typing import Any

import torch

#: Functions of numbers and strings that TorchScript folds when their arguments are constants.
_BUILTINS = frozenset(
    "abs bin bool chr divmod float hex int len max min oct ord pow round str".split()
)
_LITERALS = (int, float, str)
#: Powers, shifts, factorials and repetitions of larger numbers are not folded.
_SMALL = 4096


def constant_attributes(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the numbers and strings that are constants to TorchScript."""
    names: set[str] = set()
    for part in module.modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        class_ = type(part)
        names |= set(getattr(class_, "__constants__", ()))
        for base in class_.__mro__:
            annotations = vars(base).get("__annotations__", {})
            names |= {name for name, text in annotations.items() if "Final" in str(text)}
    return frozenset(names)


class Constants:
    """The constant expressions of one function.

    Parameters
    ----------
    function
        The function to compile.
    node
        Its source, before it is rewritten.
    attributes
        See `constant_attributes`.
    """

    def __init__(self, function: Any, node: ast.FunctionDef, attributes: frozenset[str]) -> None:
        self._attributes = attributes
        self._globals = _names_of(function)
        self._indices: set[str] = set()  # of modules in a loop that TorchScript unrolls
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._locals = {argument.arg for argument in arguments} | _stored(node)
        #: Variables that a constant may have been assigned to.
        self.names: set[str] = set()
        count = -1
        while count != len(self.names):  # until nothing is added
            count = len(self.names)
            for inner in ast.walk(node):
                self._collect(inner)

    def _collect(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.For):
            self._collect_targets(node)

    def _collect_targets(self, loop: ast.For) -> None:
        """Add the variables of a loop over a tuple or modules, which TorchScript unrolls."""
        iterated = loop.iter
        if isinstance(iterated, ast.Call) and name_of(iterated.func) in ("enumerate", "zip"):
            targets = loop.target.elts if isinstance(loop.target, ast.Tuple) else []
            if name_of(iterated.func) == "enumerate":
                targets = targets[:1]
                self._indices |= {t.id for t in targets if isinstance(t, ast.Name)}
            self.names |= {t.id for t in targets if isinstance(t, ast.Name)}
        elif isinstance(iterated, ast.Tuple) and all(map(self.is_constant, iterated.elts)):
            self.names |= _stored(loop.target)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and self._may_be_constant(value):
            self.names.add(target.id)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, item in zip(target.elts, value.elts, strict=False):
                self._assign(part, item)

    def _may_be_constant(self, node: ast.expr) -> bool:
        """Whether an expression may still be a constant after it was rewritten."""
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Call)):
            return self.is_literal(node) or self.is_exact(node)  # else it is hidden
        return self.is_constant(node)

    def is_constant(self, node: ast.expr) -> bool:
        """Whether an expression may be a constant to TorchScript."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, _LITERALS)
        if isinstance(node, ast.Name):
            return node.id in self.names
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in self._locals:
                return node.attr in self._attributes
            return isinstance(self.value_of_name(node), _LITERALS)
        if isinstance(node, ast.BinOp):
            return self.is_exact(node)
        if isinstance(node, ast.IfExp):
            return self.is_constant(node.body) or self.is_constant(node.orelse)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.operand, ast.Constant)
        if isinstance(node, ast.BoolOp):
            return all(map(self.is_constant, node.values))
        if isinstance(node, ast.Compare):
            return all(map(self.is_constant, [node.left, *node.comparators]))
        if isinstance(node, ast.Call):  # such as len of a tuple
            return name_of(node.func) == "len"
        return False

    def is_exact(self, node: ast.expr) -> bool:
        """Whether an expression computes an index: it is small, so TorchScript may fold it."""
        if not isinstance(node, ast.BinOp) or not self._is_index(node.left):
            return False
        if isinstance(node.op, (ast.Mod, ast.FloorDiv)):
            return _is_count(node.right) and node.right.value > 0  # type: ignore[attr-defined]
        return isinstance(node.op, (ast.Add, ast.Sub)) and self._is_index(node.right)

    def _is_index(self, node: ast.expr) -> bool:
        is_name = isinstance(node, ast.Name) and node.id in self._indices
        return is_name or _is_count(node) or self.is_exact(node)

    def is_literal(self, node: ast.expr) -> bool:
        """Whether Python can evaluate an expression now."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, _LITERALS)
        if isinstance(node, ast.Attribute):
            return isinstance(self.value_of_name(node), _LITERALS)
        if isinstance(node, ast.BinOp):
            return self.is_literal(node.left) and self.is_literal(node.right)
        if isinstance(node, ast.UnaryOp):
            return self.is_literal(node.operand)
        if isinstance(node, ast.Call) and self.function(node.func) is not None:
            return not node.keywords and all(map(self.is_literal, node.args))
        return False

    def function(self, node: ast.expr) -> Any:
        """Return the function of numbers or strings that an expression names, or None."""
        if isinstance(node, ast.Name) and node.id in _BUILTINS and node.id not in self._locals:
            return None if node.id in self._globals else getattr(builtins, node.id)
        if isinstance(node, ast.Attribute):
            if self.value_of_name(node.value) is math:
                return getattr(math, node.attr, None)
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                return getattr(node.value.value, node.attr, None)
        return None

    def value_of_name(self, node: ast.expr) -> Any:
        """Return the value of a global name, or of an attribute of a module; None for others."""
        if isinstance(node, ast.Name) and node.id not in self._locals:
            return self._globals.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self.value_of_name(node.value)
            if isinstance(owner, types.ModuleType):
                return vars(owner).get(node.attr)  # getattr would import torch._dynamo, sympy
        return None

    def evaluated(self, node: ast.expr) -> Any:
        """Return the value of an expression of literals; None if it raises or may be huge."""
        parts = list(ast.walk(node))
        grows = any(isinstance(part, (ast.Pow, ast.LShift, ast.Call, ast.Mult)) for part in parts)
        numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
        if grows and any(type(number) is int and number > _SMALL for number in numbers):
            return None
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "<literals>", "eval")
        try:
            return eval(code, self._globals)  # noqa: S307 - of numbers, in the module's own code
        except Exception:  # it will raise when it runs
            return None


def _names_of(function: Any) -> dict[str, Any]:
    """Return the values of the global names and the closure of a function."""
    names = dict(getattr(function, "__globals__", {}))
    cells = getattr(function, "__closure__", None) or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True) if cells else ():
        with contextlib.suppress(ValueError):  # not assigned yet
            names[name] = cell.cell_contents
    return names


def _is_count(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and type(node.value) is int and node.value < 2**31


def _stored(node: ast.AST) -> set[str]:
    names = (n for n in ast.walk(node) if isinstance(n, ast.Name))
    return {name.id for name in names if isinstance(name.ctx, ast.Store)}


def name_of(node: ast.expr | None) -> str:
    """Return the last part of a dotted name; empty for other expressions."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""
