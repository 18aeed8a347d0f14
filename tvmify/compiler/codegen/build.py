"""Planned Relax and scheduled TIR → object code → the bytes of one shared library."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import tvm
from tvm import relax
from tvm.relax import vm_build
from tvm.tirx.build import codegen_build

from tvmify.compiler.codegen import elf, scratch
from tvmify.compiler.codegen.lowering import lower
from tvmify.compiler.codegen.objects import emit, is_whole_library
from tvmify.compiler.cuda import kernels
from tvmify.errors import BuildError
from tvmify.system import toolchain, variables

#: Bytes that a compiler may need beside object code and library.
_ROOM = 1 << 18
#: Where TVM looks for packed modules; each library has one.
_IMPORTS = "__tvm_ffi__library_bin"

_logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generated:
    """Machine code, and the virtual machine's program.

    Attributes
    ----------
    objects
        Object files, each with some of the functions.
    kernels
        For a GPU, if there are any.
    """

    objects: list[bytes]
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
        made = list(pool.map(lambda part: _compiled(part, host), parts))
    first, objects = made[0][0], [content for _, content in made]
    compiled = kernels.generate(for_gpu, target) if for_gpu is not None else None
    if compiled is not None:
        first.import_module(compiled.module)
    constants = dict(ir_mod.attrs["const_name_to_constant"]) if ir_mod.attrs else {}
    executable = vm_build._ffi_api.VMLink(builder, target, first, [], constants)
    names = [variable.name_hint for variable, _ in functions]
    return Generated(objects, executable, names, compiled)


def _compiled(part: tvm.IRModule, target: tvm.target.Target) -> tuple[tvm.runtime.Module, bytes]:
    module = codegen_build(part, target)
    return module, emit(module)


def link(generated: Generated, places: Sequence[Path] = ()) -> bytes:
    """Link machine code and the virtual machine's program to a shared library.

    This needs no other program. The system's C++ compiler links what ours does not know, and
    everything if ``TVMIFY_SYSTEM_LINKER`` is set.

    Parameters
    ----------
    places
        Directories for temporary files of a compiler, should the usual one have no room.

    Raises
    ------
    BuildError
        Our linker does not know something, and there is no compiler to link with, it fails, or
        there is no room for its files.
    """
    imports = elf.with_data(_IMPORTS, _packed_imports(generated), generated.objects[0])
    objects = [*generated.objects, imports]
    known = set(generated.functions)

    def alias(symbol: str) -> str:
        """Resolve calls between parts.

        Such a call names the function without the prefix that TVM gives its symbol, and LLVM
        numbers the name (``matmul``, ``matmul.7``) when a part calls the function more than once.
        """
        name, _, _ = symbol.partition(".")
        return f"__tvm_ffi_{name}" if name in known else ""

    if variables.system_linker():
        return _link_by_compiler(objects, alias, places)
    try:
        return elf.link(objects, alias)
    except elf.CannotLink as reason:
        _logger.debug("the system's compiler links, since %s", reason)
        try:
            return _link_by_compiler(objects, alias, places)
        except BuildError as error:
            raise BuildError(f"{reason}; and {error.reason}", error.next_step) from error


def _link_by_compiler(
    objects: Sequence[bytes], alias: Callable[[str], str], places: Sequence[Path]
) -> bytes:
    compiler = toolchain.find()
    with scratch.folder(_ROOM + 2 * sum(map(len, objects)), places) as folder:
        files = []
        for number, content in enumerate(objects):
            files.append(folder / f"kernels{number}.o")
            files[-1].write_bytes(content)
        library = folder / "library.so"
        undefined = sorted({symbol for content in objects for symbol in elf.undefined(content)})
        aliases = [f'-Wl,--defsym,"{name}"={alias(name)}' for name in undefined if alias(name)]
        # -s: with the sections for debuggers, every process would read twice as much.
        # -z now: a symbol that is not there shows when the library is loaded, not in a call.
        made_as = ["-shared", "-fPIC", "-s", "-Wl,-z,now", "-o", str(library)]
        toolchain.run([*compiler, *made_as, *map(str, files), *aliases, "-lm"], folder)
        content = library.read_bytes() if library.is_file() else b""
    if not is_whole_library(content):
        raise BuildError(
            f"{shlex.join(compiler)} ended without an error, and made no shared library",
            "Run `tvmify doctor` to see whether it works here, then call refresh().",
        )
    return content


def _packed_imports(generated: Generated) -> bytes:
    """Return the VM's program, its constants and a GPU's kernels, as TVM packs them."""
    if generated.kernels is not None:
        return kernels.pack(generated.executable, generated.kernels)
    return tvm.runtime._ffi_api.ModulePackImportsToTensor(generated.executable).numpy().tobytes()
