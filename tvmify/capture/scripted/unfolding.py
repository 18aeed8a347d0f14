"""Python source in the form that TorchScript compiles without changing what it means.

While ``torch.jit.script`` compiles, it computes operators of constants by its own rules: integers
wrap at 64 bits, ``math.sqrt(-1)`` is NaN, and ``5 % 0`` ends the process. So such expressions are
computed here, by Python, or hidden from it: ``[5][0] % n`` is no constant to TorchScript. What it
would decide in another way than Python is refused.
"""

from __future__ import annotations

import ast
import builtins
import contextlib
import inspect
import math
import threading
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.jit import frontend

#: Functions of numbers and strings that TorchScript computes when their arguments are constants.
_BUILTINS = frozenset(
    "abs bin bool chr divmod float hex int len max min oct ord pow round str".split()
)
#: Methods of strings with defaults of TorchScript's own, and the number of arguments without one.
_WITH_DEFAULTS: dict[str, tuple[int, tuple[Any, ...]]] = {
    **dict.fromkeys("find rfind index count startswith endswith".split(), (1, (0, -1))),
    **dict.fromkeys("strip lstrip rstrip".split(), (0, (" \n\t\f\v",))),
    "rsplit": (0, (" ", -1)),
}
#: Types that TorchScript tells apart in another way: a ``torch.Size`` is a list to it, a bool is no
#: int, a dtype is one.
_TOLD_APART = frozenset({"int", "float", "list", "tuple", "bool"})
_LITERALS = (int, float, str)
#: Up to here, powers, shifts, factorials and repetitions are computed ahead.
_SMALL = 4096
#: Assignments that TorchScript compiles to something else: ``%=`` to fmod, ``|=`` to no write.
_MISREAD = (ast.Mod, ast.BitOr, ast.BitAnd, ast.BitXor, ast.LShift, ast.RShift, ast.Pow)


#: Functions and methods that only tell what something is.
_PURE = frozenset("bool dim hasattr is_floating_point isinstance len numel size".split())


class CannotUnfold(Exception):
    """TorchScript would decide differently than Python, in a place that the message names."""


@contextlib.contextmanager
def unfolded(constants: frozenset[str]) -> Iterator[None]:
    """Let ``torch.jit.script`` compile unfolded sources, in this thread.

    Parameters
    ----------
    constants
        Names of the attributes that are constants to TorchScript.
    """
    thread = threading.get_ident()
    original: Callable[[Any], Any] = frontend.parse_def

    def parse(function: Any) -> Any:
        parsed = original(function)
        if threading.get_ident() == thread:
            _Unfold(function, constants).visit(parsed.ast.body[0])
        return parsed

    frontend.parse_def = parse  # type: ignore[assignment]
    try:
        yield
    finally:
        frontend.parse_def = original  # type: ignore[assignment]


def constant_attributes(module: torch.nn.Module) -> frozenset[str]:
    """Return the names of the numbers and strings that TorchScript makes constants of."""
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


