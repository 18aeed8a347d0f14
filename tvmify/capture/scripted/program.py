"""Programs captured by TorchScript: the scripted graph is recorded as an ATen program."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Hashable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from tvmify.capture.carrier import Carrier
from tvmify.capture.draws import may_draw
from tvmify.capture.loading import import_recorder
from tvmify.capture.program import Program
from tvmify.capture.questions import ASKING, asks_for_identity, asks_for_layout
from tvmify.capture.scripted.arguments import bind, defaults_of
from tvmify.capture.scripted.fingerprint import describe
from tvmify.capture.scripted.interpreter import Interpreter
from tvmify.capture.scripted.scripting import Scripted, without_autocast
from tvmify.capture.state import ModulePath, State, resolve
from tvmify.capture.varying import STATIC, Varying, check_sizes, shapes_of
from tvmify.errors import CaptureError, UnsupportedInput
from tvmify.signature import repeat, repetitions
from tvmify.system.faults import check_temporary_directory

if TYPE_CHECKING:
    from torch.export import ExportedProgram

#: Where ``nn.TransformerEncoder`` checks whether a mask allows a nested tensor.
_NESTING = "aten::_nested_tensor_from_mask_left_aligned"
#: What compares two tensors, or a tensor and None.
_IDENTITY = frozenset({"aten::__is__", "aten::__isnot__"})


class GraphProgram(Program):
    """An inlined graph of TorchScript; valid for every signature.

    Parameters
    ----------
    graph, schema
        The graph, and the schema of its arguments.
    root
        The scripted module that the graph reads weights from; None for a function.
    is_python
        Whether numbers and strings follow Python's rules rather than TorchScript's.
    checks_modes
        Whether a program that asks about gradients refuses calls in another grad mode.

    Raises
    ------
    UnsupportedOperator
        The graph has operators or effects that cannot be interpreted.
    """

    method = "torchscript"
    reason = None
    serves_every_signature = True
    is_plain = False
    _defaults: dict[str, Any] | None = None

    def __init__(
        self,
        graph: torch._C.Graph,
        schema: Any,
        root: torch._C.ScriptModule | None,
        *,
        is_python: bool,
        checks_modes: bool = True,
    ) -> None:
        self._graph = graph
        self._schema = schema
        self._is_module = root is not None
        self._is_python = is_python
        self._state = State(root)
        # The last recording with symbols, shared by the programs of all owners.
        self._recorded: dict[Hashable, ExportedProgram] = {}
        described = describe(graph, schema, self._state, is_python)
        self.fingerprint, self._operators = described
        self.weights = tuple(self._state.tensors)
        self.asks_for_identity = not _IDENTITY.isdisjoint(self._operators)
        # A program that never asks is recorded the same way for all calls.
        self._asks = self._grad_mode = self._inference_mode = False
        if not ASKING.isdisjoint(self._operators):
            self._add_modes(checks_modes)

    def _add_modes(self, checks_modes: bool) -> None:
        """Make torch's modes a part of the fingerprint."""
        self._asks = checks_modes
        grad_mode = torch.is_grad_enabled()
        self._grad_mode = checks_modes and grad_mode
        self._inference_mode = torch.is_inference_mode_enabled()
        tensors = self._state.tensors.items()
        wanted = ", ".join(name for name, tensor in tensors if tensor.requires_grad)
        self._needs_gradients = bool(wanted) and grad_mode
        self.fingerprint += (
            f"\ngrad mode {grad_mode}, inference mode {self._inference_mode}, "
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
            raise UnsupportedInput("it was captured in another grad mode", "Capture it again.")
        tensors = (x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor))
        on_inference = "aten::is_inference" in self._operators
        if any(x.requires_grad or (on_inference and x.is_inference()) for x in tensors):
            raise UnsupportedInput(
                "forward asks whether tensors require gradients, and an argument does, or is an "
                "inference tensor",
                "Pass tensors without gradients that were created outside torch.inference_mode().",
            )
        if self._needs_gradients and _NESTING in self._operators:
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
        from tvmify.capture.exporting import has_symbols
        from tvmify.capture.weights import with_weights

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


class ScriptedProgram(GraphProgram):
    """A scripted module or function.

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

    def __init__(self, scripted: Scripted, original: Callable[..., Any] | None = None) -> None:
        is_module = isinstance(scripted, torch.jit.ScriptModule)
        forward: Any = scripted.forward if is_module else scripted
        self.is_plain = original is not None
        self._defaults = None if original is None else defaults_of(original)
        root = scripted._c if isinstance(scripted, torch.jit.ScriptModule) else None
        with without_autocast():
            graph = forward.inlined_graph
        super().__init__(graph, forward.schema, root, is_python=self.is_plain)
        self.may_draw = may_draw(original, self._operators)
        self.asks_for_layout = asks_for_layout(original, self._operators)
        self.asks_for_identity &= original is None or asks_for_identity(original)
        self._keep_only(scripted if original is None else original)


def _modes() -> Hashable:
    """Return torch's modes that decide which operators and dtypes are recorded."""
    casts = [(torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in ("cpu", "cuda")]
    return torch.get_default_dtype(), torch.get_default_device(), *casts


class _Recorded(Carrier):
    """Runs a program with the tensors that it carries."""

    def __init__(
        self,
        program: GraphProgram,
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
