"""C++ programs: CMake finds tvmify, they run without Python, and serve several clients at once."""

from __future__ import annotations

import http.client
import importlib.util
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import tvmify
from tvmify.torch_compat import versions

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples" / "cpp"
CONFIG = Path(tvmify.__path__[0]) / "share" / "cmake" / "tvmify"
CMAKE = shutil.which("cmake", path=Path(sys.executable).parent) or shutil.which("cmake")

pytestmark = pytest.mark.skipif(CMAKE is None, reason="needs cmake, which the extra 'dev' installs")


def cmake(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Run cmake, and return its output and exit code."""
    command = [str(CMAKE), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)


def run(*command: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a program with an empty environment."""
    words = [str(word) for word in command]
    return subprocess.run(
        words, cwd=cwd, env={}, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The examples, built once for all tests, without optimization to save build time."""
    directory = tmp_path_factory.mktemp("cpp") / "build"
    configured = cmake(
        *("-S", EXAMPLES, "-B", directory, "-DCMAKE_CXX_FLAGS_RELEASE=-O0 -Wall -Wextra -Werror"),
        f"-DCMAKE_PREFIX_PATH={tvmify.cmake_prefix_path}",
    )
    assert configured.returncode == 0, configured.stdout + configured.stderr
    built = cmake("--build", directory, "--parallel", 2)
    assert built.returncode == 0, built.stdout + built.stderr
    return directory


@pytest.fixture(scope="session")
def bundle(build: Path) -> Iterator[Path]:
    """The programs with the libraries that they need, in a separate folder."""
    directory = build.parent / "bundle"
    installed = cmake("--install", build, "--prefix", directory)
    assert installed.returncode == 0, installed.stdout + installed.stderr
    yield directory
    shutil.rmtree(directory)  # PyTorch's libraries are 400 MB


class Saved(NamedTuple):
    """A model, the shape that it is compiled for, and the file that it was saved to."""

    model: nn.Module
    shape: tuple[int, ...]
    path: Path


def convolutions() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(8 * 4 * 4, 10),
    ), (1, 3, 8, 8)


class Sorted(nn.Module):
    """Contains an operator that is bridged."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.sort(1)[0]


def perceptron() -> tuple[nn.Module, tuple[int, ...]]:
    return nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3), Sorted()), (1, 4)


def save(model: nn.Module, path: Path, shape: Sequence[int], *, strict: bool) -> None:
    subject = tvmify.tvmify(model.eval(), cache=False, compare=False)
    tvmify.save(subject, path, example_inputs=torch.rand(*shape), strict=strict)


