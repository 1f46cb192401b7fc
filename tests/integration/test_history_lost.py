"""Every way in which a source can lose what the lake still needs: one behaviour for all of them.

The run ends with exit code 3, says what is lost and what to do; nothing is skipped, and nothing is
healed in silence by running once more. `docs/guides/history-lost.md` has the same list.
"""

import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from confluent_kafka import Consumer, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from icestream.samples.postgres import EmbeddedPostgres
from tests.integration import test_cockroachdb_topics as feeds
from tests.integration import test_postgres_history as restored
from tests.integration import test_search as searches
from tests.integration.pipelines import Document, Shell, assert_refused, document
from tests.integration.postgres_world import World, administrator
from tests.integration.searching import Search
from tests.integration.topics import Topics, created
from tests.lake import Lake
from tests.oracle import RandomFeed
from tests.servers import KafkaBroker, wait_until

OPERATOR = 3
SECONDS_MAX = 60.0
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "history-lost.md"


@dataclass(frozen=True, kw_only=True)
class Lost:
    """A pipeline whose source has lost something, and how to see what the destination holds."""

    pipelines: Document
    held: Callable[[], Any]


@dataclass(frozen=True, kw_only=True)
class Loss:
    """A way to lose history: what is said then, and what makes it so, in a world of its own."""

    said: str
    world: str
    lose: Callable[..., Lost]


@pytest.fixture
def feed_topics(topics: Topics) -> feeds.World:
    """Topics that a changefeed writes to."""
    return feeds.World(topics)


search = searches.search


@dataclass(frozen=True)
class Folder:
    """A folder that a changefeed writes to, and a lake."""

    feed: RandomFeed
    lake: Lake
    pipelines: Document

    def lost(self) -> Lost:
        """What the lake has, whatever became of the folder."""
        return Lost(pipelines=self.pipelines, held=lambda: self.lake.epochs("shop.orders"))

    def markers(self) -> list[Path]:
        """All markers, oldest first."""
        return sorted(self.feed.folder.path.rglob("*.RESOLVED"))

    def files(self) -> list[Path]:
        """All data files, in the order of their numbers."""
        found = self.feed.folder.path.rglob("*.ndjson")
        return sorted(found, key=lambda path: path.name.split("-")[4])


@pytest.fixture
def folder(shell: Shell, local: Lake, embedded: dict[str, str], tmp_path: Path) -> Folder:
    """A folder whose first epoch is committed."""
    feed = RandomFeed.create(tmp_path / "feed", 61)
    feed.epoch(5)
    pipelines = document(feed.folder.path, embedded)
    assert shell.run(pipelines).code == 0
    return Folder(feed, local, pipelines)


# PostgreSQL


def copied(world: World) -> None:
    """One table in the lake, and a change that is not there yet."""
    world.sql("create table one(id int primary key, v text)", "insert into one values (1, 'a')")
    world.run(["public.one"])
    world.sql("insert into one values (2, 'b')")
    wait_until(lambda: not world.slot_row("active"), 60, "the server notices the run's end")


def lost_postgres(world: World, **options: Any) -> Lost:
    pipelines = world.document(["public.one"], **options)
    return Lost(pipelines=pipelines, held=lambda: world.lake_rows("one", "id, v"))


def slot_dropped(world: World) -> Lost:
    copied(world)
    world.sql(f"select pg_drop_replication_slot('{world.slot}')")
    return lost_postgres(world)


def slot_moved_on(world: World) -> Lost:
    copied(world)
    world.sql(f"select pg_replication_slot_advance('{world.slot}', pg_current_wal_insert_lsn())")
    return lost_postgres(world)


def slot_invalidated(world: World) -> Lost:
    copied(world)
    try:
        world.sql("alter system set max_slot_wal_keep_size = '1MB'", "select pg_reload_conf()")

        def lost() -> bool:
            world.sql("select pg_logical_emit_message(false, 'x', repeat('x', 9000000))")
            world.sql("select pg_switch_wal()", "checkpoint")
            return bool(world.slot_row("wal_status") == "lost")

        wait_until(lost, 60, "the slot is lost")
    finally:
        world.sql("alter system reset max_slot_wal_keep_size", "select pg_reload_conf()")
    return lost_postgres(world)


def table_made_anew(world: World) -> Lost:
    copied(world)
    world.sql("drop table one", "create table one(id int primary key, v text)")
    return lost_postgres(world)


@pytest.fixture
def two_servers(
    world: World, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[World, EmbeddedPostgres]]:
    """A database that is followed, and another server."""
    with EmbeddedPostgres(tmp_path_factory.mktemp("other")) as other:
        with administrator(other) as admin:
            admin.run("create table one(id int primary key, v text)")
        yield world, other


# A server of the test's own, whose data may be replaced.
own = restored.own


def server_restored(world: World) -> Lost:
    copied(world)
    restored.stop(world)
    with TemporaryDirectory() as folder:
        restored.copied(world, Path(folder) / "copy")
        world.server.start()
        world.sql("insert into one select n, 'gone' from generate_series(10, 5000) n")
        world.run(["public.one"])
        restored.stop(world)
        restored.put_back(world, Path(folder) / "copy", promoted=False)
    world.sql("insert into one values (3, 'c')")
    return lost_postgres(world)


