"""Saved files: their contents, when they run compiled, and what runs otherwise."""

from __future__ import annotations

import copy
import io
import os
import stat
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import tvmify
from tests.models import minilm_folder
from tests.processes import run_python
from tests.saved.nets import Small, Unscriptable, close, image, saved
from tvmify import OptionError, SaveError, TvmifyWarning


class Pair(NamedTuple):
    sum: torch.Tensor
    product: torch.Tensor


# ------------------------------------------------------------------------------ what is computed


def test_loaded_model_matches_the_original(tmp_path: Path, small: nn.Module) -> None:
    loaded = saved(small, tmp_path, [image()], [image(4)])
    assert isinstance(loaded, torch.jit.ScriptModule)
    for batch in (1, 4):
        x = image(batch)
        close(loaded(x), small(x))
        assert not loaded(x).requires_grad
    assert {k: v.shape for k, v in loaded.state_dict().items()} == {
        k: v.shape for k, v in small.state_dict().items()
    }


def test_all_signatures_of_earlier_calls_are_saved(tmp_path: Path, small: nn.Module) -> None:
    model = tvmify.tvmify(small)
    for batch in (2, 3):
        model(image(batch))
    builds = model.cache_info().builds
    loaded = saved(model, tmp_path)
    assert model.cache_info().builds == builds
    for batch in (2, 3, 5):  # from the second on, one program serves all
        x = image(batch)
        close(loaded(x), small(x))
    with pytest.raises(RuntimeError, match="no code for these arguments"):
        loaded(image(2)[..., :-1])


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(torch.rand(1, 3, 9, 9), id="tensor"),
        pytest.param((torch.rand(1, 3, 9, 9),), id="tuple"),
        pytest.param({"x": torch.rand(1, 3, 9, 9)}, id="keywords"),
    ],
)
def test_example_inputs(tmp_path: Path, small: nn.Module, example: Any) -> None:
    tvmify.save(small, tmp_path / "model.pt", example_inputs=example)
    loaded = tvmify.load(tmp_path / "model.pt", strict=True)
    x = image()
    close(loaded(x), small(x))
    close(loaded(x=x), small(x))


def test_defaults_keywords_scalars_and_containers(tmp_path: Path) -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(
            self,
            x: torch.Tensor,
            scale: float = 1.5,
            extra: dict[str, torch.Tensor] | None = None,
            shift: int = 0,
        ) -> dict[str, torch.Tensor]:
            y = self.linear(x) * scale + shift
            if extra is not None:
                y = y + extra["bias"]
            return {"y": y, "x": x}

    net, x, bias = Net().eval(), torch.randn(2, 4), torch.randn(4)
    calls = [
        ((x,), {}),
        ((x, 2), {"shift": 3}),
        ((), {"extra": {"bias": bias}, "x": x}),
        ((x, 0.1, {"bias": bias}), {}),
    ]
    model = tvmify.tvmify(net, compare=False)
    for args, kwargs in calls:
        model(*args, **kwargs)
    loaded = saved(model, tmp_path)
    for args, kwargs in calls:
        close(loaded(*args, **kwargs), net(*args, **kwargs))
    assert loaded(x)["x"] is x


def test_results_of_every_structure(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(
            self, x: torch.Tensor, y: torch.Tensor
        ) -> tuple[Pair, list[torch.Tensor], tuple[torch.Tensor, int], torch.Tensor | None]:
            return Pair(x + y, x * y), [x - y, y], (x / 2, 3), None

    loaded = saved(Net().eval(), tmp_path, [(2, 3), (2, 3)])
    x, y = torch.randn(2, 3), torch.randn(2, 3)
    pair, differences, (half, three), nothing = loaded(x, y)
    assert torch.equal(pair.sum, x + y) and torch.equal(pair.product, x * y)
    assert torch.equal(differences[0], x - y) and differences[1] is y
    assert torch.equal(half, x / 2) and three == 3 and nothing is None


def test_results_with_numbers(tmp_path: Path) -> None:
    class Net(nn.Module):
        def forward(
            self, x: torch.Tensor
        ) -> tuple[dict[int, torch.Tensor], float, tuple[bool, str]]:
            return {1: x + 1, 2: x + 2}, float("inf"), (True, "x'y")

    loaded = saved(Net().eval(), tmp_path, [(3,)])
    x = torch.randn(3)
    tensors, infinity, others = loaded(x)
    assert torch.equal(tensors[1], x + 1) and torch.equal(tensors[2], x + 2)
    assert infinity == float("inf") and others == (True, "x'y")


def test_draws_for_elements_in_another_order_equal_eagers(tmp_path: Path) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)

    strict = saved(noisy, tmp_path, [(4, 4)])
    loaded = tvmify.load(tmp_path / "model.pt")
    torch.jit.save(loaded, tmp_path / "again.pt")
    again = torch.jit.load(tmp_path / "again.pt")
    x = torch.randn(4, 4)
    with pytest.raises(RuntimeError, match="not contiguous"):
        strict(x.t())
    with pytest.warns(UserWarning, match="not contiguous"):
        for module, argument in ((strict, x), (loaded, x), (loaded, x.t()), (again, x.t())):
            torch.manual_seed(5)
            expected = noisy(argument)
            torch.manual_seed(5)
            torch.testing.assert_close(module(argument), expected)


