"""The table filter takes what TiDB's takes."""

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.changefeed.filter import (
    AllFilters,
    FilterRuleError,
    TableFilter,
    exact_rule,
    filter_of,
)

NAMES = st.text(st.characters(min_codepoint=32, max_codepoint=126), min_size=1, max_size=4)


@pytest.mark.parametrize(
    ("rules", "taken", "left"),
    [
        (["shop.*"], ["shop.a", "SHOP.tmp"], ["shops.a", "x.shop"]),
        (["shop.*", "!shop.tmp_*"], ["shop.a", "shop.tmp"], ["shop.tmp_1", "shop.TMP_2"]),
        (["!shop.tmp_*", "shop.*"], ["shop.tmp_1"], ["other.a"]),
        (
            ["*.*", "!*.b?"],
            ["x.b", "x.bcd"],
            ["x.bc"],
        ),
        (["s[a-c].t", "s[!a-c].u"], ["sa.t", "sx.u"], ["sx.t", "sb.u"]),
        ([r"/^s\d{2,}$/./^t\d+$/"], ["s12.t3"], ["s1.t3", "s12.t", "as12.t3"]),
        (["/s/.t"], ["usual.t"], ["x.t"]),
        ([r"a\*.b"], ["a*.b"], ["ax.b"]),
        (["[^-].[--a]", "[+--].x"], ["^.a", "-.-", "+.x", "-.x"], ["a.b", "b.x"]),
    ],
)
def test_the_last_rule_that_matches_decides(rules, taken, left):
    table_filter = TableFilter(rules)
    assert [name for name in taken if not table_filter.takes(*name.split("."))] == []
    assert [name for name in left if table_filter.takes(*name.split("."))] == []


@pytest.mark.parametrize(
    ("source_uri", "taken", "left"),
    [
        (
            "mysql://u@h",
            ["tidb_cdc.a", "metrics_schema.a", "lightning_task_info.a"],
            ["mysql.user", "changefeed_dump.x", "INFORMATION_SCHEMA.t"],
        ),
        ("", ["changefeed_dump.x"], ["mysql.user", "tidb_cdc.a", "METRICS_SCHEMA.t"]),
        ("pump://", ["changefeed_dump.x"], ["mysql.user", "tidb_cdc.a", "METRICS_SCHEMA.t"]),
        ("gone://", ["mysql.user"], []),
    ],
)
def test_only_the_system_schemas_of_its_own_source_are_never_taken(source_uri, taken, left):
    table_filter = filter_of(source_uri, ["*.*"])
    assert [name for name in taken if not table_filter.takes(*name.split("."))] == []
    assert [name for name in left if table_filter.takes(*name.split("."))] == []


@pytest.mark.parametrize(
    "rule",
    [
        "shop",
        "shop.",
        ".t",
        "!",
        "",
        "a.b.c",
        "[a.b",
        "[z-a].b",
        "/(/.x",
        "/x.y",
        "sh op.x",
        '"a.b',
        "'a'.b",
        "a.b*!",
    ],
)
def test_what_is_no_rule_is_named(rule):
    with pytest.raises(FilterRuleError) as caught:
        TableFilter(["ok.*", rule])
    assert repr(rule) in caught.value.message


def test_rules_are_bounded():
    with pytest.raises(FilterRuleError, match="at most 1024 rules"):
        TableFilter(["a.b"] * 1025)
    with pytest.raises(FilterRuleError, match="at most 1024 characters"):
        TableFilter(["a." + "b" * 1023])


@given(NAMES, NAMES, NAMES, NAMES)
def test_an_exact_rule_takes_its_table_and_no_other(schema, table, other_schema, other_table):
    table_filter = TableFilter([exact_rule(schema, table)])
    assert table_filter.takes(schema, table)
    same = (other_schema.lower(), other_table.lower()) == (schema.lower(), table.lower())
    assert table_filter.takes(other_schema, other_table) == same


@given(st.text(alphabet='a.*?[]!-"`\\/^b', max_size=12))
def test_any_text_is_a_rule_or_a_named_error(text):
    with suppress(FilterRuleError):
        TableFilter([text]).takes("a", "b")


@pytest.mark.parametrize(
    ("rules", "is_possible"),
    [
        (["a.t*"], True),
        (["b.*"], False),
        (["*.*", "!a.*"], False),
        (["!a.*", "*.x"], True),
        (["a.*", "!a.t"], True),
        (["mysql.*", "b.*"], False),
    ],
)
def test_whether_any_table_of_a_schema_may_be_taken(rules, is_possible):
    assert TableFilter(rules, {"mysql"}).may_take_of("A") == is_possible
    assert not TableFilter(["*.*"], {"mysql"}).may_take_of("mysql")
    assert AllFilters([TableFilter(["*.*"]), TableFilter(rules)]).may_take_of("a") == is_possible


def test_what_two_filters_take_is_what_each_of_them_takes():
    both = AllFilters([TableFilter(["a.*", "b.*"]), TableFilter(["*.*", "!a.x"])])
    asked = [("a", "x"), ("a", "y"), ("b", "x"), ("c", "x")]
    assert [both.takes(*name) for name in asked] == [False, True, True, False]
