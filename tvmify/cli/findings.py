"""The checks of ``tvmify doctor``, one function each."""

from __future__ import annotations

import difflib
import importlib.metadata
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from tvmify.cache import DiskCache, Limits
from tvmify.cache.directory import is_there
from tvmify.cli.printing import size
from tvmify.errors import BuildError, CacheError, NativeLibraryError, OptionError
from tvmify.system import toolchain, variables
from tvmify.torch_compat import versions as supported

OK, WARNING, ERROR = "ok", "warning", "error"

_REINSTALL = "Run: pip install --force-reinstall tvmify."
#: Bytes of free disk space below which doctor warns: an entry of a large model needs this much.
_LITTLE_SPACE = 200 * 10**6
_REQUIREMENT = re.compile(r"(?P<package>[\w-]+)(?P<comparison>[=<>!~]=?)?(?P<version>[\w.*]+)?")
# Import nothing from the current directory, which others may be able to write to.
_ROUND_TRIP = """
import sys
sys.path[:] = filter(None, sys.path)
from tvmify.cli.round_trip import main
main(sys.argv[1])
"""


class Finding(NamedTuple):
    """The result of one check.

    Attributes
    ----------
    status
        ``"ok"``, ``"warning"`` (tvmify works, but not as well as it could) or ``"error"``.
    subject
        What was checked.
    detail
        What was found.
    advice
        How to fix it; empty if nothing needs fixing.
    """

    status: str
    subject: str
    detail: str
    advice: str = ""


def versions() -> Iterator[Finding]:
    """Compare installed packages with the versions that tvmify requires."""
    own = f"tvmify {importlib.metadata.version('tvmify')}, Python {platform.python_version()}"
    yield Finding(OK, "tvmify", f"{own}, {platform.system()} {platform.machine()}")
    python = f"Python {supported.PYTHON[0].version} to {supported.PYTHON[-1].version}"
    if complaint := supported.complaint(supported.installed_torch()):
        sentence, _, command = complaint.partition(": run: ")
        yield Finding(ERROR, "supported", sentence, f"Run: {command}.")
    else:
        yield Finding(OK, "supported", f"{supported.supported_torch()}, {python}")
    for requirement in importlib.metadata.requires("tvmify") or ():
        found = _REQUIREMENT.match(requirement)
        if found is None or "extra ==" in requirement:
            continue
        try:
            installed = importlib.metadata.version(found["package"])
        except importlib.metadata.PackageNotFoundError:
            yield Finding(ERROR, found["package"], "is not installed", _REINSTALL)
            continue
        if found["comparison"] == "==" and not _is(installed, found["version"]):
            advice = f"Run: pip install '{found[0]}'."
            detail = f"{installed} is installed, but tvmify needs {found['version']}"
            yield Finding(ERROR, found["package"], detail, advice)
        elif found["comparison"] == "==":
            yield Finding(OK, found["package"], installed)


def _is(version: str, wanted: str) -> bool:
    """Compare versions, ignoring the build label after a plus sign."""
    version = version.partition("+")[0]
    return version == wanted or (wanted.endswith(".*") and f"{version}.".startswith(wanted[:-1]))


def native_library() -> Iterator[Finding]:
    """Load the native library, and report what it was built against."""
    try:
        from tvmify.runtime.native import built_against
    except NativeLibraryError as error:
        yield Finding(ERROR, "native library", str(error), "Do what the message says.")
    else:
        yield Finding(OK, "native library", f"loads; it was built against {built_against()}")


def processor() -> Iterator[Finding]:
    """Check the instruction sets and the number of threads."""
    import torch

    from tvmify.runtime import cpu_features

    features = cpu_features()
    cores = len(os.sched_getaffinity(0))
    threads = torch.get_num_threads()
    detail = f"{', '.join(features) or 'no instruction sets beyond the architecture'}"
    if platform.machine() == "x86_64" and not {"avx2", "fma"} <= set(features):
        advice = "Expect slow code: use a CPU with AVX2, or expose it to the virtual machine."
        yield Finding(WARNING, "CPU", detail, advice)
    else:
        yield Finding(OK, "CPU", detail)
    detail = f"{threads} on {cores} cores"
    if threads > cores:
        advice = f"More threads than cores slow each other down: set OMP_NUM_THREADS={cores}."
        yield Finding(WARNING, "threads", detail, advice)
    else:
        yield Finding(OK, "threads", detail)


def linker() -> Iterator[Finding]:
    """Report which linker is used; run the C++ compiler, which the fallback needs."""
    asked = variables.system_linker()
    ours = "" if asked else "tvmify's own, and where that fails "
    try:
        command = toolchain.find()
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, timeout=30, check=False
        )
        with tempfile.TemporaryDirectory(prefix="tvmify-doctor-") as folder:
            empty = ["-x", "assembler", os.devnull, "-o", str(Path(folder, "empty.so"))]
            toolchain.run([*command, "-shared", *empty, "-lm"], Path(folder), 30)
    except (BuildError, OSError, subprocess.SubprocessError) as error:
        problem = error.reason if isinstance(error, BuildError) else f"it does not run: {error}"
        if asked:
            advice = f"Unset TVMIFY_SYSTEM_LINKER. Or: {toolchain.INSTALL}"
            yield Finding(ERROR, "linker", problem, advice)
        else:
            yield Finding(OK, "linker", f"{ours}none ({problem})")
    else:
        version = answer.stdout.decode(errors="replace").partition("\n")[0]
        yield Finding(OK, "linker", f"{ours}{shlex.join(command)}: {version}")