def publication_left_a_table_out(world: World) -> Lost:
    copied(world)
    publication = f'"icestream_{world.name}"'
    world.sql(
        f"alter publication {publication} drop table one",
        "insert into one values (3, 'c')",
        f"alter publication {publication} add table one",
    )
    return lost_postgres(world)


def another_server(servers: tuple[World, EmbeddedPostgres]) -> Lost:
    world, other = servers
    copied(world)
    return lost_postgres(world, dsn=other.dsn)


# Kafka


def read_topic(topics: Topics) -> str:
    """A topic of which ten records are in the lake, and ten are not."""
    name = topics.create("orders")
    topics.send("orders", [created(n, v=n) for n in range(10)])
    topics.run(topic_document(topics))
    topics.send("orders", [created(n, v=n) for n in range(10, 20)])
    return name


def topic_document(topics: Topics) -> Document:
    return topics.document({"topics": ["orders"], "value": {"envelope": "debezium"}})


def lost_topic(topics: Topics) -> Lost:
    return Lost(pipelines=topic_document(topics), held=lambda: topics.rows("orders", "id"))


def truncate(broker: KafkaBroker, topic: str, before: int) -> None:
    """Remove records as retention does."""
    admin = AdminClient({"bootstrap.servers": broker.bootstrap_servers})
    for answer in admin.delete_records([TopicPartition(topic, 0, before)]).values():
        answer.result(30)


def retention_passed(topics: Topics) -> Lost:
    truncate(topics.broker, read_topic(topics), 15)
    return lost_topic(topics)


def topic_made_anew(topics: Topics) -> Lost:
    topics.broker.delete_topic(read_topic(topics))
    topics.create("orders")
    topics.send("orders", [created(n, v=n) for n in range(30, 50)])
    return lost_topic(topics)


@contextmanager
def set_back(broker: KafkaBroker, topic: str) -> Iterator[None]:
    """Let the broker have the records of a partition that it has now, and no others, afterwards.

    So it is when a replica becomes the leader that had not received all of them, or when a disk is
    restored: the topic keeps its id.
    """
    log = broker.folder / "data" / f"{topic}-0"
    with TemporaryDirectory() as folder:
        broker.stop()
        shutil.copytree(log, f"{folder}/log")
        broker.start()
        yield
        broker.stop()
        shutil.rmtree(log)
        shutil.copytree(f"{folder}/log", log)
        broker.start()
        # A broker that has just begun may not know yet what it leads.
        wait_until(lambda: _is_led(broker, topic), SECONDS_MAX, f"a leader of {topic}")


def _is_led(broker: KafkaBroker, topic: str) -> bool:
    consumer = Consumer({"bootstrap.servers": broker.bootstrap_servers, "group.id": "looks"})
    try:
        consumer.get_watermark_offsets(TopicPartition(topic, 0), timeout=10.0)
    except KafkaException:
        return False
    finally:
        consumer.close()
    return True


def topic_set_back(topics: Topics) -> Lost:
    name = topics.create("orders")
    topics.send("orders", [created(n, v=n) for n in range(5)])
    with set_back(topics.broker, name):
        topics.send("orders", [created(n, v=n) for n in range(5, 10)])
        topics.run(topic_document(topics))
    topics.send("orders", [created(n, v=n) for n in range(20, 23)])
    return lost_topic(topics)


# CockroachDB


def files_removed_with_markers(folder: Folder) -> Lost:
    folder.feed.epoch(5)
    for path in (*folder.files(), *folder.markers()):
        path.unlink()
    folder.feed.epoch(5)
    return folder.lost()


def one_file_removed(folder: Folder) -> Lost:
    folder.feed.epoch(5)
    gone = folder.files()[-1]
    folder.feed.epoch(5)
    gone.unlink()
    return folder.lost()


def markers_removed(folder: Folder) -> Lost:
    folder.feed.epoch(5)
    folder.markers()[0].unlink()
    return folder.lost()


def feed_read(world: feeds.World) -> None:
    """A changefeed's topic, of which the first timestamp is in the lake and the next is not."""
    world.create("t", 1)
    world.feed.row("t", feeds.row(1, feeds.at(1), v=1))
    world.feed.resolve(feeds.at(2))
    world.run()
    world.feed.row("t", feeds.row(1, feeds.at(3), v=3))
    world.feed.resolve(feeds.at(4))
    world.flush()


def lost_feed(world: feeds.World) -> Lost:
    return Lost(pipelines=world.document(), held=lambda: world.topics.rows("t", "id"))


def feed_retention_passed(world: feeds.World) -> Lost:
    feed_read(world)
    truncate(world.topics.broker, world.topics.name("t"), 3)
    return lost_feed(world)


def feed_set_back(world: feeds.World) -> Lost:
    world.create("t", 1)
    world.feed.row("t", feeds.row(1, feeds.at(1), v=1))
    world.feed.resolve(feeds.at(2))
    world.flush()
    with set_back(world.topics.broker, world.topics.name("t")):
        world.feed.row("t", feeds.row(1, feeds.at(3), v=3))
        world.feed.row("t", feeds.row(2, feeds.at(3), v=3))
        world.feed.resolve(feeds.at(4))
        world.run()
    return lost_feed(world)