@pytest.fixture(scope="session", params=[convolutions, perceptron])
def saved(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A model saved in one folder and used in another; strict, so that only compiled code runs."""
    model, shape = request.param()
    path = tmp_path_factory.mktemp("saved") / "model.pt"
    save(model, path, shape, strict=True)
    return Saved(model, shape, path.rename(tmp_path_factory.mktemp("elsewhere") / "moved.pt"))


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Saved:
    """A model that also runs calls that it has no code for."""
    model, shape = perceptron()
    path = tmp_path_factory.mktemp("small") / "model.pt"
    save(model, path, shape, strict=False)
    return Saved(model, shape, path)


def comma_separated(shape: Sequence[int]) -> str:
    return ",".join(map(str, shape))


def numbers(text: str) -> torch.Tensor:
    return torch.tensor([float(word) for word in text.split()])


# ---- run.cpp


@torch.inference_mode()
def test_dynamic_program_serves_an_unseen_shape(tmp_path: Path, build: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 16), nn.GELU(), nn.Linear(16, 3)).eval()
    subject = tvmify.tvmify(model, cache=False, strict=True, dynamic=None)
    for rows in (3, 5):
        subject(torch.rand(rows, 4))
    tvmify.save(subject, tmp_path / "model.pt", strict=True)
    finished = run(build / "run", "model.pt", "7,4", cwd=tmp_path)
    assert finished.returncode == 0, finished.stderr
    torch.manual_seed(0)
    expected = model(torch.rand(7, 4)).flatten()
    printed = finished.stdout.split(":")[1].replace("...", "")
    torch.testing.assert_close(numbers(printed), expected[:8])
    refused = run(build / "run", "model.pt", "7,5", cwd=tmp_path)
    assert "holds no code" in refused.stderr


@pytest.mark.parametrize("place", ["build", "bundle"])
@torch.inference_mode()
def test_a_saved_model_runs_without_python(
    saved: Saved, place: str, request: pytest.FixtureRequest, build: Path
) -> None:
    folder = build if place == "build" else request.getfixturevalue("bundle") / "bin"
    shape = comma_separated(saved.shape)
    finished = run(folder / "run", saved.path.name, shape, cwd=saved.path.parent)
    assert finished.returncode == 0, finished.stderr
    assert re.fullmatch(r"a call takes .* threads \(median of 20\)\n", finished.stderr)

    torch.manual_seed(0)
    expected = saved.model(torch.rand(saved.shape)).flatten()
    kind, printed = finished.stdout.split(":")
    assert kind == f"Float[1, {len(expected)}]"
    torch.testing.assert_close(numbers(printed.replace("...", "")), expected[:8])


@torch.inference_mode()
def test_unknown_shape_runs_in_pytorch(small: Saved, build: Path, tmp_path: Path) -> None:
    finished = run(build / "run", small.path, "2,4", cwd=tmp_path)
    assert finished.returncode == 0
    assert finished.stderr.count("Warning: ") == 1  # in 21 calls
    assert "(float32[2, 4]): it holds no code for these arguments" in finished.stderr
    torch.manual_seed(0)
    expected = small.model(torch.rand(2, 4)).flatten()
    torch.testing.assert_close(numbers(finished.stdout.split(":")[1]), expected)


def test_strict_refuses_unknown_shapes(saved: Saved, build: Path) -> None:
    finished = run(build / "run", saved.path, "3,3", cwd=saved.path.parent)
    assert finished.returncode == 1
    assert "does not run compiled with (float32[3, 3])" in finished.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("missing.pt", None, "No such file or directory"),
        ("text.pt", b"not an archive", "failed reading zip archive"),
    ],
)
def test_unloadable_file_is_named(
    name: str, content: bytes | None, message: str, build: Path, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / name).write_bytes(content)
    for program in ([build / "run", name, "1,4"], [build / "serve", name, "1,4", 0]):
        finished = run(*program, cwd=tmp_path)
        assert finished.returncode == 1
        assert finished.stdout == ""
        assert finished.stderr.startswith(f"{name}: ") and message in finished.stderr


def test_truncated_file_is_an_error(small: Saved, build: Path, tmp_path: Path) -> None:
    whole = small.path.read_bytes()
    (tmp_path / "half.pt").write_bytes(whole[: len(whole) // 2])
    finished = run(build / "run", "half.pt", "1,4", cwd=tmp_path)
    assert finished.returncode == 1
    assert finished.stderr.startswith("half.pt: PytorchStreamReader failed reading zip archive")


def test_wrong_arguments_are_errors(small: Saved, build: Path, tmp_path: Path) -> None:
    finished = run(build / "run", small.path, "1,5", cwd=tmp_path)
    assert finished.returncode == 1
    assert finished.stdout == ""
    assert "mat1 and mat2 shapes cannot be multiplied (1x5 and 4x16)" in finished.stderr
    for program in ("run", "serve"):
        assert "usage: " in run(build / program, cwd=tmp_path).stderr


def test_programs_need_neither_python_nor_the_compiler(bundle: Path) -> None:
    libraries = {path.name for path in (bundle / "lib").iterdir()}
    assert {"libtvmify.so", "libtorch_cpu.so", "libtvm_runtime.so", "libtvm_ffi.so"} <= libraries
    for program in ("run", "serve"):
        listed = run("/usr/bin/ldd", bundle / "bin" / program, cwd=bundle).stdout
        assert "not found" not in listed
        assert not re.search("python|tvm_compiler|tvm_runtime_cuda", listed)


# ---- predict.cpp


@torch.inference_mode()
def test_predicted_class_matches_python(
    build: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(EXAMPLES.parent)
    # Under another name, since names in TorchScript cannot begin with a number.
    spec: Any = importlib.util.spec_from_file_location(
        "predictor", EXAMPLES.parent / "05_predictor.py"
    )
    example = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "predictor", example)
    spec.loader.exec_module(example)
    model, shape = convolutions()
    option = {"input_infos": [("images", shape)], "num_outputs": 1}
    compiled = tvmify.compile(torch.jit.script(model.eval()), option)
    side = shape[-1]
    torch.jit.save(torch.jit.script(example.Predictor(compiled, side)), tmp_path / "predictor.pt")
    photograph = torch.randint(256, (3, 40, 60), dtype=torch.uint8)
    example.write_ppm(tmp_path / "photograph.ppm", photograph)
    finished = run(build / "predict", "predictor.pt", "photograph.ppm", cwd=tmp_path)
    assert finished.stderr == ""  # a call without code would warn
    expected = example.Predictor(model, side)(photograph).item()
    assert finished.stdout == f"class {expected}\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"P5\n2 2\n255\n....", "is not a binary PPM file"),
        (b"P6\n2 2\n255\n....", "ends too early"),
    ],
)
def test_invalid_image_is_an_error(
    content: bytes, message: str, small: Saved, build: Path, tmp_path: Path
) -> None:
    (tmp_path / "image.ppm").write_bytes(content)
    finished = run(build / "predict", small.path, "image.ppm", cwd=tmp_path)
    assert (finished.returncode, finished.stdout) == (1, "")
    assert message in finished.stderr


# ---- serve.cpp


@contextmanager
def serving(folder: Path, saved: Saved) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """Start the server, and stop it as a service manager would; it has to exit cleanly."""
    process = subprocess.Popen(
        [folder / "serve", saved.path, comma_separated(saved.shape), "0"],
        env={},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        yield process, int(process.stdout.readline().rsplit(":")[-1])
        process.send_signal(signal.SIGTERM)
        _, errors = process.communicate(timeout=30)
        assert process.returncode == 0
        assert errors == ""
    finally:
        process.kill()
        process.communicate()


def connection_to(port: int) -> closing[http.client.HTTPConnection]:
    """A connection that closes at the end of its `with`, even if the server broke it."""
    return closing(http.client.HTTPConnection("127.0.0.1", port, timeout=30))


def post(port: int, body: str) -> tuple[int, str]:
    """Send a request, and return the status and text of the answer."""
    with connection_to(port) as connection:
        connection.request("POST", "/", body)
        response = connection.getresponse()
        return response.status, response.read().decode()


def words(tensor: torch.Tensor) -> str:
    return " ".join(map(str, tensor.flatten().tolist()))


@torch.inference_mode()
def test_server_answers_concurrent_clients(saved: Saved, bundle: Path) -> None:
    inputs = [torch.randn(saved.shape) for _ in range(100)]
    expected = [saved.model(x).flatten() for x in inputs]
    with serving(bundle / "bin", saved) as (process, port), ThreadPoolExecutor(8) as clients:
        answers = list(clients.map(lambda x: post(port, words(x)), inputs))
        mapped = Path(f"/proc/{process.pid}/maps").read_text()
    assert {status for status, _ in answers} == {200}
    for (_, text), result in zip(answers, expected, strict=True):
        torch.testing.assert_close(numbers(text), result)

    paths = {line.split(maxsplit=5)[5] for line in mapped.splitlines() if ".so" in line}
    foreign = {path for path in paths if not path.startswith((str(bundle), "/lib", "/usr/lib"))}
    assert not foreign
    assert not re.search("python|tvm_compiler", mapped)
    assert "/memfd:tvmify" in mapped  # the compiled code


def test_server_survives_invalid_requests(small: Saved, build: Path) -> None:
    with serving(build, small) as (_, port):
        status, text = post(port, "1 2 3")
        assert (status, text) == (400, "shape '[1, 4]' is invalid for input of size 3\n")
        assert post(port, "1 2 three 4") == (400, "not a number: three 4\n")
        assert post(port, "")[0] == 400
        status, text = post(port, "nan 2 3 4")
        assert status == 200 and set(text.split()) <= {"nan", "-nan"}
        assert post(port, "1 2 3 4")[0] == 200


def test_oversized_content_length_is_refused(small: Saved, build: Path) -> None:
    with serving(build, small) as (_, port), connection_to(port) as connection:
        connection.putrequest("POST", "/")
        connection.putheader("Content-Length", str(10**15))
        connection.endheaders()
        response = connection.getresponse()
        assert response.status == 400
        assert response.read() == b"the request is too large\n"


class Root(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if bool((x < 0).any()):
            raise ValueError("a number is negative")
        return x.sqrt()


def test_model_error_is_a_request_error(build: Path, tmp_path: Path) -> None:
    torch.jit.script(Root()).save(tmp_path / "model.pt")
    with serving(build, Saved(Root(), (1, 2), tmp_path / "model.pt")) as (_, port):
        status, text = post(port, "4 -9")
        assert status == 500 and "a number is negative" in text
        assert post(port, "4 9") == (200, "2 3 \n")


def test_accepted_requests_are_answered_before_shutdown(small: Saved, build: Path) -> None:
    with serving(build, small) as (process, port), connection_to(port) as connection:
        connection.putrequest("POST", "/")
        connection.putheader("Content-Length", "7")
        connection.endheaders(b"1 2 ")
        assert post(port, "1 2 3 4")[0] == 200  # accepted later
        process.send_signal(signal.SIGTERM)
        while True:  # until the server no longer listens
            try:
                post(port, "1 2 3 4")
            except OSError:
                break
            time.sleep(0.01)
        connection.send(b"3 4")
        response = connection.getresponse()
        assert response.status == 200
        assert len(response.read().split()) == 3


# ---- find_package


def find_package(directory: Path, wanted: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Configure a project that requires a version of tvmify and builds nothing."""
    (directory / "CMakeLists.txt").write_text(
        f"cmake_minimum_required(VERSION 3.21)\nproject(asks LANGUAGES NONE)\n"
        f"find_package(tvmify {wanted} REQUIRED)\nlist(GET tvmify_LIBRARY_DIRS 0 folder)\n"
        'message(STATUS "found ${tvmify_VERSION} in ${folder}")\n'
    )
    return cmake("-S", directory, "-B", directory / "build", *options)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [("", True), ("0.1", True), ("0.1.0", True), ("0.2", False), ("0.1.99", False), ("1", False)],
)
def test_cmake_finds_compatible_versions(wanted: str, found: bool, tmp_path: Path) -> None:
    prefix = f"-DCMAKE_PREFIX_PATH={tvmify.cmake_prefix_path}"
    configured = find_package(tmp_path, wanted, prefix)
    assert (configured.returncode == 0) == found
    assert f"found {tvmify.__version__}" in configured.stdout or not found


