"""Records a module as an ATen program with ``torch.export``. Imported only when something has to be
exported: a warm process never needs it.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OperatorBase
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    is_fake,
)
from torch.export import ExportedProgram, _trace
from torch.fx.experimental.symbolic_shapes import (
    GuardOnDataDependentSymNode,
    free_unbacked_symbols,
)
from torch.nn.utils import parametrize
from torch.utils import _pytree as pytree

from tvmify.artifact.recorded_shapes import symbol_names
from tvmify.capture.answers import answering_as_eager
from tvmify.capture.autocast import insert_casts, separate_autocast
from tvmify.capture.seeding import refusing_seeds
from tvmify.capture.transforms import ADVICE, refuse_transforms, resolve_vmap
from tvmify.capture.twin import with_forward
from tvmify.capture.varying import STATIC, Varying, dynamic_shapes
from tvmify.errors import (
    DependsOnValues,
    NeedsPython,
    NotCompiled,
    NotRecorded,
    UnsupportedOperator,
    described,
)
from tvmify.signature import map_only
from tvmify.system.faults import environment_fault
from tvmify.torch_compat import fake_kernels, node_annotations, operator_names
from tvmify.torch_compat.bystanders import unseen_by_others
from tvmify.torch_compat.caught_errors import caught_errors
from tvmify.torch_compat.covariance import Covariances
from tvmify.torch_compat.literals import known_literals
from tvmify.torch_compat.recording_mode import RecordingMode
from tvmify.torch_compat.recurrent_shapes import recurrent_shapes
from tvmify.torch_compat.silence import silenced
from tvmify.torch_compat.sizes_as_arguments import KeepingSizes
from tvmify.torch_compat.sizes_in_tensors import SizesInTensors
from tvmify.torch_compat.symbols import SYMBOLS, python_numbers
from tvmify.torch_compat.tracing import fake_modes, forget_tensors, tracing

fake_kernels.complete()
operator_names.avoid_keywords()
node_annotations.keep_apart()

_DECORATE_AROUND = (
    "Write it with torch.where, or decorate the submodules around it and leave this place to "
    "eager PyTorch."
)
_KNOWN_RESULTS = (
    "Return tensors in tuples, lists or dicts, or an object with plain attributes whose class is "
    "defined at the top level of its module."
)
#: They print whole graphs or tracebacks about what we report ourselves.
_LOUD = ("torch.fx.experimental.symbolic_shapes", "torch._subclasses.fake_tensor")
#: Packages whose frames mean nothing to the author of the module.
_NOT_THE_USERS = ("torch", "tvmify", "contextlib")
_PACKAGE = str(Path(__file__).parents[1])


class FunctionModule(torch.nn.Module):
    """A plain function as a module, since ``torch.export`` takes only modules."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Call the function."""
        with NoRealWrites():
            return self.function(*args, **kwargs)


class NoRealWrites(RecordingMode):
    """Refuse writes to real tensors while a program is recorded with fake ones. Operators on
    tensors that are neither inputs nor buffers, such as those of a closure, run for real: recording
    would change the tensors.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call an operator."""
        kwargs = kwargs or {}
        if (
            isinstance(func, HigherOrderOperator)
            or func is torch.ops.aten.detach_.default  # the last step of torch.tensor([...])
        ):
            return func(*args, **kwargs)
        tensors = [x for x in pytree.tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        if func._schema.is_mutable and not any(is_fake(tensor) for tensor in tensors):
            raise UnsupportedOperator(
                [str(func)], "it writes into a tensor that is neither argument nor buffer"
            )
        return func(*args, **kwargs)


def export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    varying: Varying = STATIC,
) -> ExportedProgram:
    """Record a module as an ATen program in the current grad mode.

    Parameters
    ----------
    varying
        Sizes that become symbols; all others are static.

    Raises
    ------
    CaptureError
        Its control flow, or the shape of a result, depends on the values of tensors, or
        ``torch.export`` cannot handle it.
    """
    args, kwargs = examples((args, kwargs))
    with tracing(), unseen_by_others():
        program = _export(module, args, kwargs, varying)
        refuse_transforms(program)
        insert_casts(program)
        program = resolve_vmap(program)
        _refuse_unknown_shapes(program)
        _simplify(program)
        forget_tensors(*fake_modes(program.graph))
    return program


def _export(
    module: torch.nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    varying: Varying,
) -> ExportedProgram:
    shapes = None
    if varying.axes:
        if kwargs and _takes_any_keyword(module):
            # torch.export cannot handle the symbols of such arguments.
            _gather_arguments(module)
            args, kwargs = (args, kwargs), {}
        shapes = dynamic_shapes(args, kwargs, varying)
    with (
        quiet(),
        known_literals(),
        separate_autocast(),
        uncached_parametrizations(),
        refusing_seeds(),
        recurrent_shapes(),
        caught_errors(),
        answering_as_eager(),
        Covariances(),
        KeepingSizes() if varying.axes else contextlib.nullcontext(),
        SizesInTensors() if varying.axes else contextlib.nullcontext(),
        python_numbers() if varying.axes else contextlib.nullcontext(),
    ):
        try:
            return torch.export.export(module, args, kwargs, dynamic_shapes=shapes, strict=False)
        except NotCompiled:
            raise
        except GuardOnDataDependentSymNode as error:
            if _passed_through(error, "torch.distributions"):
                raise DependsOnValues(
                    f"torch.distributions checks the values of its arguments ({_user_line(error)})",
                    "Pass validate_args=False to the distribution.",
                ) from error
            raise DependsOnValues(
                f"a branch depends on the values of tensors ({_user_line(error)})",
                _DECORATE_AROUND,
            ) from error
        except (DataDependentOutputException, DynamicOutputShapeException) as error:
            raise _depends_on_values(error.func, _user_line(error)) from error
        except Exception as error:
            if fault := environment_fault(error, "torch.export"):
                raise fault from error
            line = described(error).partition(". ")[0]
            reason = f"torch.export failed: {line} ({_user_line(error)})"
            if "in output, which is not a known type" in line:
                raise NeedsPython(reason, _KNOWN_RESULTS) from error
            if _passed_through(error, "torch._functorch"):
                raise NeedsPython(reason, ADVICE) from error
            raise NotRecorded(
                reason, "Run the module in eager PyTorch to see whether it fails there as well."
            ) from error


