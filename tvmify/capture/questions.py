"""Finds code that asks about the context of a call, which TorchScript would answer differently.
TorchScript answers some questions when it compiles (``torch.jit.is_scripting()`` is true, ``x.grad
is None`` is false), and the graph no longer shows them: so they are searched for in the Python
code. Code that may ask is recorded, and what it asks of tensors is seen then, as is an assignment
to ``x.data``.
"""

from __future__ import annotations

import contextlib
import dis
import sys
import types
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple, NoReturn

import torch
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tvmify.capture.values import recorded_contiguous
from tvmify.errors import CaptureError, NeedsPython

#: Operators whose results depend on grad mode, inference mode, or which tensors require gradients.
ASKING = frozenset(
    "aten::is_grad_enabled prim::requires_grad aten::is_leaf aten::retains_grad aten::is_inference "
    "aten::set_grad_enabled".split()
)
#: Functions whose results may differ from call to call without being part of the signature.
_UNANSWERABLE = frozenset(
    "get_num_threads get_num_interop_threads initial_seed get_rng_state is_anomaly_enabled".split()
)
#: Functions that change torch's defaults for later calls. A recording is decomposed without that
#: change.
_DEFAULTS = frozenset({"set_default_dtype", "set_default_tensor_type"})
#: Attributes and methods of tensors whose values may do so.
_OF_TENSORS = {
    getattr(torch.Tensor, name).__get__: name for name in ("grad", "_base", "_version")
} | {
    getattr(torch.Tensor, name): name
    for name in (
        "data_ptr storage storage_offset untyped_storage _typed_storage is_shared is_pinned "
        "is_set_to _is_view"
    ).split()
}
#: Assigns to ``x.data``, which ``torch.export`` does not record: it goes on with the old values.
_ASSIGN_DATA = torch.Tensor.data.__set__  # type: ignore[attr-defined]
#: Names used to ask what TorchScript answers when it compiles, or not as eager PyTorch does; a
#: method that changes a result in TorchScript's graph, but in no program; and a check of values,
#: which TorchScript drops since nothing reads it.
_NAMES = frozenset("is_scripting _get_tracing_state is_exporting requires_grad_".split()) | {
    "_assert_async",
    *_OF_TENSORS.values(),
}
#: Names of operators on lists of tensors. TorchScript drops those that only write.
_ON_LISTS = "_foreach_"
#: Methods whose results depend on how a tensor lies in memory.
_LAYOUT = frozenset("stride is_contiguous is_conj is_neg resolve_conj resolve_neg".split())
_FUNCTIONS = (torch.jit.is_scripting, torch.compiler.is_exporting)


def check_questions(callable_: Any, args: Any, kwargs: Any) -> None:
    """Refuse a module or function that may ask what only eager PyTorch can answer.

    Raises
    ------
    NeedsPython
        It may ask; the message names what for.
    CaptureError
        It asks about this call only.
    """
    names = names_in(callable_)
    if found := names & _UNANSWERABLE:
        raise NeedsPython(*_asks_for(found))
    if found := names & _DEFAULTS:
        raise NeedsPython(f"forward calls {min(found)}", "Pass dtype= where tensors are created.")
    leaves = pytree.tree_leaves((args, kwargs))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if "is_inference" in names and any(tensor.is_inference() for tensor in tensors):
        raise CaptureError(*_asks_for({"is_inference"}))
    if attributes := {name for tensor in tensors for name in vars(tensor)}:
        for function in reached(callable_):
            if found := attributes & (function.code.names | function.code.strings):
                raise NeedsPython(*_asks_for(found))


@contextlib.contextmanager
def refusing_unrecorded() -> Iterator[None]:
    """Refuse code that, while it is recorded, asks a tensor what only eager PyTorch can answer, or
    assigns to its data.

    Raises
    ------
    NeedsPython
        It has; the message names what.
    """
    unrecorded = _Unrecorded()
    with unrecorded:
        yield
    if unrecorded.refused is not None:  # and the code has caught the error
        raise unrecorded.refused