class _Unfold(ast.NodeTransformer):
    """Rewrites one function in place."""

    def __init__(self, function: Any, constants: frozenset[str]) -> None:
        self._constants = constants
        function = inspect.unwrap(function)
        self._globals = _names_of(function)
        self._is_torch = str(getattr(function, "__module__", "")).partition(".")[0] == "torch"
        self._names: set[str] = set()  # of variables that a constant may have been assigned to
        self._indices: set[str] = set()  # of modules in a loop that TorchScript writes out
        self._locals: set[str] = set()

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        arguments = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        self._locals = {argument.arg for argument in arguments}
        self._locals |= _stored(node)
        self._refuse_defaults(node.args)
        count = -1
        while count != len(self._names):  # until nothing is added
            count = len(self._names)
            for inner in ast.walk(node):
                self._collect(inner)
        node.body = [self.visit(statement) for statement in node.body]
        return node

    # ------------------------------------------------------------------------- what is a constant

    def _collect(self, node: ast.AST) -> None:
        if isinstance(node, ast.Assign):
            for target in node.targets:
                self._assign(target, node.value)
        elif isinstance(node, (ast.AnnAssign, ast.AugAssign)) and node.value is not None:
            self._assign(node.target, node.value)
        elif isinstance(node, ast.For):  # over a tuple, or modules: TorchScript writes it out
            iterated = node.iter
            if isinstance(iterated, ast.Call) and _name(iterated.func) in ("enumerate", "zip"):
                targets = node.target.elts if isinstance(node.target, ast.Tuple) else []
                if _name(iterated.func) == "enumerate":
                    targets = targets[:1]
                    self._indices |= {t.id for t in targets if isinstance(t, ast.Name)}
                self._names |= {t.id for t in targets if isinstance(t, ast.Name)}
            elif isinstance(iterated, ast.Tuple) and all(map(self._is_constant, iterated.elts)):
                self._names |= _stored(node.target)

    def _assign(self, target: ast.expr, value: ast.expr) -> None:
        if isinstance(target, ast.Name) and self._may_be_constant(value):
            self._names.add(target.id)
        elif isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
            for part, item in zip(target.elts, value.elts, strict=False):
                self._assign(part, item)

    def _may_be_constant(self, node: ast.expr) -> bool:
        """Tell whether an expression, as it is before it is rewritten, may be a constant."""
        if isinstance(node, (ast.BinOp, ast.UnaryOp, ast.Call)):
            return self._is_literal(node) or self._is_exact(node)  # else it is hidden
        return self._is_constant(node)

    def _is_constant(self, node: ast.expr) -> bool:
        if isinstance(node, ast.Constant):
            return isinstance(node.value, _LITERALS)
        if isinstance(node, ast.Name):
            return node.id in self._names
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id in self._locals:
                return node.attr in self._constants
            return isinstance(self._global(node), _LITERALS)
        if isinstance(node, ast.BinOp):
            return self._is_exact(node)
        if isinstance(node, ast.IfExp):
            return self._is_constant(node.body) or self._is_constant(node.orelse)
        if isinstance(node, ast.UnaryOp):
            return isinstance(node.operand, ast.Constant)
        if isinstance(node, ast.BoolOp):
            return all(map(self._is_constant, node.values))
        if isinstance(node, ast.Compare):
            return all(map(self._is_constant, [node.left, *node.comparators]))
        if isinstance(node, ast.Call):  # such as len of a tuple
            return _name(node.func) == "len"
        return False

    def _is_exact(self, node: ast.expr) -> bool:
        """Tell whether an expression is of indices, which are small, and may stay a constant."""
        if not isinstance(node, ast.BinOp) or not self._is_index(node.left):
            return False
        if isinstance(node.op, (ast.Mod, ast.FloorDiv)):
            return _is_count(node.right) and node.right.value > 0  # type: ignore[attr-defined]
        return isinstance(node.op, (ast.Add, ast.Sub)) and self._is_index(node.right)

    def _is_index(self, node: ast.expr) -> bool:
        is_name = isinstance(node, ast.Name) and node.id in self._indices
        return is_name or _is_count(node) or self._is_exact(node)

    def _is_literal(self, node: ast.expr) -> bool:
        """Tell whether Python can compute an expression here and now."""
        if isinstance(node, ast.Constant):
            return isinstance(node.value, _LITERALS)
        if isinstance(node, ast.Attribute):
            return isinstance(self._global(node), _LITERALS)
        if isinstance(node, ast.BinOp):
            return self._is_literal(node.left) and self._is_literal(node.right)
        if isinstance(node, ast.UnaryOp):
            return self._is_literal(node.operand)
        if isinstance(node, ast.Call) and self._function(node.func) is not None:
            return not node.keywords and all(map(self._is_literal, node.args))
        return False

    def _function(self, node: ast.expr) -> Any:
        """Return the function of numbers or strings that an expression names, if it does."""
        if isinstance(node, ast.Name) and node.id in _BUILTINS and node.id not in self._locals:
            return None if node.id in self._globals else getattr(builtins, node.id)
        if isinstance(node, ast.Attribute):
            if self._global(node.value) is math:
                return getattr(math, node.attr, None)
            if isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
                return getattr(node.value.value, node.attr, None)
        return None

    def _global(self, node: ast.expr) -> Any:
        """Return what a name outside of the function stands for, or an attribute of a module."""
        if isinstance(node, ast.Name) and node.id not in self._locals:
            return self._globals.get(node.id)
        if isinstance(node, ast.Attribute):
            owner = self._global(node.value)
            if isinstance(owner, types.ModuleType):
                return getattr(owner, node.attr, None)
        return None

    # --------------------------------------------------------------------------------- rewriting

    def visit_BinOp(self, node: ast.BinOp) -> ast.expr:
        if (folded := self._folded(node)) is not None:
            return folded
        is_folded = self._is_constant(node.left) and self._is_constant(node.right)
        is_folded &= not self._is_exact(node)
        self.generic_visit(node)
        if is_folded:
            node.left = _hidden(node.left)
        return node

    def visit_AugAssign(self, node: ast.AugAssign) -> ast.AST:
        if isinstance(node.op, _MISREAD) and not self._is_torch:
            raise CannotUnfold(f"an assignment by {type(node.op).__name__} (line {node.lineno})")
        is_folded = isinstance(node.target, ast.Name) and self._is_constant(node.target)
        is_folded &= self._is_constant(node.value)
        self.generic_visit(node)
        if is_folded:
            node.value = _hidden(node.value)
        return node

    def visit_Call(self, node: ast.Call) -> ast.expr:
        self._refuse(node)
        if (folded := self._folded(node)) is not None:
            return folded
        of_text = isinstance(node.func, ast.Attribute) and self._is_constant(node.func.value)
        is_folded = (of_text or self._function(node.func) is not None) and all(
            map(self._is_constant, node.args)
        )
        self.generic_visit(node)
        if is_folded and isinstance(node.func, ast.Attribute) and of_text:
            node.func.value = _hidden(node.func.value)
        elif is_folded and node.args:
            node.args[0] = _hidden(node.args[0])
        return node

    def visit_BoolOp(self, node: ast.BoolOp) -> ast.expr:
        """Return one of the operands, as Python does; TorchScript returns a bool."""
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
                raise CannotUnfold(f"and/or has the value of an operand (line {node.lineno})")
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
        """Visit a node whose test is a condition, and the rest of it."""
        test, node.test = self._condition(node.test), ast.Constant(True)
        self.generic_visit(node)
        node.test = test
        return node

    def _condition(self, node: ast.expr) -> ast.expr:
        """Visit an expression of which only the truth counts: there, TorchScript's and/or serve."""
        if not isinstance(node, ast.BoolOp):
            return self.visit(node)
        node.values = [self._condition(value) for value in node.values]
        return node

    def visit_Subscript(self, node: ast.Subscript) -> ast.expr:
        is_text = isinstance(node.value, ast.Constant) or (
            isinstance(node.value, ast.Name) and node.value.id in self._names
        )
        self.generic_visit(node)
        if is_text:
            node.value = _hidden(node.value)
        return node

    def _folded(self, node: ast.expr) -> ast.expr | None:
        """Return what Python makes of an expression of literals, as a literal."""
        if not self._is_literal(node):
            return None
        value = self._evaluated(node)
        if _name(getattr(node, "func", None)) == "float" and isinstance(value, float):
            return node  # infinity, say, which TorchScript reads as Python does
        is_exact = isinstance(value, (bool, str))
        is_exact |= type(value) is int and -(2**63) < value < 2**63
        is_exact |= type(value) is float and math.isfinite(value)
        if not is_exact:
            return None
        literal: ast.expr = ast.Constant(value)
        if isinstance(value, (int, float)) and math.copysign(1, value) < 0:
            literal = ast.UnaryOp(ast.USub(), ast.copy_location(ast.Constant(-value), node))
        return ast.copy_location(literal, node)

    def _evaluated(self, node: ast.expr) -> Any:
        """Return the value of an expression of literals; None if it raises, or may be huge."""
        parts = list(ast.walk(node))
        grows = any(isinstance(part, (ast.Pow, ast.LShift, ast.Call, ast.Mult)) for part in parts)
        numbers = [part.value for part in parts if isinstance(part, ast.Constant)]
        if grows and any(type(number) is int and number > _SMALL for number in numbers):
            return None
        code = compile(ast.fix_missing_locations(ast.Expression(node)), "<literals>", "eval")
        try:
            return eval(code, self._globals)  # noqa: S307 - of numbers, in the module's own code
        except Exception:  # of any kind: when it is run it will raise
            return None

    # ---------------------------------------------------------------------------------- refusing

    def _refuse(self, node: ast.Call) -> None:
        if self._is_torch:
            return  # written for TorchScript
        name, place = _name(node.func), f"line {node.lineno}"
        if name == "isinstance" and len(node.args) == 2:
            asked = {_name(n) for n in ast.walk(node.args[1]) if isinstance(n, ast.expr)}
            if asked & _TOLD_APART:
                raise CannotUnfold(f"isinstance tells numbers and lists apart ({place})")
        if isinstance(node.func, ast.Attribute):
            first, defaults = _WITH_DEFAULTS.get(node.func.attr, (0, ()))
            if any(map(self._may_be, node.args[first:], defaults)):
                raise CannotUnfold(f"{name} is given what it may be by default ({place})")
        called = self._global(node.func)
        if called is math.pow and isinstance(node.func, ast.Name):
            raise CannotUnfold(f"pow is that of math ({place})")
        if isinstance(called, torch.jit.ScriptFunction):
            raise CannotUnfold(f"{name} is TorchScript, with rules of its own ({place})")

    def _may_be(self, node: ast.expr, default: Any) -> bool:
        if self._is_literal(node):
            return bool(self._evaluated(node) == default)
        return self._is_constant(node)

    def _refuse_defaults(self, arguments: ast.arguments) -> None:
        positional = [*arguments.posonlyargs, *arguments.args]
        positional = positional[len(positional) - len(arguments.defaults) :]
        pairs = [
            *zip(positional, arguments.defaults, strict=True),
            *zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True),
        ]
        for argument, default in pairs:
            is_float = _name(argument.annotation) == "float"
            value = default.operand if isinstance(default, ast.UnaryOp) else default
            is_integer = isinstance(value, ast.Constant) and type(value.value) is int
            if is_float and is_integer and not self._is_torch:
                raise CannotUnfold(f"the default of {argument.arg}, a float, is an integer")


