"""Planned Relax and scheduled TIR → object code → the bytes of one shared library."""

from __future__ import annotations

import logging
import os
import shlex
from collections.abc import Callable, Sequence
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
from tvmify.system.workers import Workers

#: Bytes that a compiler may need in addition to object code and library.
_ROOM = 1 << 18
#: The symbol under which TVM looks for packed modules; each library has one.
_IMPORTS = "__tvm_ffi__library_bin"
#: How the names of the VM's functions begin. They only call kernels and the VM, one after another,
#: so optimizations do not make them faster, and take LLVM longer than all kernels in a large model.
_OF_VM = "__vmtir__"

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Generated:
    """Machine code, and the program of TVM's virtual machine.

    Attributes
    ----------
    objects
        Object files, each with some of the functions.
    kernels
        Kernels for a GPU, if any.
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

    Functions are independent, and TVM releases the GIL while it compiles.

    Parameters
    ----------
    mode
        ``"compiled"``: the functions of the VM become TIR too, which saves up to 40 % of the time
        per call. ``"bytecode"``: the VM's instrument sees every call of a kernel.
    threads
        The most threads to use; None for one per processor.
    """
    builder = relax.ExecBuilder()
    ir_mod = vm_build._vmcodegen(builder, ir_mod, mode)
    host = target.host or target
    workers = threads or os.cpu_count() or 1
    pool = Workers(workers)
    lowered, for_gpu = lower(ir_mod, target, pool)
    functions = list(lowered.functions_items())
    of_vm = [item for item in functions if item[0].name_hint.startswith(_OF_VM)]
    others = [item for item in functions if not item[0].name_hint.startswith(_OF_VM)]
    shares = [(others[i::workers], host) for i in range(workers)]
    parts = [
        (tvm.IRModule(dict(share), attrs=lowered.attrs), for_target)
        for share, for_target in (*shares, (of_vm, _unoptimized(host)))
        if share
    ]
    made = pool.map(lambda part: _compiled(*part), parts)
    first, objects = made[0][0], [content for _, content in made]
    compiled = kernels.generate(for_gpu, target) if for_gpu is not None else None
    if compiled is not None:
        first.import_module(compiled.module)
    constants = dict(ir_mod.attrs["const_name_to_constant"]) if ir_mod.attrs else {}
    executable = vm_build._ffi_api.VMLink(builder, target, first, [], constants)
    names = [variable.name_hint for variable, _ in functions]
    return Generated(objects, executable, names, compiled)


def _unoptimized(target: tvm.target.Target) -> tvm.target.Target:
    """Return a target for which LLVM does not optimize."""
    return tvm.target.Target({**target.export(), "opt-level": 0})


def _compiled(part: tvm.IRModule, target: tvm.target.Target) -> tuple[tvm.runtime.Module, bytes]:
    module = codegen_build(part, target)
    return module, emit(module)


def link(generated: Generated, scratch_directories: Sequence[Path] = ()) -> bytes:
    """Link machine code and the virtual machine's program to a shared library.

    This runs no other program, unless our linker does not support something or
    ``TVMIFY_SYSTEM_LINKER`` is set: then the system's C++ compiler links.

    Parameters
    ----------
    scratch_directories
        Directories for temporary files of a compiler if the usual one is full.

    Raises
    ------
    BuildError
        Our linker does not support something, and the system's compiler is missing, fails, or lacks
        room for its files.
    """
    imports = elf.with_data(_IMPORTS, _packed_imports(generated), generated.objects[0])
    objects = [*generated.objects, imports]
    known = set(generated.functions)

    def alias(symbol: str) -> str:
        """Resolve calls between parts.

        Such a call uses the name of the function without TVM's prefix, and LLVM numbers the name
        (``matmul``, ``matmul.7``) if a part calls the function more than once.
        """
        name, _, _ = symbol.partition(".")
        return f"__tvm_ffi_{name}" if name in known else ""

    if variables.system_linker():
        return _link_by_compiler(objects, alias, scratch_directories)
    try:
        return elf.link(objects, alias)
    except elf.CannotLink as reason:
        _LOG.debug("the system's compiler links, since %s", reason)
        try:
            return _link_by_compiler(objects, alias, scratch_directories)
        except BuildError as error:
            raise BuildError(f"{reason}; and {error.reason}", error.next_step) from error


def _link_by_compiler(
    objects: Sequence[bytes], alias: Callable[[str], str], scratch_directories: Sequence[Path]
) -> bytes:
    compiler = toolchain.find()
    with scratch.folder(_ROOM + 2 * sum(map(len, objects)), scratch_directories) as folder:
        files = []
        for number, content in enumerate(objects):
            files.append(folder / f"kernels{number}.o")
            files[-1].write_bytes(content)
        library = folder / "library.so"
        undefined = sorted({symbol for content in objects for symbol in elf.undefined(content)})
        aliases = [f'-Wl,--defsym,"{name}"={alias(name)}' for name in undefined if alias(name)]
        # -s: debug sections would double what every process reads. -z now: a missing symbol is
        # reported when the library is loaded, not in a call.
        made_as = ["-shared", "-fPIC", "-s", "-Wl,-z,now", "-o", str(library)]
        toolchain.run([*compiler, *made_as, *map(str, files), *aliases, "-lm"], folder)
        content = library.read_bytes() if library.is_file() else b""
    if not is_whole_library(content):
        raise BuildError(
            f"{shlex.join(compiler)} exited without an error but made no shared library",
            "Run `tvmify doctor` to check it, then call refresh().",
        )
    return content


def _packed_imports(generated: Generated) -> bytes:
    """Return the VM's program, its constants and a GPU's kernels, as TVM packs them."""
    if generated.kernels is not None:
        return kernels.pack(generated.executable, generated.kernels)
    return tvm.runtime._ffi_api.ModulePackImportsToTensor(generated.executable).numpy().tobytes()
