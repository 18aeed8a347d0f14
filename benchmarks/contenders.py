"""Ways to run a PyTorch module on the CPU, each with its best settings that keep results exact.

A contender takes a module and its arguments, and returns the function to call from then on. The
time until then, including its own imports, counts as part of its first call.
"""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor, nn

    from tvmify import Explanation

    Prepare = Callable[[nn.Module, tuple[Tensor, ...], "Setting"], Callable[[], Any]]


@dataclass
class Setting:
    """What a contender gets, and what it reports back.

    Attributes
    ----------
    threads
        The number of threads that it may use.
    onnx
        The model as an ONNX file, exported once for all contenders; it may be missing.
    export_seconds
        The time of the export, added to the first call of each contender that reads the file.
    used_onnx
        Set by a contender that read the file.
    remark
        Set by a contender that needs a note below the table; read after the first call.
    """

    threads: int
    onnx: Path
    export_seconds: float = 0.0
    used_onnx: bool = False
    remark: Callable[[], str] = str


def eager(module: nn.Module, args: tuple[Tensor, ...], _: Setting) -> Callable[[], Any]:
    """PyTorch without a compiler."""
    return lambda: module(*args)


def torchscript(module: nn.Module, args: tuple[Tensor, ...], setting: Setting) -> Callable[[], Any]:
    """Scripted, or traced where that fails, frozen, and optimized for inference."""
    import torch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # TorchScript is deprecated, but still a peer
        try:
            scripted: Any = torch.jit.script(module)
        except Exception:  # transformers cannot be scripted, and fail in all kinds of ways
            scripted = torch.jit.trace(module, args, check_trace=False)
            setting.remark = lambda: "traced: it cannot be scripted"
        optimized = torch.jit.optimize_for_inference(scripted)
    return lambda: optimized(*args)


def inductor(module: nn.Module, args: tuple[Tensor, ...], _: Setting) -> Callable[[], Any]:
    """``torch.compile`` with its default options."""
    import torch

    compiled = torch.compile(module)
    return lambda: compiled(*args)


def inductor_freezing(
    module: nn.Module, args: tuple[Tensor, ...], setting: Setting
) -> Callable[[], Any]:
    """``torch.compile`` with weights as constants: folded batch norms, packed weights."""
    import torch._inductor.config

    torch._inductor.config.freezing = True
    return inductor(module, args, setting)


def openvino(module: nn.Module, args: tuple[Tensor, ...], setting: Setting) -> Callable[[], Any]:
    """Convert the module, or its ONNX file if that fails; optimize for latency.

    A bfloat16 module is converted in float32, and OpenVINO is told to compute in bfloat16.
    """
    import openvino as ov  # pyright: ignore[reportMissingImports]
    import torch

    narrow = any(p.dtype is torch.bfloat16 for p in module.parameters())
    if narrow:
        module = module.float()
        args = tuple(arg.float() if arg.is_floating_point() else arg for arg in args)
    try:
        with torch.no_grad(), contextlib.redirect_stdout(io.StringIO()):
            model = ov.convert_model(module, example_input=args)
        model.reshape({i: list(arg.shape) for i, arg in enumerate(args)})
    except Exception as error:
        if not setting.onnx.exists():
            raise
        remark = f"read from ONNX, since the module failed: {first_line(error)}"
        setting.remark = lambda: remark
        setting.used_onnx = True
        model = ov.convert_model(setting.onnx)
    configuration = {
        "PERFORMANCE_HINT": "LATENCY",
        "INFERENCE_PRECISION_HINT": "bf16" if narrow else "f32",
        "INFERENCE_NUM_THREADS": setting.threads,
    }
    request = ov.Core().compile_model(model, "CPU", configuration).create_infer_request()
    inputs = [arg.numpy() for arg in args]
    return lambda: list(request.infer(inputs, share_inputs=True, share_outputs=True).values())


def onnx_runtime(_: nn.Module, args: tuple[Tensor, ...], setting: Setting) -> Callable[[], Any]:
    """Run the ONNX file with all optimizations."""
    if not setting.onnx.exists():
        raise FileNotFoundError("the model could not be exported to ONNX")
    setting.used_onnx = True
    session = onnx_session(setting.onnx, setting.threads)
    names = [given.name for given in session.get_inputs()]
    inputs = {name: arg.numpy() for name, arg in zip(names, args, strict=True)}
    return lambda: session.run(None, inputs)


def onnx_session(path: Path, threads: int) -> Any:
    """Return ONNX Runtime's session for a file, with all optimizations."""
    import onnxruntime  # pyright: ignore[reportMissingImports]

    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.intra_op_num_threads = threads
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(path, options, ["CPUExecutionProvider"])


def tvmify(module: nn.Module, args: tuple[Tensor, ...], setting: Setting) -> Callable[[], Any]:
    """Decorate the module, with default options."""
    from tvmify import tvmify as decorate

    fast = decorate(module, progress=False)
    setting.remark = lambda: runs_in_eager(fast.explain())
    return lambda: fast(*args)


@dataclass(frozen=True)
class Contender:
    """A contender's name in the table, and how to run it.

    Attributes
    ----------
    title
        Its name in the table.
    prepare
        Takes a module and its arguments, and returns the function to call.
    mode
        The grad mode of its calls: Inductor folds weights only under ``no_grad``.
    """

    title: str
    prepare: Prepare
    mode: str = "inference_mode"


BASELINE = "eager"
OURS = "tvmify"
CONTENDERS: dict[str, Contender] = {
    BASELINE: Contender("eager", eager),
    "torchscript": Contender("TorchScript", torchscript),
    "inductor": Contender("Inductor", inductor, "no_grad"),
    "freezing": Contender("Inductor freezing", inductor_freezing, "no_grad"),
    "openvino": Contender("OpenVINO", openvino),
    "onnxruntime": Contender("ONNX Runtime", onnx_runtime),
    OURS: Contender("tvmify", tvmify),
}


def runs_in_eager(explanation: Explanation) -> str:
    """Say why a module, called with one signature, ran in eager PyTorch; empty if it did not."""
    (signature,) = explanation.methods[0].signatures
    if signature.runs != "eager":
        return ""
    why = "which is faster" if signature.faster_in_eager else signature.reason
    return f"runs in eager PyTorch: {why}" + (f"; {signature.verdict}" * bool(signature.verdict))


def first_line(error: Exception) -> str:
    """Return what an error says, without the pages that compilers append."""
    return (str(error).strip().splitlines() or [repr(error)])[0]
