"""The Spark session: a JVM on any machine, Iceberg's jars by their coordinates, tasks over splits.

Spark's Python workers run under the same interpreter as the coordinator. How a machine without Java
is served, `icestream.java` tells.
"""

import logging
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import reduce
from operator import add, and_, or_
from pathlib import Path
from typing import Any

import pyarrow as pa
from py4j.java_gateway import JavaClass
from py4j.protocol import Py4JJavaError
from pyspark import SparkConf, SparkContext, TaskContext
from pyspark.errors import (
    AnalysisException,
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    IllegalArgumentException,
    NumberFormatException,
    PySparkException,
    PythonException,
    SparkRuntimeException,
)
from pyspark.logger import PySparkLogger
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql.classic.column import Column as ClassicColumn
from pyspark.sql.functions import (
    broadcast,
    char_length,
    coalesce,
    col,
    count,
    expr,
    lit,
    octet_length,
    struct,
    to_json,
)
from pyspark.sql.functions import sum as sum_of
from pyspark.sql.types import BinaryType, StringType, StructField, StructType

from icestream.class_archive import ClassArchive
from icestream.errors import ConfigInvalid, DataRejected, SparkFailed
from icestream.java import cache_folder, jars, java_home, quiet_java, write_atomically
from icestream.java_calls import make_calls_cheap
from icestream.report import Row

# Rows that are looked up pass through the coordinator and the closures of tasks: so many bytes of
# them at most, and fewer rows than this are not measured before.
LOOKED_UP_BYTES_MAX = 256 * 1024 * 1024
MEASURED_ROWS_MIN = 64

log = logging.getLogger(__name__)

ICEBERG_VERSION = "1.12.0"
ICEBERG_RUNTIME = f"org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:{ICEBERG_VERSION}"
SQLITE = "org.xerial:sqlite-jdbc:3.50.3.0"
# Spark gives up a local task at its first failure; on a cluster it tries four times.
TASK_ATTEMPTS_MAX = 4
_BUNDLES = {
    ("s3:", "s3a:", "glue"): f"org.apache.iceberg:iceberg-aws-bundle:{ICEBERG_VERSION}",
    ("gs:",): f"org.apache.iceberg:iceberg-gcp-bundle:{ICEBERG_VERSION}",
    ("abfs:", "abfss:", "wasb:"): f"org.apache.iceberg:iceberg-azure-bundle:{ICEBERG_VERSION}",
}

_JAVA_OPTIONS = "spark.driver.defaultJavaOptions"
# The program that starts Java first, and then Python, leaves this behind.
_SUBMITTED = "PYSPARK_GATEWAY_PORT"
_EXTENSIONS = "spark.sql.extensions"
_ICEBERG_EXTENSIONS = "org.apache.iceberg.spark.extensions.IcebergSparkSessionExtensions"
_DEFAULTS = {
    _EXTENSIONS: _ICEBERG_EXTENSIONS,
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.shuffle.partitions": "8",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.execution.arrow.maxBytesPerBatch": str(64 * 1024 * 1024),
    "spark.python.daemon.module": "icestream.preloaded",
    # Iceberg keeps deletes by the types of their first reader: when a key has become a bigint, a
    # session that has read the table before would see its deleted rows again.
    "spark.sql.iceberg.executor-cache.delete-files.enabled": "false",
    # The place in our code that made a column, for messages: ten calls of Java for each column.
    "spark.python.sql.dataFrameDebugging.enabled": "false",
}
_TRIED_AGAIN = "Look at the Spark log; the epoch will be tried again."
ROW_SCHEMA = "kind string, bucket int, payload binary"
# What expressions raise on values, as exceptions of their own or in the words of a failed job.
_EXPRESSION_ERRORS = (
    ArithmeticException,
    ArrayIndexOutOfBoundsException,
    DateTimeException,
    IllegalArgumentException,
    NumberFormatException,
    SparkRuntimeException,
)
_EXPRESSION_ERROR = re.compile(
    r"org\.apache\.spark\.Spark(?:Arithmetic|ArrayIndexOutOfBounds|DateTime|IllegalArgument|"
    r"NumberFormat|Runtime)Exception: \[([A-Z_.0-9]+)\]"
)
# Where it is not told how much to log, Spark says at every start how that is done.
_LOG_SETTINGS = """\
rootLogger.level = error
rootLogger.appenderRef.stderr.ref = stderr
appender.stderr.type = Console
appender.stderr.name = stderr
appender.stderr.target = SYSTEM_ERR
appender.stderr.layout.type = PatternLayout
appender.stderr.layout.pattern = %d %p %c{1}: %m%n
logger.gateway.name = org.apache.spark.api.python.PythonGatewayServer
logger.gateway.level = error
"""
# Loggers that quote a value which an expression fails on.
_INDISCREET = ("SQLQueryContextLogger", "DataFrameQueryContextLogger")
_ARROW_SCHEMA = pa.schema([("kind", pa.string()), ("bucket", pa.int32()), ("payload", pa.binary())])


