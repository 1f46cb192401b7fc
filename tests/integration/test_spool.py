"""A change stream that is spooled in an object store: the same rows, and nothing is left behind."""

import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.fs as pafs
import pytest

from icestream.errors import ConfigInvalid, SourceUnavailable
from icestream.pipeline import Pipeline
from icestream.sources.spool import Probe, refuse_unreachable
from icestream.sources.spool.local import LocalSpool
from icestream.sources.spool.storage import StorageSpool
from tests.faults.crashing import crashes
from tests.integration.pipelines import Shell, give_up_soon
from tests.integration.postgres_world import World
from tests.servers import S3Server

ONE = ["public.one"]
HELD_UP_SECONDS = 2.0


class Place:
    """A folder of the test's own in the bucket of the S3 server."""

    def __init__(self, store: S3Server, name: str):
        self.where = f"s3://lake/spools/{name}"
        self.storage = store.iceberg_properties()
        self._files = pafs.S3FileSystem(**store.arrow_options())

    @property
    def options(self) -> dict[str, Any]:
        """What the source is given."""
        return {"spool": self.where, "spool_storage": self.storage}

    def objects(self) -> list[str]:
        """All that is there."""
        beneath = pafs.FileSelector(
            self.where.removeprefix("s3://"), allow_not_found=True, recursive=True
        )
        found = self._files.get_file_info(beneath)
        return sorted(each.path for each in found if each.type == pafs.FileType.File)

    def runs(self) -> list[str]:
        """The places of runs, whether or not anything is in them."""
        beneath = pafs.FileSelector(
            self.where.removeprefix("s3://"), allow_not_found=True, recursive=True
        )
        found = [each.path for each in self._files.get_file_info(beneath)]
        # Below the place come the stream, the run and its files.
        depth = self.where.removeprefix("s3://").count("/") + 2
        return [path for path in found if path.count("/") == depth]

    def remove(self) -> int:
        """Remove all that is there; tells how much that was."""
        found = self.objects()
        for path in found:
            self._files.delete_file(path)
        return len(found)


@pytest.fixture
def place(store: S3Server, world: World) -> Iterator[Place]:
    """A spool in the store, and a table that was copied."""
    place = Place(store, world.name)
    world.sql("create table one(id int primary key, v text)", "insert into one values (1, 'a')")
    world.run(ONE, **place.options)
    yield place
    place.remove()


def watched(pipeline: Pipeline, look: Any) -> None:
    """Have a look before each epoch with splits is written."""
    write = pipeline._write_epoch

    def write_later(splits, *rest):  # type: ignore[no-untyped-def]
        if splits:
            look()
        return write(splits, *rest)

    # What is in the store at that moment, no client can see.
    pipeline._write_epoch = write_later  # type: ignore[method-assign]


@pytest.mark.spark_jobs
def test_changes_lie_in_an_object_store_until_they_are_durable(world: World, place: Place):
    """P5, U7: workers read them there, and nothing stays."""
    world.sql("insert into one select g, 'v' || g from generate_series(2, 5000) g")
    world.sql("update one set v = 'w' where id % 7 = 0", "delete from one where id % 11 = 0")
    pipeline, seen = world.open(world.document(ONE, **place.options)), []
    watched(pipeline, lambda: seen.append(place.objects()))
    pipeline.run(once=True)
    assert any(seen)
    assert place.objects() == [] == place.runs()
    assert len(world.assert_equal("one", "id, v")) == 4546


def test_what_a_killed_run_left_in_a_store_goes_with_the_next(
    world: World, place: Place, shell: Shell
):
    """P10: `check` names it and leaves it there; another pipeline's spool is not touched."""
    world.sql("insert into one values (2, 'b')")
    document = world.document(ONE, **place.options)
    pipeline = world.open(document)
    assert crashes(pipeline, "before-publish=crash")
    # The system ends the sessions of a process that is killed.
    for number in world.backends():
        world.sql(f"select pg_terminate_backend({number}, 60000)")
    (left,) = place.objects()
    stranger = StorageSpool(place.where, place.storage, f"{world.name}-2", "a stream")
    with stranger.create()[1] as file:
        file.write(b"rows of it")
    checked = shell("check", shell.write(document))
    assert checked.code == 0
    assert f"{left.rpartition('/')[0]} holds changes of another run" in checked.err
    assert len(place.objects()) == 2
    world.run(ONE, **place.options)
    (kept,) = place.objects()
    assert kept != left
    assert place.runs() == [kept.rpartition("/")[0]]
    assert world.assert_equal("one", "id, v") == [(1, "a"), (2, "b")]


def test_objects_that_someone_removed_are_read_from_the_source_again(world: World, place: Place):
    """E13: the epoch waits for them, and nothing is missing."""
    world.sql("insert into one values (2, 'b')")
    pipeline, removed = world.open(world.document(ONE, **place.options)), []
    watched(pipeline, lambda: None if removed else removed.append(place.remove()))
    pipeline.run(once=True)
    assert removed[0] > 0
    assert world.assert_equal("one", "id, v") == [(1, "a"), (2, "b")]