@pytest.mark.parametrize("with_torch", [False, True])
def test_library_survives_as_needed_linking(with_torch: bool, tmp_path: Path) -> None:
    if with_torch and torch.version.cuda is not None:
        pytest.skip("find_package(Torch) would ask for the CUDA toolkit")
    (tmp_path / "main.cpp").write_text("int main() {}\n")
    (tmp_path / "CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.21)\nproject(asks LANGUAGES CXX)\n"
        + ("find_package(Torch REQUIRED)\n" if with_torch else "")
        + "find_package(tvmify REQUIRED)\nadd_executable(program main.cpp)\n"
        "target_link_libraries(program PRIVATE ${TORCH_LIBRARIES} tvmify::tvmify)\n"
    )
    built = tmp_path / "build"
    prefixes = f"{tvmify.cmake_prefix_path};{torch.utils.cmake_prefix_path}"
    flags = "-DCMAKE_EXE_LINKER_FLAGS=-Wl,--as-needed"
    configured = cmake("-S", tmp_path, "-B", built, f"-DCMAKE_PREFIX_PATH={prefixes}", flags)
    assert configured.returncode == 0, configured.stderr
    linked = cmake("--build", built)
    assert linked.returncode == 0, linked.stdout + linked.stderr
    assert run(built / "program", cwd=tmp_path).returncode == 0
    listed = run("/usr/bin/ldd", built / "program", cwd=tmp_path).stdout
    assert re.search("libtvmify.so => .*/tvmify/lib/", listed) and "not found" not in listed


