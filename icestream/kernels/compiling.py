"""How kernels and their parts are compiled, and kept on disk.

Numba keeps compiled code by the time of the file that the kernel stands in. It does not see an
edit of another file whose parts were compiled into the kernel. Here the name of what is kept has a
hash of the text of all modules with kernels, and of the modules that these import directly, so an
edit of any of them compiles anew. Numba itself compares its version, the processor and the
types of the arguments.
"""

import functools
import hashlib
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba
from numba.core import caching

from icestream.errors import Broken

Function = TypeVar("Function", bound=Callable[..., Any])
# Decided once for the whole process: a kernel is compiled for one of the modes.
CHECKED = os.environ.get("ICESTREAM_CHECKED_KERNELS", "") not in ("", "0")

_PACKAGE = Path(__file__).parent.parent
_COMPILED = re.compile(r"^@(?:kernel|part)$", re.MULTILINE)
_IMPORTED = re.compile(rf"^from ({_PACKAGE.name}\.[\w.]+) import", re.MULTILINE)
_KEY_CHARACTERS = 16


def kernel(function: Function) -> Function:
    """Compile a function that Python calls, once per machine, to run without Python's lock.

    In checked mode it raises `Broken` when the compiled code leaves its memory.
    """
    compiled: Any = numba.njit(nogil=True, boundscheck=CHECKED)(function)
    # Numba names no public way to say by what compiled code is found again.
    compiled._cache = _KeptByContent(function)
    if not CHECKED:
        return cast(Function, compiled)

    @functools.wraps(function)
    def checked(*arguments: Any) -> Any:
        try:
            return compiled(*arguments)
        except IndexError as error:
            name = f"{function.__module__}.{function.__qualname__}"
            raise Broken(f"the kernel {name} left its memory: {error}") from error

    checked.__dict__["compiled"] = compiled
    return cast(Function, checked)


def part(function: Function) -> Function:
    """Compile a function that only kernels call, into each of them."""
    return cast(Function, numba.njit(forceinline=True, boundscheck=CHECKED)(function))


class _KeptByContent(caching.FunctionCache):
    """Compiled code in the folders that numba chooses, under names that have the content's key."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__(function)  # type: ignore[no-untyped-call]
        key = content_key()
        self._cache_file = caching.IndexDataCacheFile(  # type: ignore[no-untyped-call]
            cache_path=self._cache_path,
            filename_base=f"{self._impl.filename_base}.{key}",
            source_stamp=key,
        )


@functools.cache
def content_key() -> str:
    """A hash of all that compiled code is made of, and of how it is compiled."""
    texts = {path: path.read_bytes() for path in sorted(_PACKAGE.rglob("*.py"))}
    chosen = {path for path in texts if path.parent == Path(__file__).parent}
    for path, content in texts.items():
        # A file that an archiver left beside the modules need not be text.
        text = content.decode(errors="replace")
        if _COMPILED.search(text):
            chosen |= {path, *map(_file_of, _IMPORTED.findall(text))}
    found = hashlib.blake2b(f"{numba.__version__} {CHECKED}".encode())
    for path in sorted(chosen):
        # Lengths keep two files apart whose texts together are the same.
        content = texts.get(path, b"")
        found.update(f"\n{path.relative_to(_PACKAGE)} {len(content)}\n".encode() + content)
    return found.hexdigest()[:_KEY_CHARACTERS]


def _file_of(module: str) -> Path:
    """The file of a module of this package."""
    place = _PACKAGE.parent.joinpath(*module.split("."))
    return place / "__init__.py" if place.is_dir() else place.with_suffix(".py")