def test_objects_that_are_cut_short_are_read_from_the_source_again(
    world: World, place: Place, store: S3Server
):
    """E13: an object that is no whole file is as good as none."""
    world.sql("insert into one values (2, 'b')")
    pipeline, cut = world.open(world.document(ONE, **place.options)), []
    files = pafs.S3FileSystem(**store.arrow_options())

    def cut_short() -> None:
        for path in place.objects() if not cut else []:
            content = files.open_input_file(path).read()
            with files.open_output_stream(path) as file:
                file.write(content[: len(content) // 2])
            cut.append(path)

    watched(pipeline, cut_short)
    pipeline.run(once=True)
    assert cut
    assert world.assert_equal("one", "id, v") == [(1, "a"), (2, "b")]


def test_a_store_that_is_slow_holds_the_writer_up_and_fills_no_memory(
    place: Place, store: S3Server
):
    """E14, P5: what the store has not taken is not taken from the server either."""
    spool = StorageSpool(place.where, place.storage, "slow", "a stream")
    piece, written = b"x" * 16 * 1024**2, list[int]()
    path, file = spool.create()

    def write() -> None:
        with file:
            for number in range(20):
                file.write(piece)
                written.append(number)

    writer = threading.Thread(target=write, daemon=True)
    with store.held_up():
        writer.start()
        writer.join(HELD_UP_SECONDS)
        assert len(written) < 5
    writer.join(60)
    assert len(written) == 20
    assert spool.left() == []
    spool.remove(path)
    assert place.objects() == []


@pytest.mark.parametrize(
    "wrong", [{"spool": "s3://nowhere/spools"}, {"spool_storage": {"s3.secret-access-key": "no"}}]
)
def test_a_store_that_refuses_is_told_with_the_place(
    world: World, place: Place, wrong: Any, shell: Shell, monkeypatch: pytest.MonkeyPatch
):
    """E13, P10: it may be right later, so that a run waits; `check` says it at once."""
    give_up_soon(monkeypatch)
    storage = {**place.storage, **wrong.get("spool_storage", {})}
    options = {**place.options, **wrong, "spool_storage": storage}
    world.sql("insert into one values (2, 'b')")
    with pytest.raises(SourceUnavailable, match="could not write the spool in s3://") as refused:
        world.run(ONE, **options)
    assert "`spool`" in str(refused.value.hint)
    checked = shell("check", shell.write(world.document(ONE, **options)))
    assert checked.code != 0 and "could not write the spool in s3://" in checked.err
    assert "keys in `spool_storage`" in checked.err and "could not remove" not in checked.err
    world.run(ONE, **place.options)
    assert world.assert_equal("one", "id, v") == [(1, "a"), (2, "b")]


@pytest.mark.parametrize("where", ["ftp://lake/spools", "s3://", "s3:///lake", "s3://lake//spools"])
def test_a_place_that_cannot_be_is_refused(world: World, place: Place, where: str, shell: Shell):
    """P10: what is known is named."""
    document = world.document(ONE, spool=where)
    for answer in (shell("check", shell.write(document)), shell.run(document)):
        assert answer.code == 2
        assert f"there is no spool in {where}" in answer.err and "s3://" in answer.err


def test_a_place_where_nothing_can_be_removed_is_told_once(
    place: Place, caplog: pytest.LogCaptureFixture
):
    """P10: rows of the source would stay there, and nobody would know."""
    spool = StorageSpool(place.where, place.storage, "shop", "a stream")

    class Refusing:
        """A store that lets its users write and not remove."""

        def delete_file(self, path: str) -> None:
            raise PermissionError(f"AccessDenied {path}")

        delete_dir = delete_file

    spool.create()[1].close()
    # The test's server knows no such policy.
    spool._files = Refusing()
    spool.remove(f"{spool.where}/one")
    spool.close()
    (said,) = [each.getMessage() for each in caplog.records]
    assert f"could not remove {spool.where}/one, which may hold rows" in said


def test_workers_that_do_not_reach_the_spool_are_noticed_before_an_epoch_is(tmp_path: Path):
    """U7: a folder of the coordinator's own is no place for workers on other machines."""

    def elsewhere(probes: list[Probe]) -> list[str]:
        return [replace(each, path=f"{each.path}.of-another-machine").run() for each in probes]

    spool = LocalSpool(str(tmp_path), "shop")
    with pytest.raises(ConfigInvalid, match="workers cannot read the spool in") as refused:
        refuse_unreachable(spool, elsewhere, 2)  # type: ignore[arg-type]
    assert "s3://bucket/folder" in str(refused.value.hint)
    refuse_unreachable(spool, lambda probes: [each.run() for each in probes], 2)
    assert [path.name for path in spool.folder.iterdir()] == ["lock"]
    spool.close()
