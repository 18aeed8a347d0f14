"""Python source in the form that TorchScript compiles without changing what it means.

While ``torch.jit.script`` compiles, it evaluates operators of constants by its own rules:
integers wrap at 64 bits, ``math.sqrt(-1)`` is NaN, and ``5 % 0`` ends the process. So Python
evaluates such expressions here, or they are hidden from TorchScript: to it, ``[5][0] % n`` is not
constant. Code that TorchScript would interpret differently than Python is refused.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import inspect
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.jit import frontend

from tvmify.capture.scripted.constants import Constants, name_of
from tvmify.capture.scripted.edited import is_edited

#: Methods of strings whose defaults differ in TorchScript: the number of arguments without a
#: default, and the defaults.
_WITH_DEFAULTS: dict[str, tuple[int, tuple[Any, ...]]] = {
    **dict.fromkeys("find rfind index count startswith endswith".split(), (1, (0, -1))),
    **dict.fromkeys("strip lstrip rstrip".split(), (0, (" \n\t\f\v",))),
    "rsplit": (0, (" ", -1)),
}
#: Types for which ``isinstance`` differs in TorchScript: there, a ``torch.Size`` is a list, a bool
#: is not an int, and a dtype is.
_TOLD_APART = frozenset({"int", "float", "list", "tuple", "bool"})
#: Assignments that TorchScript compiles to something else: ``%=`` to fmod, ``|=`` to no write.
_MISREAD = (ast.Mod, ast.BitOr, ast.BitAnd, ast.BitXor, ast.LShift, ast.RShift, ast.Pow)
#: Functions and methods without side effects.
_PURE = frozenset("bool dim hasattr is_floating_point isinstance len numel size".split())


class CannotUnfold(Exception):
    """TorchScript would decide differently than Python, in a place that the message names."""


@contextlib.contextmanager
def unfolded(constant_attributes: frozenset[str]) -> Iterator[None]:
    """Let ``torch.jit.script`` compile unfolded sources, in this thread.

    Parameters
    ----------
    constant_attributes
        See `constants.constant_attributes`.
    """
    thread = threading.get_ident()
    original: Callable[[Any], Any] = frontend.parse_def

    @functools.cache  # every layer of a class has its forward parsed
    def unfold(function: Any) -> Any:
        if is_edited(function):
            raise CannotUnfold("its source file was edited after it was imported")
        parsed = original(function)
        (node,) = parsed.ast.body
        assert isinstance(node, ast.FunctionDef)  # parse_def refuses all else
        _Unfold(function, node, constant_attributes).visit(node)
        return parsed

    def parse(function: Any) -> Any:
        if threading.get_ident() != thread:
            return original(function)
        if isinstance(getattr(function, "__self__", None), torch.nn.Module):
            return unfold(function.__func__)
        # TorchScript itself changes the source of a classmethod.
        return unfold.__wrapped__(function)

    frontend.parse_def = parse  # type: ignore[assignment]
    try:
        yield
    finally:
        frontend.parse_def = original  # type: ignore[assignment]


class _Unfold(ast.NodeTransformer):
    """Rewrites one function in place."""

    def __init__(
        self, function: Any, node: ast.FunctionDef, constant_attributes: frozenset[str]
    ) -> None:
        function = inspect.unwrap(function)
        self._is_torch = str(getattr(function, "__module__", "")).partition(".")[0] == "torch"
        self._constants = Constants(function, node, constant_attributes)

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        self._refuse_defaults(node.args)
        node.body = [self.visit(statement) for statement in node.body]
        return node

    # --------------------------------------------------------------------------------- rewriting

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if (folded := self._folded(node)) is not None:
            return folded
        is_folded = self._constants.is_constant(node.left) and self._constants.is_constant(
            node.right
        )
        is_folded &= not self._constants.is_exact(node)
        self.generic_visit(node)
        if is_folded:
            node.left = _hidden(node.left)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if isinstance(node.op, _MISREAD) and not self._is_torch:
            raise CannotUnfold(f"an assignment by {type(node.op).__name__} (line {node.lineno})")
        is_folded = isinstance(node.target, ast.Name) and self._constants.is_constant(node.target)
        is_folded &= self._constants.is_constant(node.value)
        self.generic_visit(node)
        if is_folded:
            node.value = _hidden(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self._refuse(node)
        if (folded := self._folded(node)) is not None:
            return folded
        of_text = isinstance(node.func, ast.Attribute) and self._constants.is_constant(
            node.func.value
        )
        is_folded = (of_text or self._constants.function(node.func) is not None) and all(
            map(self._constants.is_constant, node.args)
        )
        self.generic_visit(node)
        if is_folded and isinstance(node.func, ast.Attribute) and of_text:
            node.func.value = _hidden(node.func.value)
        elif is_folded and node.args:
            node.args[0] = _hidden(node.args[0])
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Make and/or return an operand, as in Python; in TorchScript they return a bool."""
        if self._is_torch:
            return self._condition(node)
        *tests, result = [self.visit(value) for value in node.values]
        is_or = isinstance(node.op, ast.Or)
        for test in reversed(tests):
            if _is_bool(test) and _is_bool(result):
                result = ast.BoolOp(node.op, [test, result])
            elif _may_repeat(test):
                first = ast.Constant(is_or) if _is_bool(test) else test
                result = ast.IfExp(test, *((first, result) if is_or else (result, first)))
            else:
                raise CannotUnfold(
                    f"`and` or `or` is used for the value of an operand (line {node.lineno})"
                )
            ast.fix_missing_locations(ast.copy_location(result, node))
        return result

    def visit_If(self, node: ast.If) -> ast.AST:
        return self._with_condition(node)

    def visit_While(self, node: ast.While) -> ast.AST:
        return self._with_condition(node)

    def visit_IfExp(self, node: ast.IfExp) -> ast.AST:
        return self._with_condition(node)

    def visit_Assert(self, node: ast.Assert) -> ast.AST:
        return self._with_condition(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> ast.AST:
        if isinstance(node.op, ast.Not):
            node.operand = self._condition(node.operand)
            return node
        return self.generic_visit(node)

    def _with_condition(self, node: Any) -> ast.AST:
        """Visit a node that has a condition as its test."""
        test, node.test = self._condition(node.test), ast.Constant(True)
        self.generic_visit(node)
        node.test = test
        return node

    def _condition(self, node: ast.expr) -> ast.expr:
        """Visit an expression that is only tested for truth, where TorchScript's and/or will do."""
        if not isinstance(node, ast.BoolOp):
            return self.visit(node)
        node.values = [self._condition(value) for value in node.values]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        is_text = isinstance(node.value, ast.Constant) or (
            isinstance(node.value, ast.Name) and node.value.id in self._constants.names
        )
        self.generic_visit(node)
        if is_text:
            node.value = _hidden(node.value)
        return node

    def _folded(self, node: ast.expr) -> ast.expr | None:
        """Return the value of an expression of literals as a literal, or None."""
        if not self._constants.is_literal(node):
            return None
        value = self._constants.evaluated(node)
        if name_of(getattr(node, "func", None)) == "float" and isinstance(value, float):
            return node  # such as infinity, which TorchScript reads as Python does
        is_exact = isinstance(value, (bool, str))
        is_exact |= type(value) is int and -(2**63) < value < 2**63
        is_exact |= type(value) is float and math.isfinite(value)
        if not is_exact:
            return None
        literal: ast.expr = ast.Constant(value)
        if isinstance(value, (int, float)) and math.copysign(1, value) < 0:
            literal = ast.UnaryOp(ast.USub(), ast.copy_location(ast.Constant(-value), node))
        return ast.copy_location(literal, node)

    # ---------------------------------------------------------------------------------- refusing

    def _refuse(self, node: ast.Call) -> None:
        if self._is_torch:
            return  # written for TorchScript
        name, place = name_of(node.func), f"line {node.lineno}"
        if name == "isinstance" and len(node.args) == 2:
            asked = {name_of(n) for n in ast.walk(node.args[1]) if isinstance(n, ast.expr)}
            if asked & _TOLD_APART:
                raise CannotUnfold(f"isinstance distinguishes numbers or lists ({place})")
        if isinstance(node.func, ast.Attribute):
            first, defaults = _WITH_DEFAULTS.get(node.func.attr, (0, ()))
            if any(map(self._may_be, node.args[first:], defaults)):
                raise CannotUnfold(f"{name} may be given the value of its default ({place})")
        called = self._constants.value_of_name(node.func)
        if called is math.pow and isinstance(node.func, ast.Name):
            raise CannotUnfold(f"pow is math.pow ({place})")
        if isinstance(called, torch.jit.ScriptFunction):
            raise CannotUnfold(f"{name} is a TorchScript function ({place})")

    def _may_be(self, node: ast.expr, default: Any) -> bool:
        if self._constants.is_literal(node):
            return bool(self._constants.evaluated(node) == default)
        return self._constants.is_constant(node)

    def _refuse_defaults(self, arguments: ast.arguments) -> None:
        positional = [*arguments.posonlyargs, *arguments.args]
        positional = positional[len(positional) - len(arguments.defaults) :]
        pairs = [
            *zip(positional, arguments.defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            is_float = name_of(argument.annotation) == "float"
            value = default.operand if isinstance(default, ast.UnaryOp) else default
            is_integer = isinstance(value, ast.Constant) and type(value.value) is int
            if is_float and is_integer and not self._is_torch:
                raise CannotUnfold(f"the float {argument.arg} has an integer as its default")


def _is_bool(node: ast.expr) -> bool:
    """Whether an expression is a bool, whatever its operands are."""
    if isinstance(node, ast.BoolOp):
        return all(map(_is_bool, node.values))
    if isinstance(node, ast.Compare):  # comparing tensors gives a tensor
        return all(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops)
    if isinstance(node, ast.Call):
        return name_of(node.func) in ("bool", "hasattr", "isinstance", "is_scripting", "is_tracing")
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_not or (isinstance(node, ast.Constant) and isinstance(node.value, bool))


def _may_repeat(node: ast.expr) -> bool:
    """Whether an expression may be evaluated twice."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return all(name_of(call.func) in _PURE for call in calls)


def _hidden(node: ast.expr) -> ast.expr:
    """Return an equal expression that is not constant to TorchScript."""
    items = ast.List([node], ast.Load())
    hidden = ast.Subscript(items, ast.Constant(0), ast.Load())
    for new in (items, hidden.slice, hidden):
        ast.copy_location(new, node)
    return hidden