def _names_of(function: Any) -> dict[str, Any]:
    """Return what the names outside of a function stand for: those of closures, and global ones."""
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


def _is_bool(node: ast.expr) -> bool:
    """Tell whether the value of an expression is True or False, whatever its operands are."""
    if isinstance(node, ast.BoolOp):
        return all(map(_is_bool, node.values))
    if isinstance(node, ast.Compare):  # of tensors it is a tensor, but for identity and membership
        return all(isinstance(op, (ast.Is, ast.IsNot, ast.In, ast.NotIn)) for op in node.ops)
    if isinstance(node, ast.Call):
        return _name(node.func) in ("bool", "hasattr", "isinstance", "is_scripting", "is_tracing")
    is_not = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_not or (isinstance(node, ast.Constant) and isinstance(node.value, bool))


def _may_repeat(node: ast.expr) -> bool:
    """Tell whether evaluating an expression twice is as good as once."""
    calls = [part for part in ast.walk(node) if isinstance(part, ast.Call)]
    return all(_name(call.func) in _PURE for call in calls)


def _name(node: ast.expr | None) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _hidden(node: ast.expr) -> ast.expr:
    """Return an expression of the same value that is no constant to TorchScript."""
    items = ast.List([node], ast.Load())
    hidden = ast.Subscript(items, ast.Constant(0), ast.Load())
    for new in (items, hidden.slice, hidden):
        ast.copy_location(new, node)
    return hidden