def packages(catalogs: Sequence[Mapping[str, str]]) -> list[str]:
    """The coordinates of the jars that these catalogs and their storages need."""
    coordinates = [ICEBERG_RUNTIME]
    for properties in catalogs:
        words = " ".join(str(value).lower() for value in properties.values())
        if "jdbc:sqlite:" in words:
            coordinates.append(SQLITE)
        for marks, bundle in _BUNDLES.items():
            if any(mark in words for mark in marks) or any(
                name.startswith("s3.") and "aws-bundle" in bundle for name in properties
            ):
                coordinates.append(bundle)
    return list(dict.fromkeys(coordinates))


def session(
    catalogs: Sequence[Mapping[str, str]], master: str = "", conf: Mapping[str, str] = {}
) -> SparkSession:
    """A session with what the catalogs need; settings in `conf` win over the defaults.

    Without a `master` it is the one that spark-submit was told, or else this machine. What
    spark-submit was told wins over the defaults, too.
    """
    for name in _INDISCREET:
        PySparkLogger.getLogger(name).disabled = True
    given = {str(name): str(value) for name, value in conf.items()}
    submitted = _SUBMITTED in os.environ
    master = master or given.pop("spark.master", "") or ("" if submitted else "local[*]")
    os.environ["PYSPARK_PYTHON"] = _workers_python(master, given)
    os.environ["PYSPARK_DRIVER_PYTHON"] = sys.executable
    if submitted:
        spark = _started({**_unless_told(), **given}, master)
        _refuse_without_iceberg(spark, catalogs)
    else:
        home = java_home()
        settings = {**_at_start(home, catalogs, given), **_DEFAULTS, **_local_settings(master)}
        os.environ["JAVA_HOME"] = str(quiet_java(home))
        try:
            spark = _started({**settings, **given}, master)
        finally:
            os.environ["JAVA_HOME"] = str(home)
    make_calls_cheap(spark._jvm)
    return spark


def _started(settings: Mapping[str, str], master: str) -> SparkSession:
    builder = SparkSession.builder.appName("icestream")
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        return (builder.master(_with_retries(master)) if master else builder).getOrCreate()
    except (PySparkException, RuntimeError, OSError) as error:
        raise SparkFailed(
            "could not start Spark",
            detail=str(error).splitlines()[0],
            hint="Check `spark.master`, and that the jars' registry can be reached.",
        ) from error


def _at_start(
    home: Path, catalogs: Sequence[Mapping[str, str]], given: dict[str, str]
) -> dict[str, str]:
    """What Java must be told when it starts; options of Java's leave the given settings."""
    needed = jars(packages(catalogs))
    options = [f'"{each}"' for each in (*_quiet(), *ClassArchive(home, needed).options())]
    return {
        "spark.jars": ",".join(map(str, needed)),
        # Classes come from the archive only if their jars are on the path from the start.
        "spark.driver.extraClassPath": os.pathsep.join(map(str, needed)),
        _JAVA_OPTIONS: " ".join([*options, given.pop(_JAVA_OPTIONS, "")]),
    }


def _workers_python(master: str, given: Mapping[str, str]) -> str:
    """The interpreter of workers: on this machine this one, elsewhere what a user names.

    Spark itself would take whichever `python3` comes first on the path.
    """
    if master.startswith("local"):
        return sys.executable
    named = given.get("spark.pyspark.python") or os.environ.get("PYSPARK_PYTHON")
    return named or sys.executable


def _unless_told() -> dict[str, str]:
    """The defaults of settings that spark-submit was not told, and Iceberg's extensions."""
    SparkContext._ensure_initialized()
    told = dict(SparkConf().getAll())
    settings = {name: value for name, value in _DEFAULTS.items() if name not in told}
    extensions = told.get(_EXTENSIONS, "")
    if _ICEBERG_EXTENSIONS not in extensions:
        settings[_EXTENSIONS] = ",".join(filter(None, [extensions, _ICEBERG_EXTENSIONS]))
    return settings