def gpus() -> Iterator[Finding]:
    """List the GPUs that PyTorch sees, and find the CUDA compiler."""
    import torch

    from tvmify.compiler.cuda import nvcc, nvrtc
    from tvmify.target import arch_of

    if not torch.cuda.is_available():
        reason = "" if torch.version.cuda else ", which is built without CUDA"
        yield Finding(OK, "GPU", f"none found by PyTorch{reason}")
        return
    for index in range(torch.cuda.device_count()):
        arch = arch_of(*torch.cuda.get_device_capability(index))
        yield Finding(OK, f"GPU {index}", f"{torch.cuda.get_device_name(index)} ({arch})")
    if tool := nvcc.find() or nvrtc.find():
        yield Finding(OK, "CUDA compiler", tool)
    else:
        advice = f"{nvcc.INSTALL} Until then only cached programs run compiled on a GPU."
        yield Finding(WARNING, "CUDA compiler", "none", advice)


def cache(directory: Path | None) -> Iterator[Finding]:
    """Check that the cache directory is private and writable, and has free space."""
    directory = directory or variables.cache_directory()
    if directory is None:
        advice = "Set TVMIFY_CACHE_DIR to a directory that this user owns."
        yield Finding(WARNING, "cache", "no cache: this user has no home directory", advice)
        return
    try:
        exists = is_there(directory)
        entries = DiskCache(directory).entries()
        damaged = DiskCache(directory).quarantined()
    except (CacheError, OSError) as error:
        yield Finding(ERROR, "cache", str(error))
        return
    place = directory
    while not place.exists():
        place = place.parent
    limit = f" of {size(_limits().bytes)}" if _limits().bytes else ""
    total = size(sum(entry.bytes for entry in entries))
    detail = f"{directory}: {len(entries)} entries, {total}{limit}"
    if not exists:
        detail = f"{directory} will be created when the first program is stored"
    try:
        with tempfile.TemporaryFile(dir=place):
            space = shutil.disk_usage(place).free
    except OSError as error:
        advice = "Compiled programs are not stored: make it writable, or set TVMIFY_CACHE_DIR."
        yield Finding(WARNING, "cache", f"{place} cannot be written to: {error}", advice)
        return
    if space < _LITTLE_SPACE:
        advice = "Free some space, or set TVMIFY_CACHE_DIR."
        yield Finding(WARNING, "cache", f"{detail}; only {size(space)} are free", advice)
    else:
        yield Finding(OK, "cache", f"{detail}; {size(space)} free")
    if damaged:
        detail = f"{len(damaged)} entries were damaged, and were moved to {damaged[0].parent}"
        advice = "If you did not change them, check the disk; tvmify clear removes them."
        yield Finding(WARNING, "damaged entries", detail, advice)


def _limits() -> Limits:
    with suppress(OptionError):  # reported by `environment`
        return variables.cache_limits()
    return Limits()


def environment() -> Iterator[Finding]:
    """Report variables that have no effect, disable compilation, or have a wrong value."""
    for name, value in variables.environment().items():
        if name not in variables.VARIABLES:
            near = difflib.get_close_matches(name, variables.VARIABLES, 1)
            advice = f"Did you mean {near[0]}?" if near else "Unset it: it has no effect."
            yield Finding(WARNING, name, f"{value!r}: unknown variable", advice)
        elif name == "TVMIFY_DISABLE" and variables.disabled():
            yield Finding(WARNING, name, "nothing is compiled", "Unset it to use compiled code.")
        elif name == "TVMIFY_CACHE_SIZE" and (problem := _problem_of_size()):
            yield Finding(ERROR, name, problem, "Correct or unset it.")
        else:
            yield Finding(OK, name, repr(value))


def _problem_of_size() -> str:
    try:
        variables.cache_limits()
    except OptionError as error:
        return str(error)
    return ""


def round_trip(timeout: float) -> Iterator[Finding]:
    """Compile a small module in one process, and load it in another."""
    with tempfile.TemporaryDirectory(prefix="tvmify-doctor-") as folder:
        kept = {k: v for k, v in os.environ.items() if k not in variables.environment()}
        surroundings = kept | {"TVMIFY_CACHE_DIR": str(Path(folder) / "cache")}
        answers = []
        for step in ("compiled", "loaded"):
            command = [sys.executable, "-W", "ignore", "-c", _ROUND_TRIP, step]
            try:
                done = subprocess.run(
                    command,
                    env=surroundings,
                    capture_output=True,
                    text=True,
                    errors="replace",
                    timeout=timeout,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                detail = f"a small module was not {step} within {timeout:.0f} seconds"
                yield Finding(ERROR, "round trip", detail, "Check whether the machine is busy.")
                return
            if done.returncode:
                last = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
                advice = "See the findings above; if there are none, report this."
                yield Finding(ERROR, "round trip", f"a small module was not {step}: {last}", advice)
                return
            answers.append(done.stdout)
    if answers[0] != answers[1]:
        advice = "Do not use this installation, and report this."
        detail = "the code computed different numbers in the second process"
        yield Finding(ERROR, "round trip", detail, advice)
    else:
        detail = "compiled, stored, loaded in a second process without TVM's compiler, same numbers"
        yield Finding(OK, "round trip", detail)
