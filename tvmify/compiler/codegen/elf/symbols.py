"""Resolves the symbols of several object files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tvmify.compiler.codegen.elf import records as elf
from tvmify.compiler.codegen.elf.objects import CannotLink, ObjectFile, Symbol

_KINDS = (elf.NOTYPE, elf.OBJECT, elf.FUNCTION, elf.IN_SECTION)


class Place(NamedTuple):
    """A position in a section, by the numbers of file and section."""

    file: int
    section: int
    offset: int


@dataclass(frozen=True)
class Definition:
    """A symbol and where it is."""

    symbol: Symbol
    place: Place


#: What a symbol refers to: a place, or a name that another library defines.
Meaning = Place | str


class Symbols:
    """The symbols of several object files.

    Parameters
    ----------
    alias
        Returns another name for an undefined symbol, or an empty string.

    Raises
    ------
    CannotLink
        Two files define the same symbol.
    """

    def __init__(self, files: Sequence[ObjectFile], alias: Callable[[str], str]) -> None:
        self._files, self._alias = files, alias
        self.definitions: dict[str, Definition] = {}
        self.locals: list[Definition] = []
        for number, file in enumerate(files):
            for symbol in file.symbols:
                if symbol.kind in _KINDS and elf.UNDEFINED < symbol.section < elf.RESERVED:
                    place = Place(number, symbol.section, symbol.value)
                    self._define(Definition(symbol, place))

    def _define(self, found: Definition) -> None:
        name, binding = found.symbol.name, found.symbol.binding
        if binding == elf.LOCAL:
            self.locals.append(found)
            return
        before = self.definitions.get(name)
        if before is None or (before.symbol.binding == elf.WEAK and binding != elf.WEAK):
            self.definitions[name] = found
        elif elf.WEAK not in (binding, before.symbol.binding):
            raise CannotLink(f"two object files define {name}")

    def meaning(self, file: int, number: int) -> Meaning:
        """Return what a symbol of a file refers to.

        Raises
        ------
        CannotLink
            It has an unsupported kind, such as thread-local.
        """
        symbols = self._files[file].symbols
        if not 0 < number < len(symbols):
            raise CannotLink(f"an object file refers to symbol {number}, which is missing")
        symbol = symbols[number]
        if symbol.kind not in _KINDS or symbol.section >= elf.RESERVED:
            raise CannotLink(f"the symbol {symbol.name!r} has an unsupported kind")
        if symbol.binding == elf.LOCAL and symbol.section != elf.UNDEFINED:
            return Place(file, symbol.section, symbol.value)
        found = self.definitions.get(symbol.name)
        found = found or self.definitions.get(self._alias(symbol.name))
        if found is not None:
            return found.place
        if symbol.visibility != elf.DEFAULT or not symbol.name:
            raise CannotLink(f"nothing defines {symbol.name!r}")
        return symbol.name

    def may_lack(self, name: str) -> bool:
        """Whether all references to an undefined symbol are weak."""
        found = (s for file in self._files for s in file.symbols if s.name == name)
        return all(symbol.binding == elf.WEAK for symbol in found)