@contextlib.contextmanager
def uncached_parametrizations() -> Iterator[None]:
    """Hide the weights that a user caches by ``parametrize.cached()``.

    They would become constants of the program, and the cache would get tensors of the recording.
    """
    depth = parametrize._cache_enabled
    parametrize._cache_enabled -= depth
    try:
        yield
    finally:
        parametrize._cache_enabled += depth


def _takes_any_keyword(module: torch.nn.Module) -> bool:
    parameters = inspect.signature(module.forward).parameters.values()
    return any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)


def _gather_arguments(module: torch.nn.Module) -> None:
    """Let forward take its arguments as one tuple and one dictionary, with the same leaves."""
    cls = type(module)

    def forward(self: torch.nn.Module, args: Any, kwargs: Any) -> Any:
        return cls.forward(self, *args, **kwargs)

    module.__class__ = with_forward(cls, forward)


def examples(arguments: Any) -> Any:
    """Replace tensors by new contiguous ones. Strides are not part of a program: the next call may
    have others. Each leaf becomes a tensor of its own: one that is given twice would be recorded as
    one input, for all later calls.
    """

    def example(leaf: torch.Tensor) -> torch.Tensor:
        if leaf.layout is not torch.strided or leaf.is_quantized:
            return leaf.detach()
        return torch.empty(
            leaf.shape, dtype=leaf.dtype, device=leaf.device, requires_grad=leaf.requires_grad
        )

    with torch.inference_mode(False):
        return map_only(torch.Tensor, example, arguments)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Hide torch's own warnings about exporting; use inside `tracing`."""
    levels = {log: log.level for log in map(logging.getLogger, _LOUD)}
    for log in levels:
        log.setLevel(logging.CRITICAL)
    _trace.__dict__["print"] = lambda *_, **__: None  # of the graph up to there, too
    try:
        with silenced():
            yield
    finally:
        _trace.__dict__.pop("print", None)
        for log, level in levels.items():
            log.setLevel(level)


def _passed_through(error: BaseException, package: str) -> bool:
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(f.f_globals.get("__name__", "").startswith(f"{package}.") for f in frames)


def _user_line(error: BaseException) -> str:
    """Return the innermost line of user code that an error passed through."""
    place = "no source known"
    for frame, line in traceback.walk_tb(error.__traceback__):
        code = frame.f_code
        module = frame.f_globals.get("__name__", "")
        if module.partition(".")[0] not in _NOT_THE_USERS and not code.co_filename.startswith("<"):
            place = f"{code.co_filename}:{line}"
    return place


_READS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_CHECKS = (
    torch.ops.aten._assert_scalar.default,
    torch.ops.aten.sym_constrain_range.default,
    torch.ops.aten.sym_constrain_range_for_size.default,
)


def _is_only_checked(number: fx.Node) -> bool:
    """Whether only checks read a number, or what Python computes from it."""
    return all(
        user.target in _CHECKS
        or (
            user.op == "call_function"
            and not isinstance(user.target, OperatorBase)
            and _is_only_checked(user)
        )
        for user in number.users
    )


def _refuse_unknown_shapes(program: ExportedProgram) -> None:
    """Refuse programs in which a shape or a number depends on the values of tensors."""
    for node in program.graph.nodes:
        for value in pytree.tree_leaves(node.meta.get("val")):
            sizes = value.shape if isinstance(value, torch.Tensor) else (value,)
            symbols = [size for size in sizes if isinstance(size, SYMBOLS)]
            # torch.export may replace a number that a tensor holds by the one that fits its checks.
            is_read = symbols and node.target in _READS and not _is_only_checked(node)
            if is_read or any(free_unbacked_symbols(size) for size in symbols):
                line = _last_line(node.meta.get("stack_trace"))
                raise _depends_on_values(node.target, line)


def _depends_on_values(operator: Any, line: str) -> DependsOnValues:
    return DependsOnValues(
        f"the result of {operator} is a number, or has a size, that depends on the values of "
        f"tensors ({line})",
        _DECORATE_AROUND,
    )


def _simplify(program: ExportedProgram) -> None:
    """Remove ``detach_``, and checks of dtype and device, which the signature ensures."""
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in list(module.graph.nodes):
                if node.target is torch.ops.aten._assert_tensor_metadata.default:
                    module.graph.erase_node(node)
                elif node.target is torch.ops.aten.detach_.default and not _is_argument(node):
                    node.replace_all_uses_with(node.args[0])
                    module.graph.erase_node(node)
            module.recompile()


def _is_argument(node: torch.fx.Node) -> bool:
    (tensor,) = node.args
    return isinstance(tensor, torch.fx.Node) and tensor.op == "placeholder"


def _last_line(stack_trace: str | None) -> str:
    rows = [row.strip() for row in (stack_trace or "").splitlines() if row.strip()]
    line = ": ".join(rows[-2:])
    # for functions and TorchScript, PyTorch only saw lines of ours
    return line if line and _PACKAGE not in line else "no source known"


def has_symbols(program: ExportedProgram) -> bool:
    """Whether any size of an argument is still a symbol after the recording."""
    return bool(symbol_names(program))