def test_cmake_refuses_another_pytorch(tmp_path: Path) -> None:
    other = tmp_path / "torch"
    version = other / "share" / "cmake" / "Torch" / "TorchConfigVersion.cmake"
    version.parent.mkdir(parents=True)
    version.write_text('set(PACKAGE_VERSION "2.99.0")\n')
    prefix = f"-DCMAKE_PREFIX_PATH={tvmify.cmake_prefix_path}"
    configured = find_package(tmp_path, "0.1", prefix, f"-DTORCH_INSTALL_PREFIX={other}")
    assert configured.returncode != 0
    message = " ".join(configured.stderr.split())
    assert re.search(r"this tvmify is built for PyTorch 2\.\d+, and \S+ is PyTorch 2\.99", message)


def test_cmake_selects_the_library_of_the_installed_pytorch(tmp_path: Path) -> None:
    package = tmp_path / "tvmify"
    shutil.copytree(CONFIG, package / "share" / "cmake" / "tvmify")
    own = versions.minor(torch.__version__)
    for version in ("2.1", own):
        library = package / "builds" / f"torch-{version}" / "lib" / "libtvmify.so"
        library.parent.mkdir(parents=True)
        library.touch()
    prefix = f"-DCMAKE_PREFIX_PATH={package}/share/cmake;{tvmify.cmake_prefix_path}"
    configured = find_package(tmp_path, "", prefix)
    assert configured.returncode == 0, configured.stderr
    assert f"found 0.1.0 in {library.parent}" in configured.stdout

    shutil.rmtree(library.parent)
    library.parent.parent.rmdir()
    configured = find_package(tmp_path, "", prefix)
    message = " ".join(configured.stderr.split())
    assert re.search(rf"built for PyTorch 2\.1, and \S+ is PyTorch {own}", message)


def test_cmake_names_missing_files(tmp_path: Path) -> None:
    shutil.copytree(CONFIG, tmp_path / "tvmify" / "share" / "cmake" / "tvmify")
    prefix = f"-DCMAKE_PREFIX_PATH={tmp_path}/tvmify/share/cmake"
    configured = find_package(tmp_path, "", prefix)
    assert "lib/libtvmify.so is missing" in " ".join(configured.stderr.split())

    library = tmp_path / "tvmify" / "lib" / "libtvmify.so"
    library.parent.mkdir()
    library.touch()
    configured = find_package(tmp_path, "", prefix)
    assert "package torch is nowhere in" in " ".join(configured.stderr.split())
