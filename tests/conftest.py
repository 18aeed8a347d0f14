"""The environment of every test: seeded generators, its own cache directory, and so on."""

from __future__ import annotations

import functools
import gc
import logging
import math
import signal
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cachetools import LRUCache, cached
from hypothesis import HealthCheck, settings

from tests.sampling import sample
from tvmify.dispatch import load_or_build
from tvmify.dispatch.building.allowance import allowance

# The same examples in each run, and no time limits, since the machine may be busy.
settings.register_profile(
    "tests",
    derandomize=True,
    database=None,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("tests")


#: Folders whose parametrized tests compile a program for each case.
_SWEEPS = frozenset({"behaviour", "capture", "compiler", "dispatch", "integrations"})


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add the option to run a part of the cases."""
    text = "run one in STEP of the cases of each test that compiles many, and none marked thorough"
    parser.addoption("--sample", type=int, default=1, metavar="STEP", help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the cases that ``--sample`` does not select."""
    step = config.getoption("sample")
    if step == 1:
        return
    tests = Path(__file__).parent
    swept = {i.nodeid for i in items if i.path.relative_to(tests).parts[0] in _SWEEPS}
    left_out = swept - sample(swept, step)
    left_out |= {item.nodeid for item in items if item.get_closest_marker("thorough")}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid in left_out])
    items[:] = [item for item in items if item.nodeid not in left_out]


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Import the tests without garbage collections, and freeze the imported objects.

    A full collection would traverse torch and TVM each time, for half a second.
    """
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Seed generators before a file is imported, so that its data do not depend on other files."""
    if isinstance(collector, pytest.Module):
        torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _interruptible() -> Iterator[None]:
    """Receive SIGINT, which processes that a shell runs in the background ignore.

    Child processes of a test have the default again, since they do not inherit handlers.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _no_structured_trace() -> None:
    """Keep PyTorch from logging each graph and stack as text.

    It does so if its logger has a handler, and pytest adds one to each logger without propagation.
    """
    trace = logging.getLogger("torch.__trace")
    trace.handlers.clear()
    trace.propagate = True


@pytest.fixture(autouse=True)
def cache_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty disk cache, so that no test sees the programs of another."""
    directory = tmp_path / "cache"
    monkeypatch.setenv("TVMIFY_CACHE_DIR", str(directory))
    return directory


@pytest.fixture(autouse=True)
def _compiled_code_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use compiled code whether or not it is faster: tests must not depend on timing."""
    monkeypatch.setenv("TVMIFY_COMPARE", "0")


@pytest.fixture(autouse=True)
def _compiler_is_strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a failing converter or schedule rule an error, also in child processes of a test."""
    monkeypatch.setenv("TVMIFY_STRICT_COMPILER", "1")


@pytest.fixture(autouse=True)
def _nothing_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget the code that earlier tests loaded, as a new process would."""
    monkeypatch.setattr(load_or_build, "_LOADED", weakref.WeakValueDictionary())


@functools.cache
def _once(compiled: Callable[..., Any]) -> Callable[..., Any]:
    """Let LLVM compile equal functions once: it takes a quarter of the time, and half are equal."""
    import tvm_ffi

    def key(part: Any, target: Any) -> tuple[Any, ...]:
        names = sorted(variable.name_hint for variable in part.get_global_vars())
        return tvm_ffi.structural_hash(part, map_free_vars=True), *names, str(target)

    known = cached(LRUCache(256), key, threading.Lock())(compiled)

    @functools.wraps(compiled)
    def found(part: Any, target: Any) -> Any:
        module, content = known(part, target)
        # Kernels for a GPU become part of the module.
        return compiled(part, target) if module.imports else (module, content)

    return found


@pytest.fixture(autouse=True)
def _equal_functions_are_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    build = sys.modules.get("tvmify.compiler.codegen.build")
    if build is not None:
        monkeypatch.setattr(build, "_compiled", _once(build._compiled))


@pytest.fixture(autouse=True)
def _captures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Remove the time limit of captures: tests must not depend on timing."""
    monkeypatch.setattr(allowance, "_most", math.inf)
    monkeypatch.setattr(allowance, "_left", math.inf)


@pytest.fixture
def inference() -> Iterator[None]:
    """Run the test under ``torch.inference_mode``."""
    with torch.inference_mode():
        yield