def feed_made_anew(world: feeds.World) -> Lost:
    feed_read(world)
    world.topics.broker.delete_topic(world.topics.name("t"))
    world.topics.create("t", 1)
    world.feed.resolve(feeds.at(6))
    world.flush()
    return lost_feed(world)


# Iceberg


def harmed(harm: Callable[[Search], None]) -> Callable[[Search], Lost]:
    def lose(search: Search) -> Lost:
        search.create()
        search.insert(1)
        search.insert(2)
        search.run()
        harm(search)

        def held() -> Any:
            return search.positions(), search.documents() if search.exists() else {}

        return Lost(pipelines=search.document(), held=held)

    return lose


SLOT = "PostgreSQL no longer has the changes that follow"
TOPIC = "was deleted and created anew"
OFFSET = "no longer has offset"
END = "where it was read up to"
REMOVED = "were removed from"
LOSSES: Mapping[str, Loss] = {
    "postgres: slot dropped": Loss(said=SLOT, world="world", lose=slot_dropped),
    "postgres: slot moved on by others": Loss(said=SLOT, world="world", lose=slot_moved_on),
    "postgres: slot invalidated": Loss(said=SLOT, world="world", lose=slot_invalidated),
    "postgres: table made anew": Loss(
        said="was dropped and created anew at the source", world="world", lose=table_made_anew
    ),
    "postgres: another server": Loss(
        said="another PostgreSQL answers at", world="two_servers", lose=another_server
    ),
    "postgres: server restored": Loss(
        said="restored from an older copy", world="own", lose=server_restored
    ),
    "postgres: table left out of the publication": Loss(
        said="may have left out changes of", world="world", lose=publication_left_a_table_out
    ),
    "kafka: retention passed": Loss(said=OFFSET, world="topics", lose=retention_passed),
    "kafka: topic made anew": Loss(said=TOPIC, world="topics", lose=topic_made_anew),
    "kafka: partition set back": Loss(said=END, world="topics", lose=topic_set_back),
    "cockroachdb files: files and markers removed": Loss(
        said=REMOVED, world="folder", lose=files_removed_with_markers
    ),
    "cockroachdb files: one file removed": Loss(
        said=REMOVED, world="folder", lose=one_file_removed
    ),
    "cockroachdb files: markers removed": Loss(said=REMOVED, world="folder", lose=markers_removed),
    "cockroachdb kafka: retention passed": Loss(
        said=OFFSET, world="feed_topics", lose=feed_retention_passed
    ),
    "cockroachdb kafka: topic made anew": Loss(
        said=TOPIC, world="feed_topics", lose=feed_made_anew
    ),
    "cockroachdb kafka: partition set back": Loss(
        said=END, world="feed_topics", lose=feed_set_back
    ),
    "iceberg: snapshots expired": Loss(
        said="has been expired", world="search", lose=harmed(searches.expired)
    ),
    "iceberg: table rolled back": Loss(
        said="was rolled back", world="search", lose=harmed(searches.rolled_back)
    ),
    "iceberg: table made anew": Loss(
        said="was dropped and created anew", world="search", lose=harmed(searches.made_anew)
    ),
    "iceberg: table replaced": Loss(
        said="was rolled back", world="search", lose=harmed(searches.replaced)
    ),
}


@pytest.mark.parametrize("way", LOSSES)
def test_lost_history_is_said_and_left_to_a_person(
    way: str, shell: Shell, request: pytest.FixtureRequest
) -> None:
    """E7, C8, O6: exit code 3, a message and a hint; no row comes, not by trying again either."""
    loss = LOSSES[way]
    lost = loss.lose(request.getfixturevalue(loss.world))
    before = lost.held()
    for _ in range(2):
        assert_refused(shell.run(lost.pipelines), OPERATOR, loss.said, "hint: ")
        assert lost.held() == before


def test_the_guide_lists_every_way() -> None:
    """E7, U9: what is lost, what is said; the guide and the suite have the same list."""
    rows = re.findall(r"^\| `([^`]+)` \| [^|]+ \| `([^`]+)` \|", GUIDE.read_text(), re.MULTILINE)
    told = dict(rows)
    assert told.keys() == LOSSES.keys()
    for way, loss in LOSSES.items():
        assert loss.said in told[way]


def test_an_accepted_loss_goes_on(folder: Folder, shell: Shell) -> None:
    """Mend b6, C8: the way out that the hint names; later rows come, those that are lost do not."""
    lost = files_removed_with_markers(folder)
    answer = shell.run(lost.pipelines)
    assert_refused(answer, OPERATOR, REMOVED)
    found = re.search(r"accept_lost_after: ([0-9.]+)`", answer.err)
    assert found is not None
    source = lost.pipelines["feed"]["source"]["cockroachdb"]
    source["accept_lost_after"] = found[1]
    assert shell.run(lost.pipelines).code == 0
    assert len(lost.held()) == 2
