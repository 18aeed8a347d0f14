"""A linker for the object files that LLVM generates for kernels."""

from __future__ import annotations

from tvmify.compiler.codegen.elf.linking import link
from tvmify.compiler.codegen.elf.objects import CannotLink, undefined, with_data

__all__ = ["CannotLink", "link", "undefined", "with_data"]