def _refuse_without_iceberg(spark: SparkSession, catalogs: Sequence[Mapping[str, str]]) -> None:
    """Spark-submit decides which jars there are: none can be added to a Java that runs."""
    if not isinstance(_java_class(spark, "org.apache.iceberg.spark.SparkCatalog"), JavaClass):
        raise ConfigInvalid(
            "spark-submit was not given Iceberg's jars",
            hint=f"Start it with `--packages {','.join(packages(catalogs))}`.",
        )


def _local_settings(master: str) -> dict[str, str]:
    if not master.startswith("local"):
        return {}
    # A laptop's host name may resolve to an address that firewalls drop.
    return {"spark.driver.host": "127.0.0.1", "spark.driver.bindAddress": "127.0.0.1"}


def _with_retries(master: str) -> str:
    local = re.fullmatch(r"local(?:\[([^,\]]+)\])?", master.strip())
    return f"local[{local[1] or 1},{TASK_ATTEMPTS_MAX}]" if local else master


def _quiet() -> list[str]:
    """Options of the JVM that have Spark log errors only, on stderr, unless a user has settings.

    Spark puts the folder of its settings before the jars. Were there a file in it, Java would use
    no archive of classes; so the folder is empty, and the file has a path of its own.
    """
    empty = cache_folder() / "spark-conf"
    if os.environ.setdefault("SPARK_CONF_DIR", str(empty)) != str(empty):
        return []
    empty.mkdir(exist_ok=True)
    path = cache_folder() / "spark" / "log4j2.properties"
    if not path.exists() or path.read_text() != _LOG_SETTINGS:
        path.parent.mkdir(exist_ok=True)
        write_atomically(path, _LOG_SETTINGS)
    return [f"-Dlog4j2.configurationFile={path}"]


def class_archive(catalogs: Sequence[Mapping[str, str]]) -> ClassArchive:
    """The archive of the classes that a session with these catalogs loads."""
    return ClassArchive(java_home(), jars(packages(catalogs)))


def attach_catalog(spark: SparkSession, name: str, properties: Mapping[str, str]) -> None:
    """Let Spark SQL see a catalog under a name; every look at a table reads fresh metadata.

    A JDBC catalog keeps its tables apart by its name, so there the name must be the catalog's own.
    """
    prefix = f"spark.sql.catalog.{name}"
    spark.conf.set(prefix, "org.apache.iceberg.spark.SparkCatalog")
    spark.conf.set(f"{prefix}.cache-enabled", "false")
    for key, value in properties.items():
        if key != "name":
            spark.conf.set(f"{prefix}.{key}", value)


