"""Planned Relax and scheduled TIR → object code → the bytes of one shared library."""

from __future__ import annotations

import os
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import relax
from tvm.relax import vm_build
from tvm.support import cc
from tvm.tirx.build import codegen_build

from tvmify.compiler.cuda import kernels
from tvmify.compiler.lowering import lower
from tvmify.errors import BuildError


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


def link(generated: Generated) -> bytes:
    """Emit machine code and link it.

    Raises
    ------
    BuildError
        There is no C compiler to link with.
    """
    with tempfile.TemporaryDirectory(prefix="tvmify-") as folder:
        objects = [str(Path(folder, f"kernels{i}.o")) for i in range(len(generated.modules))]
        with ThreadPoolExecutor(len(objects)) as pool:
            list(
                pool.map(
                    lambda module, path: module.write_to_file(path), generated.modules, objects
                )
            )
        imports = _pack_imports(generated, Path(folder))
        library = Path(folder, "library.so")
        _run_linker([*objects, imports, *_aliases(objects, generated.functions)], library)
        return library.read_bytes()


def _pack_imports(generated: Generated, folder: Path) -> str:
    """Write the VM's program, the constants and a GPU's kernels as one more file to link."""
    if generated.kernels is not None:
        return str(kernels.pack(generated.executable, generated.kernels, folder))
    description = generated.modules[0].get_function("_get_target_string")()
    imports = str(folder / "imports.o")
    pack_imports = tvm.runtime._ffi_api.ModulePackImportsToLLVM
    pack_imports(generated.executable, False, description, "").write_to_file(imports)
    return imports


def _aliases(objects: list[str], functions: list[str]) -> list[str]:
    """Return linker options that resolve calls between parts.

    Such a call names the function without the prefix that TVM gives its symbol, and LLVM numbers
    the name (``matmul``, ``matmul.7``) when a part calls the function more than once.
    """
    listing = subprocess.run(
        ["nm", "--undefined-only", "--just-symbols", *objects],
        capture_output=True,
        text=True,
        check=True,
    )
    undefined = {line.strip() for line in listing.stdout.splitlines()}
    known = set(functions)
    return [
        f'-Wl,--defsym,"{symbol}"=__tvm_ffi_{symbol.partition(".")[0]}'
        for symbol in sorted(undefined)
        if symbol.partition(".")[0] in known
    ]


def _run_linker(arguments: list[str], library: Path) -> None:
    compiler = cc.get_cc()
    if compiler is None:
        raise BuildError(
            "there is no C compiler on PATH to link the compiled code with",
            "Install gcc or clang, or name one in the environment variable CC.",
        )
    # -s: symbols for debuggers would double the size of what every process reads from disk.
    command = [compiler, "-shared", "-fPIC", "-s", "-o", str(library), *arguments, "-lm"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode:
        raise RuntimeError(f"{compiler}: {result.stderr.strip()}")
