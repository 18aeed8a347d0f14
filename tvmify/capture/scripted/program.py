"""TorchScript programs: scripting, and recording the scripted graph as an ATen program."""

from __future__ import annotations

import contextlib
import functools
import re
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch.jit import _recursive
from torch.nn.utils.parametrize import is_parametrized
from torch.utils import _pytree as pytree

from tvmify.capture.carrier import Carrier
from tvmify.capture.draws import may_draw
from tvmify.capture.loading import import_recorder
from tvmify.capture.nested import avoid_nested_tensors
from tvmify.capture.program import Program
from tvmify.capture.questions import (
    asks_for_identity,
    asks_for_layout,
    asks_in,
    question_of,
    reached,
)
from tvmify.capture.scripted.arguments import bind, defaults_of
from tvmify.capture.scripted.constants import constant_attributes
from tvmify.capture.scripted.fingerprint import fingerprint
from tvmify.capture.scripted.interpreter import Interpreter, source_line
from tvmify.capture.scripted.leftovers import empty, noting
from tvmify.capture.scripted.meaning import misread_function, updates_dicts
from tvmify.capture.scripted.script_types import distinguish
from tvmify.capture.scripted.unfolding import unfolded
from tvmify.capture.state import ModulePath, State, resolve
from tvmify.capture.twin import twin
from tvmify.capture.varying import STATIC, Varying, check_sizes, shapes_of
from tvmify.errors import CaptureError, UnsupportedInput, described
from tvmify.signature import repeat, repetitions
from tvmify.system.faults import check_temporary_directory
from tvmify.torch_compat.parts import hidden_names, replaced_methods
from tvmify.torch_compat.silence import silenced
from tvmify.torch_compat.tracing import tracing

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: Has a graph and a schema, or its forward does.
Scripted: TypeAlias = "torch.jit.ScriptModule | torch.jit.ScriptFunction"


#: Where ``nn.TransformerEncoder`` checks whether a mask allows a nested tensor.
_NESTING = "aten::_nested_tensor_from_mask_left_aligned("