def test_a_file_of_a_module_that_reads_strides_serves_contiguous_arguments(tmp_path: Path) -> None:
    def asking(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if x.is_contiguous() else x * 3

    saved(asking, tmp_path, [(4, 4)])
    loaded = tvmify.load(tmp_path / "model.pt")
    x = torch.randn(4, 4)
    close(loaded(x), asking(x))
    with pytest.warns(UserWarning, match="not contiguous"):
        close(loaded(x.t()), asking(x.t()))


def test_a_function(tmp_path: Path) -> None:
    def gaussian(x: torch.Tensor, sigma: float = 1.0) -> torch.Tensor:
        return torch.exp(-(x * x) / (2 * sigma * sigma))

    loaded = saved(gaussian, tmp_path, [(8,)], [(8,), 2.0])
    x = torch.randn(8)
    close(loaded(x), gaussian(x))
    close(loaded(x, 2.0), gaussian(x, 2.0))


def test_a_torchscript_module(tmp_path: Path, small: nn.Module) -> None:
    buffer = io.BytesIO()
    torch.jit.save(torch.jit.script(small), buffer)
    buffer.seek(0)
    loaded = saved(torch.jit.load(buffer), tmp_path, [image()])
    x = image()
    close(loaded(x), small(x))


# ------------------------------------------------------- models that TorchScript does not accept


def test_unscriptable_model_is_exported(tmp_path: Path) -> None:
    net = Unscriptable().eval()
    file = tmp_path / "model.pt"
    tvmify.save(net, file, signatures=[[(1, 4)], {"x": (2, 4)}])
    loaded = tvmify.load(file, strict=True)
    for rows in (1, 2):
        x = torch.randn(rows, 4)
        close(loaded(x), net(x))
    # a recording for other shapes is not used, whether strict or not
    loaded = tvmify.load(file)
    with pytest.raises(RuntimeError, match="could not be scripted"):
        loaded(torch.randn(3, 4))
    x = torch.randn(2, 4)
    loaded.load_state_dict({k: v * 2 for k, v in net.state_dict().items()})
    close(loaded(x)["y"], net(x)["y"] * 2)


def test_minilm(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    net = transformers.AutoModel.from_pretrained(minilm_folder()).eval()
    ids = torch.randint(0, 1000, (1, 12))
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    file = tmp_path / "minilm.pt"
    tvmify.save(net, file, example_inputs=inputs)
    with torch.no_grad():
        expected = net(**inputs)
    actual = tvmify.load(file, strict=True)(**inputs)
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=1e-4, atol=1e-5)


# -------------------------------------------------------------------------------------- weights


def test_new_weights_take_effect_without_compiling(tmp_path: Path, small: nn.Module) -> None:
    loaded = saved(small, tmp_path, [image()])
    x = image()
    loaded(x)
    other = Small().eval()
    loaded.load_state_dict(other.state_dict())
    close(loaded(x), other(x))
    with torch.no_grad():
        loaded.head.bias.add_(1)
        other.head.bias.add_(1)
    close(loaded(x), other(x))


def test_weights_are_saved_once(tmp_path: Path) -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding = nn.Embedding(512, 64)
            self.head = nn.Linear(64, 512, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embedding(ids))

    net, ids = Tied().eval(), torch.tensor([[1, 2]])
    loaded = saved(net, tmp_path, [ids])
    close(loaded(ids), net(ids))
    assert tvmify.inspect(tmp_path / "model.pt")["tensors"] == {"number": 1, "bytes": 512 * 64 * 4}
    assert (tmp_path / "model.pt").stat().st_size < 1.7 * 512 * 64 * 4
    assert net.head.weight.requires_grad  # the original stays as it was


def test_copy_has_separate_weights(tmp_path: Path, small: nn.Module) -> None:
    loaded = saved(small, tmp_path, [image()])
    twin = copy.deepcopy(loaded)
    twin.load_state_dict(Small().state_dict())
    x = image()
    close(loaded(x), small(x))
    assert not torch.allclose(twin(x), loaded(x))


class Anonymous(nn.Module):
    def forward(self, *tensors: torch.Tensor) -> torch.Tensor:
        first, second = tensors
        return nn.functional.pad(first, [1, 1]) - nn.functional.silu(second).sum()


def test_a_trace_with_two_parameters_of_one_name(tmp_path: Path) -> None:
    args = torch.rand(3), torch.rand(3)
    traced: Any = torch.jit.trace(Anonymous().eval(), args)
    loaded = saved(traced, tmp_path, list(args))
    torch.testing.assert_close(loaded(*args), traced(*args))


def test_a_light_process_needs_no_compiler(tmp_path: Path, small: nn.Module) -> None:
    saved(small, tmp_path, [image()])
    x = image()
    torch.save((x, small(x).detach()), tmp_path / "expected.pt")
    script = """
        import sys
        import torch
        import tvmify.runtime

        model = torch.jit.load("model.pt")
        model._tvmify.set_strict(True)
        x, expected = torch.load("expected.pt")
        torch.testing.assert_close(model(x), expected)
        assert not {"tvm", "tvm_ffi", "tvmify.compiler"} & set(sys.modules), sys.modules.keys()
    """
    run_python(script, cwd=tmp_path)


# --------------------------------------------------------------------------------- what is refused


def test_several_functions_of_one_process(tmp_path: Path) -> None:
    for sign in (1, -1):
        tvmify.save(lambda x, s=sign: x * s + 1, tmp_path / f"{sign}.pt", example_inputs=image())
    x = image()
    for sign in (1, -1):
        close(tvmify.load(tmp_path / f"{sign}.pt", strict=True)(x), x * sign + 1)


def test_no_signatures_to_save(tmp_path: Path, small: nn.Module) -> None:
    with pytest.raises(SaveError, match="example_inputs"):
        tvmify.save(small, tmp_path / "model.pt")
    assert not list(tmp_path.iterdir())


def test_uncompilable_module(tmp_path: Path) -> None:
    class Branches(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x if bool(x.sum() > 0) else -x

    with pytest.raises(SaveError, match="cannot be saved"):
        tvmify.save(Branches().eval(), tmp_path / "model.pt", example_inputs=torch.ones(3))
    assert {path.name for path in tmp_path.iterdir()} <= {"cache"}


def test_uncompilable_call_warns(tmp_path: Path, small: nn.Module) -> None:
    with pytest.warns(TvmifyWarning, match="without compiled code"):
        loaded = saved(small, tmp_path, [image()], [image().to_sparse()])
    close(loaded(x := image()), small(x))


def test_results_without_a_form_in_torchscript(tmp_path: Path) -> None:
    class Mixed(nn.Module):
        def forward(self, x, **options):
            return [x + 1, (x, x)]

    with pytest.raises(SaveError, match="several types"):
        tvmify.save(Mixed().eval(), tmp_path / "model.pt", example_inputs=torch.ones(3))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(_, x):
        return x * 2


@pytest.mark.parametrize(
    ("forward", "argument", "message"),
    [
        (Doubled.apply, torch.ones(3), r"'Doubled', a torch\.autograd\.Function"),
        (lambda x: x["a", "b"] * 2, {("a", "b"): torch.ones(3)}, "argument 'x' holds a dict"),
    ],
)
def test_unsupported_contents_of_torchscript_files(
    tmp_path: Path, forward: Any, argument: Any, message: str
) -> None:
    class Calls(nn.Module):
        def forward(self, x):
            return forward(x) + 1

    with pytest.raises(SaveError, match=message):
        tvmify.save(Calls().eval(), tmp_path / "model.pt", example_inputs=(argument,))


def test_other_arguments_of_an_unscriptable_model(tmp_path: Path) -> None:
    net = Unscriptable().eval()
    signatures = [[(1, 4)], {"x": (1, 4), "square": True}]
    with pytest.raises(SaveError, match="one set of arguments"):
        tvmify.save(net, tmp_path / "model.pt", signatures=signatures)


def test_file_mode_follows_the_umask(
    tmp_path: Path, inference: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    net = tvmify.tvmify(nn.ReLU().eval(), cache=False)
    before = os.umask(0o027)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda _: pytest.fail("it is one for all threads"))
            tvmify.save(net, tmp_path / "net.pt", example_inputs=torch.ones(2))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "net.pt").stat().st_mode) == 0o640
    assert [*tmp_path.glob(".*")] == []


def test_a_tuple_of_ints_among_example_inputs_is_a_value(tmp_path: Path) -> None:
    class Resize(nn.Module):
        def forward(self, x: torch.Tensor, size: tuple[int, int]) -> torch.Tensor:
            return F.interpolate(x, size=size) * 2

    x = torch.randn(1, 3, 8, 8)
    tvmify.save(Resize().eval(), tmp_path / "model.pt", example_inputs=(x, (4, 6)))
    loaded = tvmify.load(tmp_path / "model.pt", strict=True)
    assert torch.equal(loaded(x, (4, 6)), F.interpolate(x, size=(4, 6)) * 2)
    program = tvmify.export(Resize().eval(), example_inputs=(x, (4, 6)))
    assert torch.equal(program.module()(x, (4, 6)), F.interpolate(x, size=(4, 6)) * 2)


def test_targets_are_a_list(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"targets is 'llvm': .* \['llvm'\]"):
        tvmify.save(Small().eval(), tmp_path / "model.pt", example_inputs=image(), targets="llvm")
