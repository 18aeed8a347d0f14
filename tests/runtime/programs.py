"""Small programs, built with TVM as the compiler builds them, that the tests of this folder run."""

from __future__ import annotations

import dataclasses
import math
import tempfile
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import tvm
from torch.utils import _pytree as pytree
from tvm import relax, tirx
from tvm.relax import BlockBuilder, TensorType, Var
from tvm.relax import op as R
from tvm.script import tirx as T

from tvmify.artifact import Artifact
from tvmify.artifact.results import Computed
from tvmify.artifact.shapes import Shapes
from tvmify.target import Target

Shape = tuple[int, ...]
#: Shape and dtype of a parameter of a program.
Parameter = tuple[Shape, str]
Body = Callable[..., Any]


def on_task(index: int) -> None:
    """Called by the tasks of `tasks` and `meeting`; a test may replace it."""


@tvm.register_global_func("tvmify.tests.task", override=True)
def _task(index: int) -> None:
    on_task(index)


def library(functions: dict[str, tuple[Sequence[Parameter], Body]], **kernels: Any) -> bytes:
    """Build a library that exports these functions; kernels are TIR that they may refer to."""
    builder = BlockBuilder()
    known = {name: builder.add_func(kernel, name) for name, kernel in kernels.items()}
    for function, (parameters, body) in functions.items():
        variables = [
            Var(f"p{i}", TensorType(shape, dtype)) for i, (shape, dtype) in enumerate(parameters)
        ]
        with builder.function(function, variables):
            with builder.dataflow():
                result = builder.emit_output(body(*variables, **known))
            builder.emit_func_output(result)
    executable = relax.build(builder.get(), target="llvm", exec_mode="compiled")
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "library.so")
        executable.export_library(str(path))
        return path.read_bytes()


def artifact(
    code: bytes,
    inputs: int = 1,
    result: Any = 0,
    weights: Sequence[str] = (),
    packed: Sequence[str] = (),
) -> Artifact:
    """Describe a library whose results are its tensors in order, nested like `result`."""
    leaves, structure = pytree.tree_flatten(result)
    outputs = tuple(Computed(i) for i in range(len(leaves)))
    return Artifact(
        library=code,
        target=str(Target("llvm")),
        inputs=tuple(range(inputs)),
        weights=tuple(weights),
        packed=tuple(packed),
        outputs=outputs,
        output_structure=pytree.treespec_dumps(structure),
    )


def _viewed(x: Any, *shape: int) -> Any:
    """A view; Relax's own reshape would become a kernel that copies, without our pass."""
    shape = shape or (math.prod(int(size) for size in x.ty.shape),)
    result = TensorType(shape, x.ty.dtype)
    return R.call_pure_packed(
        "vm.builtin.reshape", x, relax.ShapeExpr(list(shape)), ty_args=[result]
    )


@cache
def added(shape: Shape = (4, 16), dtype: str = "float32") -> Artifact:
    """x + x."""
    return artifact(library({"main": ([(shape, dtype)], lambda x: R.add(x, x))}))


@cache
def each_added() -> Artifact:
    """x + x for each of four tensors; the second has integers."""
    floats, integers = ((4, 16), "float32"), ((3,), "int64")

    def body(*tensors: Any) -> Any:
        return relax.Tuple([R.add(x, x) for x in tensors])

    parameters = [floats, integers, floats, floats]
    return artifact(library({"main": (parameters, body)}), 4, [0] * 4)


@cache
def squared(shape: Shape = (4, 16)) -> Artifact:
    """x * x."""
    return artifact(library({"main": ([(shape, "float32")], lambda x: R.multiply(x, x))}))


@cache
def transposed(shape: Shape, dtype: str) -> Artifact:
    """x with its dimensions in reverse order, in its own memory."""
    return artifact(library({"main": ([(shape, dtype)], R.permute_dims)}))


def of_rows(body: Body, shapes: Shapes) -> Artifact:
    """body(x) for x[s0, 16] with any number of rows."""
    rows = tirx.Var("s0", "int64")
    code = library({"main": ([((rows, 16), "float32")], body)})  # type: ignore[list-item]  # a symbol
    return dataclasses.replace(artifact(code), shapes=shapes)


@cache
def identity(shape: Shape = (4, 16)) -> Artifact:
    """x itself."""
    return artifact(library({"main": ([(shape, "float32")], lambda x: x)}))


@cache
def flattened(shape: Shape = (4, 16)) -> Artifact:
    """x as one dimension, which is a view of x."""
    return artifact(library({"main": ([(shape, "float32")], _viewed)}))


