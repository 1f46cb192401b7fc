"""Names of Java's packages and classes, as they are asked for through the gateway."""

from py4j.java_gateway import JavaPackage

from icestream.iceberg.gateway import Packages

CLASSES = {"org.lake.Table"}


class Asked:
    """As much of py4j's client as looks up names; it notes them."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.gateway_property = self
        self.pool = self.converters = None

    def send_command(self, command: str) -> str:
        name = command.splitlines()[2]
        self.names.append(name)
        return f"yc{name}" if name in CLASSES else "yp"


def test_a_name_is_looked_up_once():
    """P3: the JVM looks into all its jars for each part of a name."""
    client = Asked()
    java = Packages(JavaPackage("org", client, "view"))
    first = java.lake.Table
    assert client.names == ["org.lake", "org.lake.Table"]
    assert java.lake.Table is first
    assert len(client.names) == 2


def test_a_class_that_is_not_there_yet_is_looked_up_again():
    """I1: a jar may be added while the session lives."""
    client = Asked()
    java = Packages(JavaPackage("org", client, "view"))
    for _ in range(2):
        assert isinstance(java.lake.Later, Packages)
    assert client.names == ["org.lake", "org.lake.Later", "org.lake.Later"]
