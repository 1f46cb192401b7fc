"""Which Iceberg table a source table goes into, and which names no table can have."""

import pytest

from icestream.errors import ConfigInvalid
from icestream.names import NAME_BYTES_MAX, TableNames, last_part, unusable


@pytest.mark.parametrize(
    ("table", "name"),
    [
        ("orders", "orders"),
        ("db.public.orders", "orders"),
        ('public."a.b"', "a.b"),
        ('"say ""hi"""', 'say "hi"'),
        ('x."a"\n', '"a"\n'),
    ],
)
def test_the_last_part_is_the_tables_own_name(table, name):
    """I10, Mend a4: parts that hold dots stand in quotes; a line break ends nothing."""
    assert last_part(table) == name


@pytest.mark.parametrize(
    "name",
    [
        *("", ".", "..", "...", " a", "a ", "a\n", "a\x00b", "a\tb", "a\x7f", "a\u2028b"),
        *("a/b", "a\\b", "a?b", "a#b", "x__dead_letters", "é" * 128, "a" * 256),
    ],
)
def test_a_name_that_leads_elsewhere_is_no_tables_name(name):
    """I16, Mend a4: the reason does not tell the name, which may be a value."""
    reason = unusable(name)
    assert reason
    assert len(name) < 3 or name not in reason


@pytest.mark.parametrize("name", ["a", "A b", "a.b", 'q"`', "ü", "日本", "-", "a" * 255, ".a"])
def test_other_names_are_just_names(name):
    """I10: blanks inside, quotes, dots and letters of any language."""
    assert unusable(name) is None


def test_letters_have_the_name_of_their_table_and_need_room_for_it():
    """I16, K5, Mend a4: wherever the table's name comes from."""
    names = TableNames(given={"a.t": "u"}, otherwise="all")
    assert names.of("a.t__dead_letters") == "u__dead_letters"
    assert names.of("b__dead_letters") == "all__dead_letters"
    assert names.chosen("a.t")
    assert not names.chosen("a.t__dead_letters")
    by_records = TableNames()
    assert by_records.unusable("a" * (NAME_BYTES_MAX - len("__dead_letters"))) is None
    assert "longer" in by_records.unusable("a" * NAME_BYTES_MAX)


def test_a_record_names_no_table_with_a_percent_sign():
    """I16, Mend a4: some catalogs refuse it, and one record would stop all others."""
    assert "percent" in TableNames().unusable("a%2Fb")
    assert TableNames().by_name(["a%b"]) == {"a%b": "a%b"}


def test_two_tables_of_one_name_are_named_and_no_others():
    """I16, U3, Mend a2: the error names the two, and the way out works."""
    tables = ["x", "eu.orders", "us.orders", "y"]
    with pytest.raises(ConfigInvalid, match="two source tables go into one") as caught:
        TableNames().by_name(tables)
    assert caught.value.detail == "eu.orders, us.orders go into orders."
    assert "`tables: {us.orders: {table: <name>}}`" in caught.value.hint
    mended = TableNames(given={"us.orders": "us_orders"})
    assert set(mended.by_name(tables)) == {"x", "y", "orders", "us_orders"}


@pytest.mark.parametrize("table", ["shop.", "a/b", "a\n", "a" * 250 + "__dead_letters"])
def test_a_source_table_that_cannot_be_an_iceberg_table_is_refused(table):
    """I16, U3, Mend a4: topics and tables of databases; another name is the way out."""
    with pytest.raises(ConfigInvalid, match="cannot become an Iceberg table") as caught:
        TableNames().by_name([table])
    assert "{table: <name>}" in caught.value.hint
    owner = table.removesuffix("__dead_letters")
    assert len(TableNames(given={owner: "t"}).by_name([table])) == 1


def test_a_given_name_must_be_usable_too():
    """I16, Mend a4."""
    with pytest.raises(ConfigInvalid, match="cannot become"):
        TableNames(given={"t": "../t"}).by_name(["t"])
