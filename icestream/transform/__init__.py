"""A select between source and sink: taken apart by Spark's own parser, applied change by change.

    select <expressions> from changes [where <condition>]

Each row of the source gives one row or none, by its own values alone, and gives the same when it is
read again. So everything that looks at other rows (joins, aggregates, windows, order, limits),
makes several rows of one (explode), looks elsewhere (subqueries) or gives something else each time
(rand, now) is refused. What that leaves of a query in Spark's analysed plan is a list of
expressions and a condition; columns are found there by identity, so no name can be mistaken.

A delete carries little more than its key. The columns of the key must therefore pass as they are,
or renamed; the other expressions and the condition are never evaluated for a delete, and the
expressions only where the condition holds.
"""

import difflib
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pyiceberg.types import IcebergType, ListType, MapType, StructType
from pyspark.errors import AnalysisException
from pyspark.sql import Column as SparkColumn
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql import types as T

from icestream.change import Op
from icestream.errors import ConfigInvalid
from icestream.schema import Column, TableShape, refuse_unknown, schema_from_json
from icestream.spark import analysed, as_column, contains, parsed
from icestream.transform.spark_schema import iceberg_type, spark_type

VIEW = "changes"
WHOLE_ROWS = f"select * from {VIEW}"
ALLOWED = f"Write `select <expressions> from {VIEW} [where <condition>]`, one row for each row."
# The columns of a frame of changes: what passes by, the place of a change, what it is; then one
# struct for each table, with the table's columns by number.
KIND, BUCKET, PAYLOAD, TASK, ROW = "kind", "bucket", "payload", "task", "row"
CHANGE_OP, CHANGE_AT, CHANGE_SEQ = "op", "at", "seq"
_HEAD = T.StructType(
    [
        T.StructField(KIND, T.StringType()),
        T.StructField(BUCKET, T.IntegerType()),
        T.StructField(PAYLOAD, T.BinaryType()),
        T.StructField(TASK, T.IntegerType()),
        T.StructField(ROW, T.LongType()),
        T.StructField(CHANGE_OP, T.ByteType()),
        T.StructField(CHANGE_AT, T.LongType()),
        T.StructField(CHANGE_SEQ, T.LongType()),
    ]
)
_KEEP = "keep"
# Settings that change what a select means. A run with others would give other rows.
_MEANING = {
    "spark.sql.ansi.enabled": "true",
    "spark.sql.caseSensitive": "false",
    "spark.sql.session.timeZone": "UTC",
    # The text that is parsed is the one that was written.
    "spark.sql.variable.substitute": "false",
}
# Texts that Spark turns into a day or a moment of the clock. It skips control characters, too.
_CLOCK_WORDS = re.compile(r"[\s\x00-\x1f\x7f-\x9f]*(now|today|tomorrow|yesterday)\b", re.IGNORECASE)
# A literal such as `date'2020-01-01'`, without comments, prefixes and escapes.
_TYPED_LITERAL = re.compile(r"""\w+\s*(['"])(?P<text>[^'"\\]*)\1""")
_MOMENTS = ("date", "time")
# What Spark calls the steps of a plan, and what a person wrote to get them; the most telling first.
_FORBIDDEN = {
    "Window": "window functions",
    "Generate": "functions that make several rows of one, such as `explode`",
    "Aggregate": "aggregates and `group by`",
    "Distinct": "`distinct`",
    "Sort": "`order by`",
    "GlobalLimit": "`limit`",
    "LocalLimit": "`limit`",
    "Offset": "`offset`",
    "Join": "joins",
    "LateralJoin": "joins",
    "AsOfJoin": "joins",
    "Union": "`union`, `except` and `intersect`",
    "Except": "`union`, `except` and `intersect`",
    "Intersect": "`union`, `except` and `intersect`",
    "UnresolvedWith": "`with`",
    "WithCTE": "`with`",
    "Sample": "`tablesample`",
    "Pivot": "`pivot`",
    "UnresolvedHaving": "aggregates and `group by`",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Derived:
    """What a select makes of a table: the shape of its rows, and where their values come from.

    `plain` has the source's column for each one that passes unchanged, `used` all that are read,
    `named` those that the select calls by name, be it to leave them out of `*`.
    """

    shape: TableShape
    plain: Mapping[str, str]
    used: frozenset[str]
    named: frozenset[str]

    def names(self) -> dict[str, str]:
        """What the source's columns that pass unchanged are called, where twice the first time."""
        return _turned(self.plain)


@dataclass(frozen=True, slots=True, kw_only=True)
class TableSelect:
    """One table's select, ready to be applied: plain data.

    `source_json` is the schema at the source, `outputs` are the columns of the result in order, of
    which `key` identify a row; `kinds` are the types that the destination has for the outputs.
    """

    table: str
    source_json: str
    outputs: Sequence[str]
    key: Sequence[str]
    kinds: Sequence[IcebergType]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """A query taken apart: its columns, their expressions in the JVM, and the condition."""

    fields: Sequence[T.StructField]
    expressions: Sequence[Any]
    condition: Any | None
    inputs: Mapping[int, int]

    def plain(self, number: int) -> int | None:
        """The place of the source's column that an expression is; None when it is more."""
        node = self.expressions[number]
        while _class(node) == "Alias":
            node = node.child()
        return self.inputs.get(node.exprId().id()) if _class(node) == "AttributeReference" else None

    def all(self) -> list[Any]:
        """Every expression, the condition among them."""
        return [*self.expressions, *([] if self.condition is None else [self.condition])]

    def used(self) -> set[int]:
        """The places of the source's columns that are read."""
        found = set()
        for expression in self.all():
            attributes = expression.references().toSeq()
            found |= {attributes.apply(n).exprId().id() for n in range(attributes.size())}
        return {self.inputs[number] for number in found if number in self.inputs}


class Selects:
    """The selects of a pipeline, by table; safe between threads."""

    def __init__(self, spark: SparkSession, texts: Mapping[str, str], of_all: str = ""):
        """`of_all` is the select of every table that has none in `texts`; empty: it has none."""
        # The view has one name for all tables and pipelines: a session of its own keeps them apart.
        self.spark = spark.newSession()
        for name, value in _MEANING.items():
            self.spark.conf.set(name, value)
        self._texts = dict(texts)
        self.of_all = of_all
        self._lock = threading.Lock()
        for table in self._texts:
            self._refuse_form(table)

    def __contains__(self, table: object) -> bool:
        return table in self._texts or bool(self.of_all)

    def _text(self, table: str) -> str:
        return self._texts.get(table, self.of_all)

    def derived(self, table: str, source: TableShape) -> Derived:
        """What the table's select makes of rows of a shape.

        Raises `ConfigInvalid` for what is not allowed, and for a key that does not survive.
        """
        fields = [T.StructField(c.name, spark_type(c.type)) for c in source.columns]
        parts = self._parts(table, self.spark.createDataFrame([], T.StructType(fields)))
        for expression in parts.all():
            self._refuse_fickle(table, expression)
        names = [field.name for field in parts.fields]
        _refuse_twins(table, names)
        plain: dict[str, Column] = {}
        columns = []
        for number, field in enumerate(parts.fields):
            place = parts.plain(number)
            if place is None:
                columns.append(Column(name=field.name, type=iceberg_type(field, table)))
                continue
            from_source = plain[field.name] = source.columns[place]
            kind, required = from_source.type, from_source.required
            columns.append(Column(name=field.name, type=kind, required=required))
        origins = {name: column.name for name, column in plain.items()}
        used = [source.columns[place] for place in parts.used()]
        refuse_unknown(table, used)
        return Derived(
            shape=TableShape(
                columns=columns,
                key=_surviving(table, source, origins),
                table_id=source.table_id,
            ),
            plain=origins,
            used=frozenset(column.name for column in used),
            named=self._named(table, [column.name for column in source.columns]),
        )

    def schema(self, selects: Sequence[TableSelect]) -> T.StructType:
        """The columns of a frame of changes, before the selects are applied."""
        structs = [
            T.StructField(struct_name(place), _numbered_struct(each))
            for place, each in enumerate(selects)
        ]
        return T.StructType([*_HEAD.fields, *structs])

    def applied(
        self, frame: DataFrame, selects: Sequence[TableSelect], identified: bool = False
    ) -> DataFrame:
        """A frame of changes with each table's struct holding the columns of its select's result.

        A change whose row does not meet the condition becomes a delete, because an earlier version
        of the row may have met it; one that is sure to be the row's first goes away. Without a key
        nothing can be deleted, unless the rows are `identified` by something else.
        """
        for place, each in enumerate(selects):
            # A whole row is as it is: thousands of tables shall not make a plan of thousands.
            if each.table in self._texts:
                frame = self._applied_one(frame, place, each, identified or bool(each.key))
        return frame

    def _applied_one(
        self, frame: DataFrame, place: int, each: TableSelect, deletable: bool
    ) -> DataFrame:
        source = F.col(struct_name(place))
        names = [field.name for field in schema_from_json(each.source_json).fields]
        fields = [source.getField(f"f{n}").alias(name) for n, name in enumerate(names)]
        before = len(frame.columns)
        shown = frame.select("*", *fields)
        # By identity and not by name: the table's columns may be called like the frame's.
        columns = self._columns(shown)
        parts = self._parts(each.table, shown.select(*columns[before:]))
        head = dict(zip(frame.columns, columns[:before], strict=True))
        own, op = head[struct_name(place)].isNotNull(), head[CHANGE_OP]
        alive = own & (op != int(Op.DELETE))
        keep = F.lit(True) if parts.condition is None else self._column(parts.condition)
        keep = F.when(alive, F.coalesce(keep, F.lit(False))).otherwise(F.lit(False))
        told = shown.select(*columns, keep.alias(_KEEP))
        kept = self._columns(told)[-1]
        stays = ~own | kept | (op != int(Op.INSERT)) if deletable else ~own | kept
        result = F.when(own, F.struct(*self._results(parts, each, kept)))
        gone = F.lit(int(Op.DELETE)).cast("tinyint")
        changed = {
            **head,
            CHANGE_OP: F.when(own & ~kept, gone).otherwise(op),
            struct_name(place): result,
        }
        return told.where(stays).select(*(c.alias(name) for name, c in changed.items()))

    def _results(
        self, parts: _Parts, each: TableSelect, kept: SparkColumn
    ) -> Iterator[SparkColumn]:
        key = set(each.key)
        for number, (field, kind) in enumerate(zip(parts.fields, each.kinds, strict=True)):
            value = self._column(parts.expressions[number])
            if field.name in key:
                key.remove(field.name)
            else:
                value = F.when(kept, value)
            wanted = None if isinstance(kind, StructType | ListType | MapType) else spark_type(kind)
            if wanted is not None and wanted != field.dataType:
                value = value.cast(wanted)
            yield value.alias(f"f{number}")

    def _columns(self, frame: DataFrame) -> list[SparkColumn]:
        attributes = analysed(frame).output()
        return [self._column(attributes.apply(n)) for n in range(attributes.size())]

    def _column(self, expression: Any) -> SparkColumn:
        return as_column(self.spark, expression)

    def _parts(self, table: str, view: DataFrame) -> _Parts:
        """The table's select over a view of its columns, analysed."""
        with self._lock:
            view.createOrReplaceTempView(VIEW)
            try:
                frame = self.spark.sql(self._text(table))
            except AnalysisException as error:
                raise _not_understood(table, error, view.columns) from error
        plan = analysed(frame)
        condition = _condition(table, plan, "View")
        attributes, expressions = analysed(view).output(), plan.projectList()
        return _Parts(
            fields=frame.schema.fields,
            expressions=[expressions.apply(n) for n in range(expressions.size())],
            condition=condition,
            inputs={attributes.apply(n).exprId().id(): n for n in range(attributes.size())},
        )

    def _named(self, table: str, columns: Sequence[str]) -> frozenset[str]:
        """The columns that the text of the table's select names, whatever `*` stands for."""
        nodes = _nodes(parsed(self.spark, self._text(table)))
        called = {VIEW, *(n.alias() for n in nodes if n.nodeName() == "SubqueryAlias")}
        qualifiers = {name.lower() for name in called}
        words: set[str] = set()
        for name in _names_in(nodes):
            first, *rest = [part.lower() for part in name]
            words |= {first, *(rest[:1] if first in qualifiers else ())}
        return frozenset(name for name in columns if name.lower() in words)

    def _refuse_form(self, table: str) -> None:
        """Look at the text alone: nothing but a select is ever handed to Spark to be analysed."""
        try:
            plan = parsed(self.spark, self._text(table))
        except AnalysisException as error:
            raise _not_understood(table, error, ()) from error
        _condition(table, plan, "UnresolvedRelation")
        relation = _nodes(plan)[-1]
        if relation.multipartIdentifier().mkString(".").lower() != VIEW:
            raise _refused(table, f"reading from anything but `{VIEW}`")
        self._refuse_unnamed(table, plan)

    def _refuse_unnamed(self, table: str, plan: Any) -> None:
        """Refuse what is not told by its name: columns that are read, and a day of the clock."""
        for step in _nodes(plan):
            for item in _items(step.expressions()):
                for each in _inside(item):
                    kind = _class(each)
                    if kind.startswith("UnresolvedStar") and each is not item:
                        raise _unnamed(table, "`*` within an expression")
                    if "UnresolvedIdentifier" in kind:
                        raise _unnamed(table, "`identifier`")
                    if _is_clock_literal(each, self._text(table)):
                        raise _fickle(table)

    def _refuse_fickle(self, table: str, expression: Any) -> None:
        if contains(self.spark, expression, "PLAN_EXPRESSION"):
            raise _refused(table, "subqueries")
        fickle = contains(self.spark, expression, "CURRENT_LIKE") or not expression.deterministic()
        nodes = list(_inside(expression))
        # Spark takes these for the same each time. The first begins with random bytes.
        fickle |= "AesEncrypt" in map(_class, nodes) or any(map(_tells_the_clock, nodes))
        if fickle:
            raise _fickle(table)


def struct_name(place: int) -> str:
    """The column of a frame of changes that holds the columns of a table."""
    return f"t{place}"


def _numbered_struct(each: TableSelect) -> T.StructType:
    fields = schema_from_json(each.source_json).fields
    return T.StructType(
        [T.StructField(f"f{n}", spark_type(field.field_type)) for n, field in enumerate(fields)]
    )


def _surviving(table: str, source: TableShape, plain: Mapping[str, str]) -> list[str]:
    """What the columns of the key are called in the result."""
    known = {column.name for column in source.columns}
    names = _turned(plain)
    for name in source.key:
        if name not in known:
            raise ConfigInvalid(
                f"column {name} of the key is not among those of table {table} at the source",
                detail=f"These are {', '.join(sorted(known))}.",
                hint="Name the key's columns as the source does.",
            )
        if name not in names:
            raise ConfigInvalid(
                f"the transform of table {table} loses column {name} of the key",
                detail="Deletes tell their key and nothing else, so it has to pass as it is.",
                hint=f"Select `{name}`, or `{name} as <another name>`, and mask other columns.",
            )
    return [names[name] for name in source.key]


def _turned(plain: Mapping[str, str]) -> dict[str, str]:
    names: dict[str, str] = {}
    for name, origin in plain.items():
        names.setdefault(origin, name)
    return names


def _refuse_twins(table: str, names: Sequence[str]) -> None:
    twins = sorted({name for name in names if names.count(name) > 1})
    if twins:
        raise ConfigInvalid(
            f"the transform of table {table} gives two columns the name {twins[0]}",
            hint="Rename one of them with `as`.",
        )


def _condition(table: str, plan: Any, leaf: str) -> Any | None:
    """The condition of a plan that is a select and nothing else, None without one."""
    nodes = _nodes(plan)
    names = [node.nodeName() for node in nodes]
    inner = [name for name in names[1:-1] if name != "SubqueryAlias"]
    if names[0] == "Project" and names[-1] == leaf and inner in ([], ["Filter"]):
        filters = [node for node, name in zip(nodes, names, strict=True) if name == "Filter"]
        # A filter below an alias is another query's.
        if not filters or names[1] == "Filter":
            return filters[0].condition() if filters else None
    told = [words for name, words in _FORBIDDEN.items() if name in names]
    otherwise = "other queries inside of it, nor expressions that use the name of another one"
    raise _refused(table, told[0] if told else otherwise)


def _nodes(plan: Any) -> list[Any]:
    """The steps of a plan from the last to the first; only the first way where it forks."""
    found = [plan]
    while found[-1].nodeName() != "View" and found[-1].children().size():
        found.append(found[-1].children().apply(0))
    return found


def _names_in(nodes: Sequence[Any]) -> Iterator[list[str]]:
    """The names in a plan that is not analysed yet, each in its parts."""
    for node in nodes:
        expressions = node.expressions()
        for number in range(expressions.size()):
            for each in _inside(expressions.apply(number)):
                kind = _class(each)
                if kind == "UnresolvedAttribute":
                    yield _texts(each.nameParts())
                elif kind.startswith("UnresolvedStar"):
                    if each.target().isDefined():
                        yield _texts(each.target().get())
                    if "Except" in kind:
                        yield from map(_texts, _items(each.excepts()))


def _texts(sequence: Any) -> list[str]:
    return [str(each) for each in _items(sequence)]


def _items(sequence: Any) -> list[Any]:
    return [sequence.apply(number) for number in range(sequence.size())]


def _inside(expression: Any) -> Iterator[Any]:
    yield expression
    if _class(expression) in ("ParseToDate", "ParseToTimestamp"):
        # `to_date` and its like become casts later.
        yield from _inside(expression.replacement())
    for number in range(expression.children().size()):
        yield from _inside(expression.children().apply(number))


def _tells_the_clock(node: Any) -> bool:
    """Whether a constant text becomes a day or a moment, and which one the clock decides."""
    if _class(node) != "Cast" or node.dataType().simpleString()[:4] not in _MOMENTS:
        return False
    child = node.child()
    if not child.foldable() or child.dataType().simpleString() != "string":
        return False
    try:
        text = str(child.eval(None))
    except Exception:
        # Spark's errors come in many classes. This constant fails for every row, and is told then.
        return False
    return bool(_CLOCK_WORDS.match(text))


def _is_clock_literal(node: Any, text: str) -> bool:
    """Whether a literal such as `date'today'` is the clock's, or so written that none can tell.

    The parser has made a day or a moment of it already: what was written stands in the text.
    """
    if _class(node) != "Literal" or node.dataType().simpleString()[:4] not in _MOMENTS:
        return False
    at = node.origin()
    written = text[at.startIndex().get() : at.stopIndex().get() + 1]
    plain = _TYPED_LITERAL.fullmatch(written)
    return plain is None or _CLOCK_WORDS.match(plain["text"]) is not None


def _class(node: Any) -> str:
    return str(node.getClass().getSimpleName())


def _refused(table: str, what: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"the transform of table {table} does more than turn rows into rows",
        detail=f"It cannot have {what}.",
        hint=ALLOWED,
    )


def _unnamed(table: str, what: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"the transform of table {table} does not say which columns it reads",
        detail=f"It has {what}: that one of them was renamed at the source would go unnoticed.",
        hint="Name the columns. A `*` may stand alone in the select list.",
    )


def _fickle(table: str) -> ConfigInvalid:
    return ConfigInvalid(
        f"the transform of table {table} gives something else each time",
        detail="An epoch that is read again must give the same rows.",
        hint="Leave out functions such as `now`, `rand`, `uuid`, `current_user` and "
        "`aes_encrypt`, and days such as 'today'; `sha2` and `hash` give the same each "
        "time. Write a day plainly, as in `date'2020-01-01'`.",
    )


def _not_understood(table: str, error: AnalysisException, names: Sequence[str]) -> ConfigInvalid:
    """Spark's words for a query that it does not understand, and the nearest column."""
    unknown = error.getMessageParameters() or {}
    wanted = unknown.get("objectName", "").strip("`").replace("`.`", ".")
    exact = {name.lower(): name for name in names}
    # What stands before a dot may be a struct, what stands after it a column of `changes`.
    spellings = [wanted, wanted.partition(".")[0], wanted.partition(".")[2]]
    near = [n for s in spellings for n in difflib.get_close_matches(s.lower(), exact, n=1)]
    if "UNRESOLVED_COLUMN" in str(error.getCondition()):
        guess = f"Did you mean `{exact[near[0]]}`? " if near else ""
        return ConfigInvalid(
            f"the transform of table {table} names column {wanted}, which the source does not have",
            detail=f"Its columns are {', '.join(sorted(names))}.",
            hint=f"{guess}A column whose values were all null so far can be declared in the "
            "source's `columns`.",
        )
    said = " ".join(str(error).strip().split("\n\n")[0].split("SQLSTATE")[0].split())
    return ConfigInvalid(
        f"the transform of table {table} is not understood", detail=said, hint=ALLOWED
    )
