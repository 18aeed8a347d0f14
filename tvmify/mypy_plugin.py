"""For mypy, which ignores what a decorator does to a class: adds our methods to such classes.

[tool.mypy]
plugins = ["tvmify.mypy_plugin"]
"""

from __future__ import annotations

from collections.abc import Callable

from mypy.nodes import MDEF, SymbolTableNode, TypeInfo
from mypy.plugin import ClassDefContext, Plugin

_DECORATOR = "tvmify.decorate.decorator.tvmify"
_DECORATED = "tvmify.decorate.decorated.Decorated"


class TvmifyPlugin(Plugin):
    """Gives classes under ``@tvmify`` or ``@tvmify(...)`` the methods of `tvmify.Decorated`."""

    def get_class_decorator_hook_2(self, fullname: str) -> Callable[[ClassDefContext], bool] | None:
        """Return what looks at a class with this decorator."""
        return _add_methods if fullname == _DECORATOR else None


def _add_methods(context: ClassDefContext) -> bool:
    symbol = context.api.lookup_fully_qualified_or_none(_DECORATED)
    if symbol is None or not isinstance(symbol.node, TypeInfo):
        return False  # not analysed yet: mypy asks again
    info = context.cls.info
    for name, method in symbol.node.names.items():
        if not name.startswith("_") and info.get(name) is None:  # a user's own method stays
            info.names[name] = SymbolTableNode(MDEF, method.node, plugin_generated=True)
    return True


def plugin(version: str) -> type[Plugin]:
    """Return the plugin, whatever the version of mypy."""
    return TvmifyPlugin
