"""Calls from Python into the JVM: names that are looked up once, iterators that tell of errors.

py4j sends a message for each step of a call and waits for the answer. `getattr(jvm,
"org.apache.spark.sql.functions").col("id")` is three of them: is this a class, has it such a
method, call it. PySpark writes every column in this way, and the changes between two snapshots are
some hundreds of columns. Names do not change while a JVM lives, so only the third is sent again.
"""

from typing import Any

from py4j import protocol
from py4j.java_collections import JavaIterator
from py4j.java_gateway import GatewayClient, JavaClass, JavaMember, JavaPackage, JVMView


class _KnownClass(JavaClass):  # type: ignore[misc]  # py4j has no types
    """A class whose methods are looked up once; its fields are read at every use."""

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)
        if isinstance(found, JavaMember | JavaClass):
            setattr(self, name, found)
        return found


class _Known:
    """A package, or the JVM itself, whose packages and classes are looked up once.

    py4j asks for every part of a name. The JVM then looks into some hundred jars for a class that
    is called `org`, and finds none: in a short epoch half of all its time went there. A name that
    is neither a class nor written as packages are is not kept, since a jar that comes later may
    have it.
    """

    def __getattr__(self, name: str) -> Any:
        found = super().__getattr__(name)  # type: ignore[misc]  # of JVMView or of JavaPackage
        if isinstance(found, JavaClass):
            found.__class__ = _KnownClass
        elif isinstance(found, JavaPackage):
            found.__class__ = _KnownPackage
        if isinstance(found, JavaClass) or name.rpartition(".")[2][:1].islower():
            setattr(self, name, found)
        return found


class _KnownPackage(_Known, JavaPackage):  # type: ignore[misc]
    """A package."""


class _KnownView(_Known, JVMView):  # type: ignore[misc]
    """A JVM."""


class _Iterator(JavaIterator):  # type: ignore[misc]
    """An iterator of Java's that ends where Java says so.

    py4j's own takes any exception for the end: files that could not be listed to the last would be
    fewer files.
    """

    def next(self) -> Any:
        """The next element; raises what Java raises."""
        if not self.__getattr__("hasNext")():
            raise StopIteration
        return self.__getattr__("next")()

    __next__ = next


def _iterator(target_id: str, client: GatewayClient) -> _Iterator:
    return _Iterator(target_id, client)


def make_calls_cheap(jvm: JVMView) -> None:
    """Look up each name of this JVM once, whoever asks: PySpark's own calls are most of them."""
    jvm.__class__ = _KnownView


protocol.register_output_converter(protocol.ITERATOR_TYPE, _iterator)