@contextlib.contextmanager
def without_autocast() -> Iterator[None]:
    """Keep TorchScript from inserting autocast's casts, since its rules differ from eager's."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


#: Methods that run before forward when a module is called.
_CALLS = ("__call__", "_call_impl")


class CannotScript(Exception):
    """Why ``torch.jit.script`` refused a module, as one line."""


@contextlib.contextmanager
def scripting(callable_: Any) -> Iterator[Scripted]:
    """Script a module or function, as `script` does, for the time of the context.

    Afterwards nothing that was made on the way holds the module's tensors.

    Raises
    ------
    CannotScript
        As `script` does.
    """
    made: list[torch.nn.Module] = []
    try:
        yield script(callable_, made)
    finally:
        empty(made)


def script(callable_: Any, made: list[torch.nn.Module] | None = None) -> Scripted:
    """Script a module or function without changing it.

    Parameters
    ----------
    made
        Gets every module that is made on the way.

    Raises
    ------
    CannotScript
        It cannot be scripted; the message is the reason in one line, with the source line.
    """
    functions = list(reached(callable_))
    if (question := question_of(functions)) is not None:
        raise CannotScript(f"it uses {question}, which means something else in TorchScript")
    source, constants = callable_, frozenset[str]()
    made = [] if made is None else made
    if isinstance(callable_, torch.nn.Module):
        _refuse_what_is_overlooked(callable_)
        source, constants = twin(callable_), constant_attributes(callable_)
        made += (m for m in source.modules() if not isinstance(m, torch.jit.ScriptModule))
        avoid_nested_tensors(source)
        distinguish(source)
    # That TorchScript is deprecated is nothing a user could act on. Other warnings are about
    # annotations, which eager and torch.export do not read.
    with tracing(), without_autocast(), silenced(), unfolded(constants), noting(made):
        types = _types_of(source)
        try:
            scripted = torch.jit.script(source)
        except Exception as error:
            _types_of(source, types)
            raise CannotScript(_one_line(error)) from error
    if not isinstance(scripted, (torch.jit.ScriptModule, torch.jit.ScriptFunction)):
        # TorchScript turns a callable object into an object, without a graph of its call
        raise CannotScript(f"a {type(callable_).__qualname__} is not a function")
    if isinstance(scripted, torch.jit.ScriptModule) and not hasattr(scripted, "forward"):
        raise CannotScript("forward is overloaded, which TorchScript turns into several methods")
    if any(function.code.updates for function in functions) and updates_dicts(scripted):
        raise CannotScript("it updates an item of a dict, which TorchScript does not do in place")
    if (name := misread_function(scripted, functions)) is not None:
        raise CannotScript(f"{name} is given a tensor, which means something else in TorchScript")
    return scripted


def _refuse_what_is_overlooked(module: torch.nn.Module) -> None:
    """Refuse what Python looks at but TorchScript ignores. To TorchScript, a call of a module is
    its forward, and an attribute is what is registered.
    """
    for path, part in module.named_modules():
        if isinstance(part, torch.jit.ScriptModule):
            continue
        where = f" of {path!r}" if path else ""
        if names := hidden_names(part):
            raise CannotScript(f"an attribute{where} hides the registered {min(names)!r}")
        if names := replaced_methods(part):  # it would call the method of the class
            raise CannotScript(f"an attribute{where} replaces the method {min(names)!r}")
        if not isinstance(part, torch.fx.GraphModule) and (name := _own_call(part)):
            raise CannotScript(f"a class{where} defines {name}")
        if is_parametrized(part):  # scripting succeeds, and the script raises
            raise CannotScript(f"a weight{where} is parametrized")


def _own_call(module: torch.nn.Module) -> str | None:
    bases = type(module).__mro__[: type(module).__mro__.index(torch.nn.Module)]
    held = (vars(module), *map(vars, bases))
    return next((name for name in _CALLS if any(name in members for members in held)), None)


def _types_of(source: Any, replacement: dict[type, Any] | None = None) -> dict[type, Any]:
    """Return, or restore, the TorchScript types of a module's classes. After a failure torch keeps
    the incomplete types, and then fails for the next module of that class, unable to redefine
    methods.
    """
    store = _recursive.concrete_type_store.type_store
    classes = {type(m) for m in source.modules()} if isinstance(source, torch.nn.Module) else set()
    present = {class_: list(store.get(class_, ())) for class_ in classes}
    if replacement is not None:
        store.update(replacement)
    return present


def _one_line(error: Exception) -> str:
    text = str(error).strip()
    message = text.partition("\n")[0].rstrip(":. ") or type(error).__name__
    if isinstance(error, (LookupError, AttributeError, AssertionError)):
        message = described(error)  # of torch itself: a name, or nothing that says what of
    message = re.sub(r" at 0x[0-9a-f]+", "", message)
    place = source_line(text)
    return f"{message} ({place})" if place else message


class ScriptedProgram(Program):
    """A scripted module or function; valid for every signature.

    Parameters
    ----------
    scripted
        The result of `script`, or what the user scripted, traced or loaded.
    original
        The module or function before it was scripted; None if there is only ``scripted``. Its
        tensors are used (they may be replaced later), and its result types.

    Raises
    ------
    UnsupportedOperator
        The graph has operators or effects that cannot be interpreted.
    """

    method = "torchscript"
    reason = None
    serves_every_signature = True

    def __init__(self, scripted: Scripted, original: Callable[..., Any] | None = None) -> None:
        is_module = isinstance(scripted, torch.jit.ScriptModule)
        forward: Any = scripted.forward if is_module else scripted
        self.is_plain = self._is_python = original is not None
        self._defaults = None if original is None else defaults_of(original)
        root = scripted._c if isinstance(scripted, torch.jit.ScriptModule) else None
        with without_autocast():
            graph = forward.inlined_graph
        self._read_graph(graph, forward.schema, root)
        self.may_draw = may_draw(original, self.fingerprint)
        self.asks_for_layout = asks_for_layout(original, self.fingerprint)
        self.asks_for_identity &= original is None or asks_for_identity(original)
        self._keep_only(scripted if original is None else original)

    def _read_graph(
        self, graph: torch._C.Graph, schema: Any, root: torch._C.ScriptModule | None
    ) -> None:
        self._graph = graph
        self._schema = schema
        self._is_module = root is not None
        self._state = State(root)
        # The last recording with symbols, shared by the programs of all owners.
        self._recorded: dict[Hashable, ExportedProgram] = {}
        self.fingerprint = fingerprint(graph, schema, self._state, self._is_python)
        self.weights = tuple(self._state.tensors)
        self.asks_for_identity = " = aten::__is" in self.fingerprint
        # A program that never asks is recorded the same way for all calls.
        self._grad_mode = self._inference_mode = False
        self._asks = asks_in(self.fingerprint)
        if self._asks:
            self._grad_mode = torch.is_grad_enabled()
            self._inference_mode = torch.is_inference_mode_enabled()
            tensors = self._state.tensors.items()
            wanted = ", ".join(name for name, tensor in tensors if tensor.requires_grad)
            self._needs_gradients = bool(wanted) and self._grad_mode
            self.fingerprint += (
                f"\ngrad mode {self._grad_mode}, inference mode {self._inference_mode}, "
                f"gradients of [{wanted}]"
            )

    def _keep_only(self, owner: Any) -> None:
        """Read weights from their owner from now on."""
        self._owner = owner
        self._state.forget_root(owner)

    def accepts(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the annotations of forward accept these arguments."""
        return self.refusal(args, kwargs) is None

    def refusal(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str | None:
        """Return why the annotations reject these arguments, or None."""
        try:
            self._check_answers(args, kwargs)
            self._bind(args, kwargs)
        except UnsupportedInput as error:
            return error.reason
        return None

    def _check_answers(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Refuse calls in which a program that asks about gradients would get another answer."""
        if not self._asks:
            return
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
        if modes != (self._grad_mode, self._inference_mode):
            raise UnsupportedInput("It was captured in another grad mode", "Capture it again.")
        tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        on_inference = "aten::is_inference(" in self.fingerprint
        if any(x.requires_grad or (on_inference and x.is_inference()) for x in tensors):
            raise UnsupportedInput(
                "forward asks whether tensors require gradients, and an argument does, or is an "
                "inference tensor",
                "Pass tensors without gradients that were created outside torch.inference_mode().",
            )
        if self._needs_gradients and _NESTING in self.fingerprint:
            raise UnsupportedInput(
                "TorchScript checks its mask first", "Capture it by torch.export."
            )

    def tensors(self) -> list[torch.Tensor]:
        """Return the current tensors of the original module."""
        return list(self._tensors().values())

    def export(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], varying: Varying = STATIC
    ) -> ExportedProgram:
        """Record a run of the graph for arguments of this signature.

        The last recording with symbols is kept: programs that differ in their hints share it, or
        the program of this call alone takes it over, if no symbol has remained.
        """
        if not varying.axes and not self._recorded:
            return self._record(args, kwargs, STATIC)
        from tvmify.capture.exporting import has_symbols, with_weights

        call = self._call_key(args, kwargs, varying)
        if not varying.axes:
            recorded = self._recorded.pop(call, None)
            if recorded is None:
                return self._record(args, kwargs, STATIC)
            return with_weights(recorded, self._tensors())
        if (recorded := self._recorded.get(call)) is None:
            exported = self._record(args, kwargs, varying)
            if not has_symbols(exported):
                call = self._call_key(args, kwargs, STATIC)
            self._recorded.clear()
            recorded = self._recorded[call] = with_weights(exported, {})
        return with_weights(recorded, self._tensors())

    def _call_key(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], varying: Varying
    ) -> Hashable:
        leaves, structure = pytree.tree_flatten((args, kwargs))
        repeated = str(repetitions((args, kwargs)))
        return structure, shapes_of(leaves, varying), repeated, varying.recorded(), _modes()

    def _record(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], varying: Varying
    ) -> ExportedProgram:
        check_temporary_directory()
        # imports sympy and much else, which a warm process never needs
        import_recorder()
        from tvmify.capture.exporting import export
        from tvmify.capture.scripted.eager import eager_result

        self._bind(args, kwargs)
        expected = None
        with contextlib.ExitStack() as modes:
            if self._asks and self._inference_mode != torch.is_inference_mode_enabled():
                modes.enter_context(torch.inference_mode(self._inference_mode))
            modes.enter_context(torch.set_grad_enabled(self._grad_mode))
            if self.is_plain:
                expected = eager_result(self._owner, args, kwargs)
            repeated = repetitions((args, kwargs)) if self.asks_for_identity else {}
            recorded = _Recorded(self, self._tensors(), expected, repeated, tuple(kwargs), varying)
            return export(recorded, args, kwargs, varying)

    def run(self, args: Any, kwargs: Any, tensors: dict[str, torch.Tensor]) -> Any:
        """Run the program with these tensors as its weights."""
        inputs = self._bind(args, kwargs)
        if self._is_module:
            inputs.insert(0, ModulePath(""))
        read = functools.partial(self._state.read, tensors=tensors)
        return Interpreter(self._graph, read, self._is_python).run(inputs)

    def _bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        arguments = list(self._schema.arguments)[1 if self._is_module else 0 :]
        return bind(arguments, args, kwargs, self._defaults)

    def _tensors(self) -> dict[str, torch.Tensor]:
        return {name: self._tensor(name) for name in self.weights}

    def _tensor(self, name: str) -> torch.Tensor:
        scripted = self._state.tensors.get(name)
        return resolve(self._owner, name) if scripted is None else scripted


def _modes() -> Hashable:
    """Return torch's modes that decide which operators and dtypes are recorded."""
    casts = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return torch.get_default_dtype(), torch.get_default_device(), *casts


class _Recorded(Carrier):
    """Runs a program with the tensors that it carries."""

    def __init__(
        self,
        program: ScriptedProgram,
        tensors: dict[str, torch.Tensor],
        expected: Any,
        repeated: Mapping[int, int],
        keywords: tuple[str, ...],
        varying: Varying,
    ) -> None:
        super().__init__()
        call = repeated, keywords, varying
        self.__dict__["_tvmify"] = (program, tuple(tensors), expected, *call)
        for name, tensor in tensors.items():
            self.carry(name, tensor)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        program, names, expected, repeated, keywords, varying = self.__dict__["_tvmify"]
        # torch.export may have put keyword arguments into another order.
        kwargs = {name: kwargs[name] for name in keywords}
        check_sizes(pytree.tree_leaves((args, kwargs)), varying)
        args, kwargs = repeat((args, kwargs), repeated)
        tensors = {name: self.carried(name) for name in names}
        result = program.run(args, kwargs, tensors)
        if expected is not None:
            return expected.restore(result)
        if program.is_plain and any(
            isinstance(leaf, (int, torch.SymInt)) and type(leaf) is not bool
            for leaf in pytree.tree_leaves(result)
        ):
            raise CaptureError(
                "TorchScript returns integers where eager PyTorch may return a torch.Size",
                "Return tensors.",
            )
        return result