class _Unrecorded(TorchFunctionMode):
    """Raises an error where code other than torch's own asks a tensor, or any assigns to data, and
    lets ``contiguous`` be recorded.
    """

    def __init__(self) -> None:
        super().__init__()
        self.refused: NeedsPython | None = None

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if (name := _OF_TENSORS.get(func)) is not None and not _is_called_by_torch():
            self.refused = NeedsPython(*_asks_for({name}))
        elif func == _ASSIGN_DATA:
            self.refused = NeedsPython("forward assigns to the data of a tensor", "Use copy_().")
        if self.refused is not None:
            raise self.refused
        if func is torch.Tensor.contiguous:
            return recorded_contiguous(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _is_called_by_torch() -> bool:
    """Whether torch's own code has called the function that a mode handles."""
    frame: types.FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_globals.get("__name__") in _DISPATCHING:
        frame = frame.f_back
    name = None if frame is None else frame.f_globals.get("__name__")
    return _is_of_torch(name) and name != _RUNS_GRAPHS


#: Calls what a graph calls, which is not torch's own code.
_RUNS_GRAPHS = "torch.fx.interpreter"
#: Where methods of tensors that are written in Python call modes.
_DISPATCHING = frozenset({"torch._tensor", "torch.overrides"})


def _is_of_torch(module: str | None) -> bool:
    return (module or "").partition(".")[0] == "torch"


def refuse_question(name: str, *_: Any) -> NoReturn:
    """Stand in for an operator of TorchScript that asks a tensor what only eager PyTorch knows."""
    raise NeedsPython(*_asks_for({name}))


def _asks_for(names: Collection[str]) -> tuple[str, str]:
    reason = f"forward asks for {min(names)}, which may differ from call to call"
    return reason, "Pass the answer as an argument."


def asks_for_layout(callable_: Any, operators: Collection[str] = ()) -> bool:
    """Whether a module or function asks about the memory layout of tensors.

    Parameters
    ----------
    callable_
        The plain module or function; None where there is only TorchScript.
    operators
        Those of its program, such as ``aten::stride``.
    """
    if callable_ is not None:
        return any(_LAYOUT & function.code.methods for function in reached(callable_))
    return any(f"aten::{name}" in operators for name in _LAYOUT)


def asks_for_identity(callable_: Any) -> bool:
    """Whether a module or function may ask if two tensors are the same object; true if in doubt."""
    if isinstance(callable_, torch.nn.Module):
        asking = (torch.nn.MultiheadAttention, torch.jit.ScriptModule)
        if any(isinstance(part, asking) for part in callable_.modules()):
            return True
    elif isinstance(callable_, torch.jit.ScriptFunction):
        return True
    return any(f.code.compares or "id" in f.code.names for f in reached(callable_))


def question_of(functions: Iterable[Reached]) -> str | None:
    """Return a name in code that means something else in TorchScript, or None. Torch's own modules
    compute the same, scripted or not.
    """
    for function in functions:
        code = function.code
        on_lists = {name for name in code.names if name.startswith(_ON_LISTS)}
        if found := code.names & _NAMES | on_lists:
            return min(found)
        for _, value in function.values:
            if any(value is asked for asked in _FUNCTIONS):
                return value.__name__
    return None


def names_in(callable_: Any) -> set[str]:
    """Return all names used in the code of a module or function, apart from torch's own code."""
    return {name for function in reached(callable_) for name in function.code.names}


@dataclass(frozen=True)
class _Code:
    """What the code of a function shows.

    Attributes
    ----------
    names
        Those that it uses.
    strings
        Those that it holds, such as names for ``getattr``.
    methods
        The names of the methods that it calls.
    compares
        Whether it compares objects by identity.
    updates
        Whether it has statements such as ``items[0] += x``.
    """

    names: frozenset[str]
    strings: frozenset[str]
    methods: frozenset[str]
    compares: bool
    updates: bool

    @classmethod
    @lru_cache(maxsize=4096)  # a capture asks about each function several times
    def of(cls, code: types.CodeType) -> _Code:
        """Read it."""
        parts = list(nested(code))
        return cls(
            names=frozenset(n for part in parts for n in (*part.co_names, *part.co_freevars)),
            strings=frozenset(c for part in parts for c in part.co_consts if isinstance(c, str)),
            methods=frozenset(name for part in parts for name in _methods(part)),
            compares=any(map(_compares_objects, parts)),
            updates=any(map(_updates_items, parts)),
        )


class Reached(NamedTuple):
    """A function that a call may run.

    Attributes
    ----------
    function
        It is written in Python, and not torch's own.
    code
        What its code shows.
    values
        What the names in it may refer to, each with its name.
    """

    function: types.FunctionType
    code: _Code
    values: list[tuple[str, Any]]


def reached(callable_: Any) -> Iterator[Reached]:
    """Yield each function that a call of a module or function may run, as far as names tell."""
    todo: list[tuple[Any, Any]] = []
    if isinstance(callable_, torch.nn.Module):
        for part in callable_.modules():
            todo.append((vars(part).get("forward", type(part).forward), part))
    else:
        todo.append((callable_, None))
    seen: set[Any] = set()
    while todo:
        function, owner = todo.pop()
        if isinstance(function, property):
            function = function.fget
        if isinstance(function, (types.MethodType, staticmethod, classmethod)):
            function = function.__func__
        if not isinstance(function, types.FunctionType) or function.__code__ in seen:
            continue
        if _is_of_torch(function.__module__):
            continue
        seen.add(function.__code__)
        code = _Code.of(function.__code__)
        values = list(_values(function, code.names, owner))
        yield Reached(function, code, values)
        todo += [(value, owner) for _, value in values]


def nested(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield the code of a function or file, and of all functions defined within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from nested(constant)


def _methods(code: types.CodeType) -> Iterator[str]:
    """Yield the names of the methods that bytecode calls."""
    for instruction in dis.get_instructions(code):
        marked = instruction.opname == "LOAD_METHOD"
        if sys.version_info >= (3, 12) and instruction.opname == "LOAD_ATTR":
            marked = bool((instruction.arg or 0) & 1)
        if marked:
            yield str(instruction.argval)


def _updates_items(code: types.CodeType) -> bool:
    instructions = list(dis.get_instructions(code))
    return any(
        instruction.argrepr.endswith("=") or instruction.opname.startswith("INPLACE_")
        for place, instruction in enumerate(instructions)
        if any(later.opname == "STORE_SUBSCR" for later in instructions[place + 1 : place + 4])
    )


def _compares_objects(code: types.CodeType) -> bool:
    """Whether code has an ``is`` (other than with None) or an ``in``."""
    before = None
    for instruction in dis.get_instructions(code):
        if instruction.opname == "CONTAINS_OP":
            return True
        if instruction.opname == "IS_OP" and not (
            before and before.opname == "LOAD_CONST" and before.argval is None
        ):
            return True
        before = instruction
    return False


def _values(
    function: types.FunctionType, names: frozenset[str], owner: Any
) -> Iterator[tuple[str, Any]]:
    """Yield what the names in a function may refer to: globals, attributes, and what these hold."""
    found = [(name, function.__globals__.get(name)) for name in names]
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=True):
        if name in names:
            try:
                found.append((name, cell.cell_contents))
            except ValueError:
                continue  # not filled yet
    if owner is not None:
        found += [(name, _attribute(owner, name)) for name in names]
    for holder, value in found:
        if not has_class(value):
            continue
        yield holder, value
        if value is not None and value is not torch and not isinstance(value, _NO_HOLDERS):
            held = ((name, _attribute(value, name)) for name in names)
            yield from (item for item in held if has_class(item[1]))


_NO_ATTRIBUTES: Mapping[str, Any] = types.MappingProxyType({})
#: Kinds of values that a name may refer to and that call no functions of their own.
_NO_HOLDERS = (types.FunctionType, types.BuiltinFunctionType, torch.Tensor, torch.nn.Module)


def has_class(value: Any) -> bool:
    """Whether a value tells its class, so that ``isinstance`` works.

    A proxy may look for its object then, and raise any error if there is none.
    """
    try:
        return value.__class__ is not None
    except Exception:
        return False


def attributes_of(value: Any) -> Mapping[str, Any]:
    """Return the attributes that an object keeps itself, without running a ``__getattr__``.

    That of a placeholder for a missing package raises ImportError, for instance.
    """
    try:
        found = object.__getattribute__(value, "__dict__")
    except Exception:  # no attributes, or a property that fails
        return _NO_ATTRIBUTES
    return found if isinstance(found, Mapping) else _NO_ATTRIBUTES


def _attribute(value: Any, name: str) -> Any:
    """Return an attribute without running a property."""
    own = attributes_of(value)
    found_in = (vars(class_) for class_ in type(value).__mro__ if name in vars(class_))
    return own[name] if name in own else next(found_in, {}).get(name)