@cache
def beside(shape: Shape) -> Artifact:
    """(a view of y[4, 16], x + x, y + y) for x of this shape: views and fresh results, in turn."""
    parameters = [(shape, "float32"), ((4, 16), "float32")]
    body = lambda x, y: relax.Tuple([_viewed(y), R.add(x, x), R.add(y, y)])  # noqa: E731
    return artifact(library({"main": (parameters, body)}), inputs=2, result=(0, 1, 2))


@cache
def twice() -> Artifact:
    """(y, y) with y = x + x."""

    def main(x: Any) -> Any:
        builder = BlockBuilder.current()
        assert builder is not None
        y = builder.emit(R.add(x, x))
        return relax.Tuple([y, y])

    return artifact(library({"main": ([((4, 16), "float32")], main)}), result=(0, 1))


@cache
def linear(rows: int = 4, name: str = "linear") -> Artifact:
    """x @ weight.T + bias, with weight[8, 16] packed as its transpose and bias unchanged."""
    parameters = [((8, 16), "float32"), ((8,), "float32")]
    packed = [((16, 8), "float32"), ((8,), "float32")]
    code = library(
        {
            "main": ([((rows, 16), "float32"), *packed], lambda x, w, b: R.add(R.matmul(x, w), b)),
            "pack": (parameters, lambda w, b: relax.Tuple([R.permute_dims(w), b])),
        }
    )
    keys = (f"transpose({name}.weight)", f"{name}.bias")
    return artifact(code, weights=(f"{name}.weight", f"{name}.bias"), packed=keys)


@cache
def packing(*shapes: Shape) -> Artifact:
    """Twice each weight, then the first weight unchanged as the last packed weight."""
    parameters = [(shape, "float32") for shape in shapes]
    functions = {
        "main": ([((4,), "float32"), *parameters, parameters[0]], lambda x, *_: R.add(x, x)),
        "pack": (parameters, lambda *w: relax.Tuple([*(R.add(one, one) for one in w), w[0]])),
    }
    names = [f"weight{i}" for i in range(len(shapes))]
    return artifact(library(functions), weights=names, packed=[*names, "first"])


@cache
def leaking() -> Artifact:
    """(x + weight, weight): returns a packed weight, and a view of it."""
    functions = {
        "main": (
            [((16,), "float32")] * 2,
            lambda x, w: relax.Tuple([R.add(x, w), w, _viewed(w, 4, 4)]),
        ),
        "pack": ([((16,), "float32")], lambda w: relax.Tuple([w])),
    }
    return artifact(library(functions), result=(0, 1, 2), weights=("w",), packed=("w",))


@cache
def overlapping() -> Artifact:
    """(x + first, first) for two packed weights; the second is a part of the first."""
    parameters = [((64,), "float32"), ((16,), "float32")]
    body = lambda x, first, second: relax.Tuple(  # noqa: E731
        [R.add(x, first), first, _viewed(first, 4, 16), second]
    )
    functions = {
        "main": ([((64,), "float32"), *parameters], body),
        "pack": (parameters, lambda first, second: relax.Tuple([first, second])),
    }
    return artifact(library(functions), result=(0, 1, 2, 3), weights=("a", "b"), packed=("a", "b"))


@T.prim_func(s_tir=True)
def _tasks(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):  # type: ignore[valid-type]
    for i in T.parallel(8):
        with T.sblock("task"):
            v = T.axis.spatial(8, i)
            y[v] = x[v]
            T.evaluate(T.call_packed("tvmify.tests.task", v))


@cache
def tasks() -> Artifact:
    """A copy of x[8] by a parallel loop that calls `on_task` with each index."""
    parameter = TensorType((8,), "float32")
    body = lambda x, kernel: relax.call_tir(kernel, [x], parameter)  # noqa: E731
    return artifact(library({"main": ([((8,), "float32")], body)}, kernel=_tasks))


@T.prim_func(s_tir=True)
def _meeting(x: T.Buffer((8,), "float32"), y: T.Buffer((8,), "float32")):  # type: ignore[valid-type]
    with T.sblock("root"):
        z = T.alloc_buffer((8,), "float32")
        with T.attr(0, "pragma_parallel_launch_point", 1):
            with T.attr(0, "pragma_parallel_barrier_when_finish", 1):
                for i in T.parallel(8):
                    T.evaluate(T.call_packed("tvmify.tests.task", i))
                    z[i] = x[i] + T.float32(1)
            for i in T.parallel(8):
                y[i] = z[7 - i]


@cache
def meeting() -> Artifact:
    """(x[8] + 1) backwards: two parallel loops on one team, and a barrier between them."""
    parameter = TensorType((8,), "float32")
    body = lambda x, kernel: relax.call_tir(kernel, [x], parameter)  # noqa: E731
    return artifact(library({"main": ([((8,), "float32")], body)}, kernel=_meeting))
