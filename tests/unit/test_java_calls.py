"""Names of Java's packages and classes, as they are asked for, and iterators of Java's."""

import pytest
from py4j.java_gateway import JVMView
from py4j.protocol import Py4JError, get_return_value

from icestream.java_calls import make_calls_cheap

CLASSES = {"org.lake.Table", "org.lake.functions"}


class Asked:
    """As much of py4j's client as looks up names; it notes them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gateway_property = self
        self.pool = self.converters = None

    def send_command(self, command: str) -> str:
        words = command.splitlines()
        self.names.append(".".join(words[2:4]) if words[1] == "m" else words[2])
        if words[1] == "m":
            return "ym"
        return f"yc{words[2]}" if words[2] in CLASSES else "yp"


def view(client: Asked) -> JVMView:
    """A JVM behind the client."""
    found = JVMView(client, "test", id="view")
    make_calls_cheap(found)
    return found


def test_a_name_is_looked_up_once():
    """P3: the JVM looks into all its jars for each part of a name."""
    client = Asked()
    java = view(client)
    first = java.org.lake.Table
    assert client.names == ["org", "org.lake", "org.lake.Table"]
    assert java.org.lake.Table is first
    assert len(client.names) == 3


def test_a_method_of_a_class_is_looked_up_once():
    """P3: PySpark names the class and the method anew for each column."""
    client = Asked()
    java = view(client)
    for _ in range(2):
        assert callable(getattr(java, "org.lake.functions").col)
    assert client.names == ["org.lake.functions", "org.lake.functions.col"]


def test_a_class_that_is_not_there_yet_is_looked_up_again():
    """I1: a jar may be added while the session lives."""
    client = Asked()
    java = view(client)
    for _ in range(2):
        assert not isinstance(java.org.lake.Later, type)
    assert client.names == ["org", "org.lake", "org.lake.Later", "org.lake.Later"]


class Listing:
    """As much of py4j's client as an iterator of Java's needs: two files, then an error."""

    def __init__(self, answers: list[str]) -> None:
        self.gateway_property = self
        self.pool = self.converters = None
        self.auto_field = self.enable_memory_management = False
        self.address, self.port = "localhost", 0
        self.answers = iter(answers)

    def send_command(self, command: str) -> str:
        method = command.splitlines()[2]
        return "ybtrue" if method == "hasNext" else next(self.answers)

    def garbage_collect_object(self, target_id: str) -> None:
        """Nothing is kept."""


def test_an_error_within_an_iterator_is_no_end_of_it():
    """O3: a listing that breaks off would pass for a shorter one."""
    files = get_return_value("ygo7", Listing(["ysa.parquet", "ysb.parquet", "xno such bucket"]))
    assert [next(files), next(files)] == ["a.parquet", "b.parquet"]
    with pytest.raises(Py4JError):
        next(files)
