"""Planned Relax and scheduled TIR → object code → the bytes of one shared library."""

from __future__ import annotations

import os
import shlex
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import relax
from tvm.relax import vm_build
from tvm.tirx.build import codegen_build

from tvmify.compiler.codegen import scratch
from tvmify.compiler.codegen.lowering import lower
from tvmify.compiler.codegen.objects import emit, is_whole_library, undefined_symbols
from tvmify.compiler.cuda import kernels
from tvmify.errors import BuildError
from tvmify.system import toolchain

#: Bytes that a build may need beside object code and library.
_ROOM = 1 << 18


@dataclass(frozen=True)
class Generated:
    """LLVM modules, optimised but not yet machine code, and the virtual machine's program.

    Attributes
    ----------
    kernels
        For a GPU, if there are any.
    """

    modules: list[tvm.runtime.Module]
    executable: tvm.runtime.Module
    functions: list[str]
    kernels: kernels.Kernels | None


def generate(
    ir_mod: tvm.IRModule,
    target: tvm.target.Target,
    mode: str = "compiled",
    threads: int | None = None,
) -> Generated:
    """Generate code for every TIR function: LLVM's in several threads, a GPU's in one piece.

    Functions do not see each other, and TVM releases the interpreter's lock meanwhile.

    Parameters
    ----------
    mode
        ``"compiled"``: the functions of the VM become TIR too, which saves up to 40 % of the time
        per call. ``"bytecode"``: the VM's instrument sees every call of a kernel.
    threads
        How many to use at most; None for as many as there are processors.
    """
    builder = relax.ExecBuilder()
    ir_mod = vm_build._vmcodegen(builder, ir_mod, mode)
    host = target.host or target
    workers = threads or os.cpu_count() or 1
    with ThreadPoolExecutor(workers) as pool:
        lowered, for_gpu = lower(ir_mod, target, pool)
        functions = list(lowered.functions_items())
        parts = [
            tvm.IRModule(dict(part), attrs=lowered.attrs)
            for part in (functions[i::workers] for i in range(workers))
            if part
        ]
        modules = list(pool.map(lambda part: codegen_build(part, host), parts))
    compiled = kernels.generate(for_gpu, target) if for_gpu is not None else None
    if compiled is not None:
        modules[0].import_module(compiled.module)
    constants = dict(ir_mod.attrs["const_name_to_constant"]) if ir_mod.attrs else {}
    executable = vm_build._ffi_api.VMLink(builder, target, modules[0], [], constants)
    names = [variable.name_hint for variable, _ in functions]
    return Generated(modules, executable, names, compiled)


def link(generated: Generated, places: Sequence[Path] = ()) -> bytes:
    """Emit machine code and link it.

    Parameters
    ----------
    places
        Directories for temporary files, should the usual one have no room.

    Raises
    ------
    BuildError
        There is no compiler to link with, it fails, or there is no room for its files.
    """
    compiler = toolchain.find()  # before the work
    modules = [*generated.modules, *_packed_imports(generated)]
    with ThreadPoolExecutor(len(modules)) as pool:
        contents = list(pool.map(emit, modules))
    size = sum(map(len, contents))
    if generated.kernels is not None:
        size += len(generated.kernels.cubin)
    with scratch.folder(_ROOM + 2 * size, places) as folder:
        files = []
        for number, content in enumerate(contents):
            files.append(folder / f"kernels{number}.o")
            files[-1].write_bytes(content)
        if generated.kernels is not None:
            files.append(kernels.pack(generated.executable, generated.kernels, folder))
        library = folder / "library.so"
        arguments = [*map(str, files), *_aliases(contents, generated.functions)]
        # -s: symbols for debuggers would double the size of what every process reads from disk.
        # -z now: a symbol that is not there shows when the library is loaded, not in a call.
        options = ["-shared", "-fPIC", "-s", "-Wl,-z,now", "-o", str(library)]
        toolchain.run([*compiler, *options, *arguments, "-lm"], folder)
        content = library.read_bytes() if library.is_file() else b""
    if not is_whole_library(content):
        raise BuildError(
            f"{shlex.join(compiler)} ended without an error, and made no shared library",
            "Run `tvmify doctor` to see whether it works here, then call refresh().",
        )
    return content


def _packed_imports(generated: Generated) -> list[tvm.runtime.Module]:
    """Return a module of the VM's program and its constants; those of a GPU go another way."""
    if generated.kernels is not None:
        return []
    description = generated.modules[0].get_function("_get_target_string")()
    pack_imports = tvm.runtime._ffi_api.ModulePackImportsToLLVM
    return [pack_imports(generated.executable, False, description, "")]


def _aliases(objects: list[bytes], functions: list[str]) -> list[str]:
    """Return linker options that resolve calls between parts.

    Such a call names the function without the prefix that TVM gives its symbol, and LLVM numbers
    the name (``matmul``, ``matmul.7``) when a part calls the function more than once.
    """
    undefined = {symbol for content in objects for symbol in undefined_symbols(content)}
    known = set(functions)
    return [
        f'-Wl,--defsym,"{symbol}"=__tvm_ffi_{symbol.partition(".")[0]}'
        for symbol in sorted(undefined)
        if symbol.partition(".")[0] in known
    ]
