from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tvmify
from tests.cli.caches import add, run

COMMANDS = "list show explain-miss verify prune clear export import inspect doctor warmup".split()


@pytest.mark.parametrize("option", ["-h", "--help"])
def test_the_help_lists_all_commands(option: str) -> None:
    result = run(option)
    assert result.exit_code == 0
    assert [command for command in COMMANDS if f" {command} " not in result.output] == []
    for command in COMMANDS:
        assert run(command, option).exit_code == 0


def test_the_version() -> None:
    result = run("--version")
    assert (result.exit_code, result.output) == (0, f"tvmify {tvmify.__version__}\n")


def test_an_unknown_command() -> None:
    result = run("lst")
    assert result.exit_code == 2 and "No such command 'lst'" in result.stderr


def test_the_package_is_the_command(cache_directory: Path) -> None:
    key = add(cache_directory)
    command = [sys.executable, "-m", "tvmify"]
    done = subprocess.run([*command, "list"], check=True, capture_output=True, text=True)
    assert key.digest[:12] in done.stdout
    done = subprocess.run([*command, "lst"], check=False, capture_output=True, text=True)
    assert done.returncode == 2 and "Usage: tvmify [OPTIONS]" in done.stderr


@pytest.mark.parametrize("arguments", ["--help", "--version", "list", "list --json"])
def test_output_that_cannot_be_written(arguments: str, cache_directory: Path) -> None:
    add(cache_directory)
    command = [sys.executable, "-m", "tvmify", *arguments.split()]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, check=False, stdout=full, stderr=subprocess.PIPE, text=True)
    assert (done.returncode, done.stderr) == (1, "tvmify: No space left on device\n")
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        done = subprocess.run(command, check=False, stdout=closed, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (-signal.SIGPIPE, b"")


def test_a_usage_error_without_a_reader() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer) as closed:
        command = [sys.executable, "-m", "tvmify", "lst"]
        done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=closed)
    assert (done.returncode, done.stdout) == (-signal.SIGPIPE, b"")


@pytest.mark.parametrize(
    "arguments", ["--help", "--version", "list", "show 0", "verify", "prune", "clear -y", "list -h"]
)
def test_light_commands_do_not_import_torch(arguments: str, cache_directory: Path) -> None:
    add(cache_directory)
    script = f"""
import sys
from tvmify.cli import app

try:
    app({arguments.split()!r})
except SystemExit as end:
    assert end.code in (0, 1), end.code
sys.exit(" ".join({{"numpy", "torch", "tvm"}} & set(sys.modules)) or None)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], check=False, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
