"""Programs for a GPU, as far as they can be tested without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.processes import run_python
from tests.runtime import programs

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without a GPU")


def compiled(*features: str) -> Any:
    """Return x[4, 16] + x, with code that declares these requirements."""
    library = torch.frombuffer(bytearray(programs.added().library), dtype=torch.uint8)
    return torch.classes.tvmify.CompiledModule("", library, list(features), [])


@needs_no_gpu
def test_code_for_a_gpu_is_refused_with_the_reason():
    module = compiled("cuda:sm_90a")
    assert "code for a GPU (sm_90a)" in module.refusal()
    why = "PyTorch finds none here" if torch.backends.cuda.is_built() else "built without CUDA"
    assert why in module.refusal()
    with pytest.raises(RuntimeError, match="cannot run here: it is code for a GPU"):
        module.load()


def test_code_for_a_gpu_refuses_tensors_on_the_cpu():
    with pytest.raises(TypeError, match="has tensors on cpu"):
        compiled("cuda:sm_90a").forward([torch.zeros(4, 16)])


def test_missing_cpu_features_are_named_first():
    assert "does not have no-such" in compiled("no-such", "cuda:sm_90a").refusal()


def test_a_call_on_the_cpu_does_not_load_the_runtime_for_gpus(tmp_path: Path):
    script = """
        import sys, torch, tvmify.runtime
        from pathlib import Path
        library = torch.frombuffer(bytearray(Path(sys.argv[1]).read_bytes()), dtype=torch.uint8)
        module = torch.classes.tvmify.CompiledModule("", library, [], [])
        assert module.forward([torch.ones(4, 16)])[0].eq(2).all()
        assert "tvm_runtime_cuda" not in Path("/proc/self/maps").read_text()
    """
    path = tmp_path / "library.so"
    path.write_bytes(programs.added().library)
    run_python(script, path)


def saved_module(x: torch.Tensor, *programs_: Any) -> Any:
    """Return a saved module whose programs are all for `x`, and for no weights."""
    arguments, _ = torch.ops.tvmify.describe((x,))
    saved = torch.classes.tvmify.SavedModule(torch.ops.tvmify.describe(())[0], [])
    for program in programs_:
        saved.add(arguments, [0], [], [], [0], 0, program, "", False)
    return saved


@needs_no_gpu
def test_first_runnable_architecture_is_used():
    x = torch.randn(4, 16)
    saved = saved_module(x, compiled("cuda:sm_80"), compiled("cuda:sm_90a"), compiled())
    assert ["code for a GPU" in line for line in saved.explain()] == [True, True, False]
    assert "sm_80" in saved.explain()[0] and "sm_90a" in saved.explain()[1]
    form, (result,) = saved.run((x,), ())
    assert form == 0 and torch.equal(result, x + x)


def test_tensors_elsewhere_run_in_pytorch_with_a_reason_for_each_program():
    x = torch.randn(4, 16)
    saved = saved_module(x, compiled("cuda:sm_80"), compiled())
    with pytest.warns(UserWarning, match="sm_80, and the tensors are on meta; .*for the CPU"):
        assert saved.run((x.to("meta"),), ()) is None


def test_tensors_on_several_devices_run_in_pytorch():
    x = torch.randn(4, 16)
    pair = (x, x.to("meta"))
    arguments, _ = torch.ops.tvmify.describe(pair)
    saved = torch.classes.tvmify.SavedModule(torch.ops.tvmify.describe(())[0], [])
    saved.add(arguments, [0], [], [], [0], 0, compiled(), "", False)
    with pytest.warns(UserWarning, match="on several devices"):
        assert saved.run(pair, ()) is None


def test_a_module_on_another_device_is_interpreted_there(small: Path):
    loaded = torch.jit.load(small, map_location="meta")
    with pytest.warns(UserWarning, match="for the CPU, and the tensors are on meta"):
        assert loaded(torch.zeros(1, 3, 8, 8, device="meta")).device.type == "meta"
