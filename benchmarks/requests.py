"""Requests of random sizes: what they cost the first time, and once everything is compiled.

    python -m benchmarks.requests [--models minilm,bert_4] [--requests 200] [--rounds 3]

Each contender gets the same requests in a process of its own. The first pass is from cold caches.
Further passes are made in turns. Times are CPU seconds of the process and its children, since
compilers use several processes.
"""

from __future__ import annotations

import contextlib
import io
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks import passes
from benchmarks.contenders import onnx_session
from benchmarks.passes import Pass

if TYPE_CHECKING:
    from torch import Tensor, nn

    #: What answers a request, and what counts programs, as in `Pass`.
    Contender = tuple[Callable[[tuple[Tensor, ...]], Any], Callable[[], int | None]]

MODELS = ("minilm", "bert_4")
BATCHES = (1, 16)
LENGTHS = (5, 200)
SEED = 1


def sizes(count: int) -> list[tuple[int, int]]:
    """Return the batch and the length of each request, the same in every process."""
    draw = random.Random(SEED)
    return [(draw.randint(*BATCHES), draw.randint(*LENGTHS)) for _ in range(count)]


def _model(name: str) -> nn.Module:
    import torch
    import transformers

    from benchmarks import models

    if name == "minilm":
        return models.build("minilm_16")[0]
    torch.manual_seed(SEED)
    config = transformers.BertConfig(num_hidden_layers=4)
    from benchmarks.models.transformer import Hidden

    return Hidden(transformers.BertModel(config)).eval()


def _eager(module: nn.Module) -> Contender:
    return lambda request: module(*request), _unknown


def _inductor(module: nn.Module) -> Contender:
    import torch

    compiled = torch.compile(module, dynamic=True)
    return lambda request: compiled(*request), _unknown


def _openvino(module: nn.Module) -> Contender:
    import openvino as ov  # pyright: ignore[reportMissingImports]
    import torch

    example = tuple(torch.ones(2, 16, dtype=torch.long) for _ in range(2))
    model = ov.convert_model(module, example_input=example)
    model.reshape({i: [-1, -1] for i in range(len(model.inputs))})
    hints = {"PERFORMANCE_HINT": "LATENCY", "INFERENCE_PRECISION_HINT": "f32"}
    request = ov.Core().compile_model(model, "CPU", hints).create_infer_request()
    return lambda given: list(request.infer([x.numpy() for x in given]).values()), _unknown


def _onnx_runtime(module: nn.Module) -> Contender:
    import torch
    from torch.export import Dim

    example = tuple(torch.ones(2, 16, dtype=torch.long) for _ in range(2))
    # One entry, since `Hidden.forward` takes ``*inputs``.
    varying = (tuple({0: Dim("batch"), 1: Dim("length")} for _ in example),)
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        path = Path(folder) / "model.onnx"
        torch.onnx.export(module, example, path, dynamic_shapes=varying, dynamo=True)
        session = onnx_session(path, threads=1)
    names = [given.name for given in session.get_inputs()]

    def run(request: tuple[Tensor, ...]) -> Any:
        return session.run(None, {n: x.numpy() for n, x in zip(names, request, strict=True)})

    return run, _unknown


def _tvmify(module: nn.Module) -> Contender:
    from tvmify import tvmify

    fast = tvmify(module, compare=False, progress=False)
    return lambda request: fast(*request), lambda: fast.cache_info().builds


def _unknown() -> None:
    return None


CONTENDERS: dict[str, Callable[[nn.Module], Contender]] = {
    "eager": _eager,
    "inductor": _inductor,
    "openvino": _openvino,
    "onnxruntime": _onnx_runtime,
    "tvmify": _tvmify,
}


def _pass(name: str, model: str, count: int) -> Pass:
    import torch

    torch.set_num_threads(1)
    torch.set_grad_enabled(False)  # Inductor folds nothing under inference_mode
    requests = []
    for batch, length in sizes(count):
        mask = torch.ones(batch, length, dtype=torch.long)
        mask[:, length - length // 4 :] = 0
        tokens = torch.randint(1000, (batch, length), generator=torch.Generator().manual_seed(SEED))
        requests.append((tokens, mask))
    run, programs = CONTENDERS[name](_model(model))
    return Pass(lambda: [run(request) for request in requests], programs)


def _describe(count: int) -> str:
    return f"{count} requests, batch {BATCHES}, length {LENGTHS}"


def main() -> None:
    """Be the driver, or one of the contenders."""
    module, counted = "benchmarks.requests", ("requests", 200)
    passes.main(module, MODELS, list(CONTENDERS), _pass, counted, _describe)


if __name__ == "__main__":
    main()