def run_tasks(
    spark: SparkSession,
    tasks: Sequence[Any],
    work: Callable[[Any], Iterator[Row]],
    gather: Callable[[Iterator[Row]], Iterator[Row]] | None = None,
    description: str = "",
) -> list[Row]:
    """Run `work` over the tasks on workers, in one Spark job, and return the rows that come out.

    With `gather` the rows are first brought together by their bucket: all rows of a bucket pass
    through one call, in a row. Payloads cross between Python and the JVM as they are.
    """
    if not tasks:
        return []
    context = spark.sparkContext
    context.setLocalProperty("spark.job.description", description)
    rows = task_frame(spark, tasks, lambda task: _as_batches(work(task)), ROW_SCHEMA)
    if gather is not None:

        def over_rows(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
            yield from _as_batches(gather(as_rows(batches)))

        buckets = max(1, context.defaultParallelism)
        together = rows.repartition(buckets, "bucket").sortWithinPartitions("bucket")
        rows = together.mapInArrow(over_rows, ROW_SCHEMA)
    return _collected(rows)


def task_frame(
    spark: SparkSession,
    tasks: Sequence[Any],
    work: Callable[[Any], Iterator[pa.RecordBatch]],
    schema: str | StructType,
) -> DataFrame:
    """What comes of `work` over the tasks, which are read when the frame is."""
    slices = min(len(tasks), max(1, spark.sparkContext.defaultParallelism * 4))

    def over_tasks(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        for batch in batches:
            for number in batch.column(0).to_pylist():
                yield from work(tasks[number])

    return spark.range(0, len(tasks), 1, slices).mapInArrow(over_tasks, schema)


def run_frame(
    frame: DataFrame, work: Callable[[Iterable[pa.RecordBatch]], Iterator[Row]], description: str
) -> list[Row]:
    """Run `work` over each partition of a frame, in one Spark job; returns the rows that come out.

    Each partition's batches pass through one call.
    """
    frame.sparkSession.sparkContext.setLocalProperty("spark.job.description", description)

    def over_batches(batches: Iterable[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        yield from _as_batches(work(batches))

    return _collected(frame.mapInArrow(over_batches, ROW_SCHEMA))


def _collected(rows: DataFrame) -> list[Row]:
    with as_retryable("could not run the tasks of an epoch"):
        try:
            return [(row["kind"], row["bucket"], bytes(row["payload"])) for row in rows.collect()]
        except PySparkException as error:
            if condition := _failed_expression(error):
                raise DataRejected(
                    "an expression of a transform fails on a row",
                    # Spark quotes the value that it fails on; rows are nobody's business in a log.
                    detail=f"Spark says {condition}.",
                    hint="Use a form that gives null instead, such as `try_cast`, `try_divide` or "
                    "`case when`.",
                ) from None
            raise


@contextmanager
def as_retryable(message: str, hint: str = _TRIED_AGAIN) -> Iterator[None]:
    """Turn the failure of a Spark job into `SparkFailed`: it may work later.

    A file that could not be read and a worker that was killed come as exceptions of Java's. A query
    that Spark does not understand never works.
    """
    try:
        yield
    except AnalysisException:
        raise
    except (PySparkException, Py4JJavaError) as error:
        raise SparkFailed(message, detail=_cause(error), hint=hint) from error


def stored_rows(
    spark: SparkSession,
    staged: str,
    keys: pa.Table,
    columns: Sequence[str],
    bytes_max: int = LOOKED_UP_BYTES_MAX,
) -> pa.Table:
    """The rows staged under a name whose key is one of `keys`: the key's columns, then `columns`.

    Iceberg's reader applies all deletes. The keys go to every task instead of the rows to the keys.
    Rows come into the coordinator's memory, so many of them are measured before: `DataRejected`
    when they are larger than `bytes_max`.
    """
    spark.sparkContext.setLocalProperty("spark.job.description", "stored rows")
    names = list(dict.fromkeys([*keys.column_names, *columns]))
    with as_retryable("could not read the stored rows of a table"):
        rows = spark.read.format("iceberg").option("scan-task-set-id", staged).load(staged)
        rows = rows.select(*names)
        kinds = StructType(
            [
                StructField(f"k{n}", rows.schema[name].dataType)
                for n, name in enumerate(keys.column_names)
            ]
        )
        wanted = spark.createDataFrame(keys.rename_columns(kinds.names), kinds)
        same = [rows[name].eqNullSafe(wanted[f"k{n}"]) for n, name in enumerate(keys.column_names)]
        found = rows.join(broadcast(wanted), reduce(and_, same), "left_semi")
        if keys.num_rows >= MEASURED_ROWS_MIN:
            _refuse_larger(found, bytes_max)
        return found.toArrow()


def _refuse_larger(rows: DataFrame, bytes_max: int) -> None:
    """Raise unless the rows fit into so many bytes; only their sizes leave the workers."""
    sizes = [
        octet_length(rows[field.name])
        if isinstance(field.dataType, StringType | BinaryType)
        else octet_length(to_json(struct(rows[field.name])))
        for field in rows.schema.fields
    ]
    size = reduce(add, [coalesce(each, lit(0)) for each in sizes])
    found = rows.agg(count("*"), sum_of(size)).collect()[0]
    if (found[1] or 0) > bytes_max:
        raise DataRejected(
            "the changes of an epoch leave out more values than can be looked up at once",
            detail=f"{found[0]} rows of the table would bring {found[1]} bytes into the "
            f"coordinator's memory; {bytes_max} are allowed.",
            hint="Nothing of the epoch was committed. Give the coordinator memory and raise "
            "`sink.iceberg.lookup_bytes_max`; or set a smaller `epoch_bytes_max`, if the epoch "
            "has many transactions. REPLICA IDENTITY FULL at the source has later changes send "
            "all values.",
        )


def staged_rows(
    spark: SparkSession,
    staged: str,
    columns: Mapping[str, str],
    name: str,
    spans: Sequence[tuple[str, str]],
) -> pa.Table:
    """Rows staged under a name: columns by SQL expressions, ordered by the first of them.

    `name` is a staged column of texts. A row is wanted when its text lies in one of the spans and
    is as long as the span's ends; without spans all are.
    """
    spark.sparkContext.setLocalProperty("spark.job.description", "staged rows")
    text = col(name)
    inside = [
        text.between(least, greatest) & (char_length(text) == len(least))
        for least, greatest in spans
    ]
    hint = "Look at the Spark log, and start the command again."
    with as_retryable("could not read the rows of a table", hint):
        rows = spark.read.format("iceberg").option("scan-task-set-id", staged).load(staged)
        if inside:
            rows = rows.where(reduce(or_, inside))
        wanted = [expr(text).alias(alias) for alias, text in columns.items()]
        return rows.select(*wanted).orderBy(next(iter(columns))).toArrow()


def attempt_number() -> int:
    """Which attempt of its task this worker is running, from zero."""
    context = TaskContext.get()
    return context.attemptNumber() if context else 0


def job_count(spark: SparkSession) -> int:
    """How many Spark jobs the session has finished or started."""
    return int(_context(spark)._jsc.sc().dagScheduler().nextJobId())


def _context(spark: SparkSession) -> SparkContext:
    return spark.sparkContext


def _as_batches(rows: Iterator[Row]) -> Iterator[pa.RecordBatch]:
    for kind, bucket, payload in rows:
        yield pa.record_batch([[kind], [bucket], [payload]], schema=_ARROW_SCHEMA)


def as_rows(batches: Iterable[pa.RecordBatch]) -> Iterator[Row]:
    """The rows in batches that have a kind, a bucket and a payload."""
    for batch in batches:
        kinds, buckets, payloads = (batch.column(name) for name in ("kind", "bucket", "payload"))
        for number in range(batch.num_rows):
            yield kinds[number].as_py(), buckets[number].as_py(), payloads[number].as_py()


def parsed(spark: SparkSession, text: str) -> Any:
    """What Spark's parser makes of a query: a plan in the JVM. Nothing is looked up or run."""
    with active(spark):
        return spark._jsparkSession.sessionState().sqlParser().parsePlan(text)


@contextmanager
def active(spark: SparkSession) -> Iterator[None]:
    """Let the session's settings hold in this thread.

    A session's own parser asks for those of whichever session is active, and in a thread that has
    run no query that is another one.
    """
    sessions = _java_class(spark, "org.apache.spark.sql.classic.SparkSession")
    before = sessions.getActiveSession()
    sessions.setActiveSession(spark._jsparkSession)
    try:
        yield
    finally:
        if before.isDefined():
            sessions.setActiveSession(before.get())
        else:
            sessions.clearActiveSession()


def analysed(frame: DataFrame) -> Any:
    """A frame's plan in the JVM, with everything that it names found."""
    return frame._jdf.queryExecution().analyzed()


def in_session(spark: SparkSession, frame: DataFrame) -> DataFrame:
    """A frame of another session of the same context, as one of this session."""
    jvm: Any = spark._jvm
    moved = jvm.org.apache.spark.sql.classic.Dataset.ofRows(spark._jsparkSession, analysed(frame))
    return DataFrame(moved, spark)


def as_column(spark: SparkSession, expression: Any) -> Column:
    """An expression of an analysed plan, for frames that have the columns it refers to."""
    utils = _java_class(spark, "org.apache.spark.sql.classic.ExpressionUtils")
    return ClassicColumn(utils.column(expression))


def contains(spark: SparkSession, expression: Any, pattern: str) -> bool:
    """Whether an expression of a plan has a part of a kind that Spark's planner has a name for."""
    known = _java_class(spark, "org.apache.spark.sql.catalyst.trees.TreePattern")
    return bool(expression.containsPattern(getattr(known, pattern)()))


def _java_class(spark: SparkSession, name: str) -> Any:
    """A class by its whole name: part by part, the JVM would look into all jars for each part."""
    return getattr(spark._jvm, name)


def _failed_expression(error: PySparkException) -> str | None:
    """The name of Spark's error when an expression failed on a value; None for anything else."""
    if isinstance(error, PythonException):
        return None
    if error.getCondition() and isinstance(error, _EXPRESSION_ERRORS):
        return str(error.getCondition())
    found = _EXPRESSION_ERROR.search(str(error))
    return found[1] if found else None


def _cause(error: PySparkException | Py4JJavaError) -> str:
    """What a Spark job failed of, in one line."""
    if isinstance(error, PySparkException):
        return _first_python_line(str(error))
    causes, cause = [], error.java_exception
    while cause is not None:
        causes.append(str(cause.toString()).partition("\n")[0])
        cause = cause.getCause()
    # The first says only that a job was given up.
    return "; ".join(causes[1:] or causes)


def _first_python_line(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b", line)]
    return (errors or lines or ["unknown"])[-1 if errors else 0]
