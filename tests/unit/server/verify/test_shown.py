"""What `tidemark cli verify` prints for people and for machines."""

from server.cli.verify import _document, _shown
from server.verify.difference import DIFFERS, ONLY_LAKE, Difference
from server.verify.verify import Report, TableReport

FOUND = [
    Difference({"id": 5}, DIFFERS, ("balance",), {"id": 5, "balance": 1}, {"id": 5, "balance": 2}),
    Difference({"id": 9}, ONLY_LAKE, (), None, {"id": 9, "balance": 0}),
]


def test_a_lake_that_equals_its_upstream_is_one_line_a_table():
    report = Report("shop", 7, [TableReport("bank.accounts", 3, 3, 0)])
    assert report.equal
    assert _shown(report).splitlines() == ["shop at cut 7: equal", "  bank.accounts: 3 rows upstream, 3 in the lake"]


def test_differences_are_told_by_key_and_not_more_than_asked_for():
    report = Report("shop", 7, [TableReport("bank.accounts", 3, 3, 2, FOUND, complete=False, repaired_version=8)])
    assert not report.equal
    assert _shown(report).splitlines()[2:] == [
        "    {'id': 5}: differs in balance",
        "    {'id': 9}: only in the lake",
        "    2 or more rows differ in 2 ranges; --json --limit tells more",
        "    repaired, as version 8; verify once more to see",
    ]
    [table] = _document(report, limit=1)["tables"]
    assert (table["differing_rows"], table["complete"], len(table["differences"])) == (2, False, 1)
    assert table["differences"][0]["upstream"] == {"id": 5, "balance": 1}
