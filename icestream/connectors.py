"""The register of connectors: each is a folder of `sources` or `sinks` that has an `options.py`.

A folder is found by looking, and imported when its kind is asked for: a pipeline from PostgreSQL
imports nothing of Kafka.
"""

import importlib
import pkgutil
from typing import Any, Generic, TypeVar

from icestream.options import unknown
from icestream.sinks.options import SinkOptions
from icestream.sources.options import SourceOptions

T = TypeVar("T")


class Register(Generic[T]):
    """The connectors of one package, by the kinds that pipeline files use."""

    def __init__(self, package: str):
        self._package = package
        self._added: dict[str, type[T]] = {}

    def kinds(self) -> list[str]:
        """All kinds that there are; nothing is imported for it."""
        return sorted({folder.name for folder in self._folders()} | set(self._added))

    def _folders(self) -> list[pkgutil.ModuleInfo]:
        places = importlib.import_module(self._package).__path__
        folders = [each for each in pkgutil.iter_modules(places) if each.ispkg]
        return [each for each in folders if any(map(_has_options, self._within(each)))]

    def _within(self, folder: pkgutil.ModuleInfo) -> list[pkgutil.ModuleInfo]:
        """The modules of a folder, which may lie in an archive; nothing is imported for it."""
        finder: Any = folder.module_finder
        spec = finder.find_spec(f"{self._package}.{folder.name}")
        return list(pkgutil.iter_modules(spec.submodule_search_locations))

    def options(self, kind: str, place: str = "the register") -> type[T]:
        """The options of a kind; raises `ConfigInvalid` when there is none of that name."""
        if kind in self._added:
            return self._added[kind]
        if kind not in self.kinds():
            raise unknown("kind", kind, self.kinds(), place)
        found: type[T] = importlib.import_module(f"{self._package}.{kind}.options").OPTIONS
        return found

    def import_all(self) -> None:
        """Import all modules of all folders, for a process that others are forked from."""
        for folder in self._folders():
            self._import(folder)

    def import_folder_of(self, options: T) -> None:
        """Import all modules beside these options; nothing where they lie in no folder of ours."""
        for folder in self._folders():
            if type(options).__module__ == f"{self._package}.{folder.name}.options":
                self._import(folder)

    def _import(self, folder: pkgutil.ModuleInfo) -> None:
        for module in self._within(folder):
            importlib.import_module(f"{self._package}.{folder.name}.{module.name}")

    def add(self, kind: str, options: type[T]) -> None:
        """Add a connector that lies elsewhere, for this process."""
        self._added[kind] = options


def _has_options(module: pkgutil.ModuleInfo) -> bool:
    return module.name == "options"


SOURCES: Register[SourceOptions] = Register("icestream.sources")
SINKS: Register[SinkOptions] = Register("icestream.sinks")
