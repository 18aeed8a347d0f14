"""The matrix products and convolutions of the benchmark's models, which `heuristic` measures.

``python -m benchmarks.shapes`` collects them from the models and writes ``shapes.txt``: one per
line, with the first model that has it. Batch 1 comes first, then batches of 4, up to `COUNT`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tvm import relax

    from tvmify.compiler.kernels.common.sample import Sample

PATH = Path(__file__).with_name("shapes.txt")
#: The length of the list.
COUNT = 200


@dataclass(frozen=True)
class Shape:
    """A matrix product ``[rows, depth] × [depth, columns]``, or a convolution of NHWC images."""

    rows: int = 0
    depth: int = 0
    columns: int = 0
    image: tuple[int, ...] = ()
    window: tuple[int, int, int] = (1, 1, 0)  # size, stride, padding

    def __str__(self) -> str:
        if not self.image:
            return f"matmul {self.rows}x{self.depth} {self.depth}x{self.columns}"
        size, stride, padding = self.window
        image = "x".join(map(str, self.image))
        return f"conv2d {image} to {self.columns} window {size} stride {stride} padding {padding}"

    @classmethod
    def parse(cls, text: str) -> Shape:
        """Parse the result of ``str``."""
        words = text.split()
        if words[0] == "matmul":
            (rows, depth), (_, columns) = (map(int, word.split("x")) for word in words[1:])
            return cls(rows, depth, columns)
        image = tuple(int(size) for size in words[1].split("x"))
        size, stride, padding = (int(words[i]) for i in (5, 7, 9))
        return cls(columns=int(words[3]), image=image, window=(size, stride, padding))

    def of_batch(self, batch: int) -> Shape:
        """Return the shape with `batch` times as many images or rows."""
        if not self.image:
            return replace(self, rows=self.rows * batch)
        return replace(self, image=(self.image[0] * batch, *self.image[1:]))

    def sample(self) -> Sample:
        """Return the shape as a sample for the tuner."""
        from tvm import relax

        from tvmify.compiler.kernels.common.sample import Sample

        def variable(*shape: int) -> relax.Var:
            extents = relax.ShapeExpr(list(shape))  # type: ignore[arg-type]
            return relax.Var("x", relax.TensorType(extents, "float32"))

        if self.image:
            size, stride, padding = self.window
            call = relax.op.nn.conv2d(
                variable(*self.image),
                variable(self.columns, size, size, self.image[3]),
                strides=stride,
                padding=padding,
                data_layout="NHWC",
                kernel_layout="OHWI",
            )
        else:
            call = relax.op.matmul(
                variable(self.rows, self.depth), variable(self.depth, self.columns)
            )
        builder = relax.BlockBuilder()
        call = builder.normalize(call)
        assert isinstance(call, relax.Call)
        return Sample.of(call, (False, True))


def read() -> dict[Shape, str]:
    """Return the list: each shape, and the model it comes from."""
    lines = (line.split("  # ") for line in PATH.read_text().splitlines())
    return {Shape.parse(text): model for text, model in lines}


def _of_model(name: str) -> list[Shape]:
    """Run a model once and note the shapes of its layers."""
    import torch
    from torch import nn
    from transformers.pytorch_utils import Conv1D

    from benchmarks.models import build

    found: list[Shape] = []

    def note(layer: Any, args: tuple[Any, ...], result: Any) -> None:
        x = args[0]
        if isinstance(layer, nn.Conv2d):
            if layer.groups == 1 and layer.dilation == (1, 1):
                n, c, h, w = x.shape
                window = (layer.kernel_size[0], layer.stride[0], int(layer.padding[0]))
                found.append(Shape(columns=layer.out_channels, image=(n, h, w, c), window=window))
        else:
            found.append(Shape(x.numel() // x.shape[-1], x.shape[-1], result.shape[-1]))

    module, args = build(name)
    for layer in module.modules():
        if isinstance(layer, (nn.Conv2d, nn.Linear, Conv1D)):
            layer.register_forward_hook(note)
    with torch.no_grad():
        module(*args)
    return list(dict.fromkeys(found))


def main() -> None:
    """Write the list."""
    from benchmarks.models import MODELS

    models = {name: _of_model(name) for name in MODELS}
    turns = [list(zip_longest(*models.values()))] * 2
    origin: dict[Shape, str] = {}
    for batch, rounds in zip((1, 4), turns, strict=True):
        for row in rounds:
            for name, shape in zip(models, row, strict=True):
                if shape is not None and len(origin) < COUNT:
                    origin.setdefault(shape.of_batch(batch), name)
    lines = sorted(f"{shape}  # {name}" for shape, name in origin.items())
    PATH.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
