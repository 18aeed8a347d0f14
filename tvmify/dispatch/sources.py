"""A digest of all source files that affect an artifact, found by following imports."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

#: Imports from one package, and relative ones. Parsing every file with `ast` would take most of a
#: second in every new process that loads a program from disk. Both patterns begin with a word,
#: which `re` searches faster than the beginning of a line.
_FROM = r"from[ \t]+({package}\b[\w.]*|\.[\w.]*)[ \t]+import\b[ \t]*({names})"
_NAMES = r"\((?:#[^\n]*|[^)#])*|(?:\\\n|[^\n])*"
_IMPORT = r"import[ \t]+({package}\b[\w., \t]*)"
_IGNORED = re.compile(rb"#[^\n]*|\bas[ \t]+\w+")
_NAME = re.compile(rb"[\w.]+")


def digest(package: Path, roots: Iterable[str]) -> str:
    """Return a digest of some modules of a package, and of all modules that they import.

    Parameters
    ----------
    package
        The folder of a top-level package.
    roots
        Names of packages or modules in it, such as ``"tvmify.compiler"``.

    Returns
    -------
    str
        16 hexadecimal digits, which depend only on the names and texts of the files.
    """
    total = hashlib.sha256()
    for name, text in sorted(reached(package, roots).items()):
        total.update(f"{name}\0{len(text)}\0".encode())
        total.update(text)
    return total.hexdigest()[:16]


def reached(package: Path, roots: Iterable[str]) -> dict[str, bytes]:
    """Return the sources of all modules below the roots, and of those that they import, by name.

    Imports inside functions and for type checkers count, too. So do the packages around a module,
    except the outermost, which imports the whole library.
    """
    modules = _modules(package)
    todo = {name for root in roots for name in modules if f"{name}.".startswith(f"{root}.")}
    found: dict[str, bytes] = {}
    known: set[str] = set()
    while todo:
        name = todo.pop()
        found[name] = Path(modules[name]).read_bytes()
        is_package = modules[name].endswith("__init__.py")
        imported = imports(found[name], name if is_package else name.rpartition(".")[0]) - known
        known |= imported
        todo |= set().union(*(_loaded(each, modules) for each in imported)) - found.keys()
    return found


def imports(text: bytes, inside: str) -> set[str]:
    """Return the dotted names that a source imports from its own top-level package.

    Parameters
    ----------
    text
        The source of a module.
    inside
        The package of the module, from which relative imports start.

    Returns
    -------
    set
        Names of modules and of their members, which an import does not distinguish. An import in a
        docstring counts.
    """
    from_, import_ = _patterns(inside.partition(".")[0])
    found = {name for match in import_.findall(text) for name in _names(match)}
    for source, names in from_.findall(text):
        base = source.decode()
        if base.startswith("."):
            base = importlib.util.resolve_name(base, inside)
        found.update(f"{base}.{name}" for name in _names(names))
    return found


@functools.cache
def _patterns(package: str) -> tuple[re.Pattern[bytes], re.Pattern[bytes]]:
    from_ = _FROM.format(package=package, names=_NAMES)
    return re.compile(from_.encode()), re.compile(_IMPORT.format(package=package).encode())


def _names(clause: bytes) -> Iterator[str]:
    return (name.decode() for name in _NAME.findall(_IGNORED.sub(b"", clause)))


def _modules(package: Path) -> dict[str, str]:
    """Return the files of a package by module name."""
    found = {}
    for folder, _, files in os.walk(package):
        inside = ".".join((package.name, *Path(folder).relative_to(package).parts))
        for file in files:
            stem = file.removesuffix(".py")
            if stem != file:
                name = inside if stem == "__init__" else f"{inside}.{stem}"
                found[name] = f"{folder}/{file}"
    return found


def _loaded(imported: str, modules: Mapping[str, str]) -> set[str]:
    """Return the modules that an import loads: those it names, and the packages around them."""
    outermost, *inner = imported.split(".")
    names = itertools.accumulate(inner, lambda name, part: f"{name}.{part}", initial=outermost)
    loaded = modules.keys() & set(names)
    # A member of the outermost package is only there.
    return loaded - {outermost} or loaded
