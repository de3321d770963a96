"""What `tidemark cli verify` prints for people and for machines."""

from server.cli.verify import _document, _shown
from server.verify.comparison import Repaired, TableReport
from server.verify.difference import DIFFERS, ONLY_LAKE, Difference
from server.verify.verify import Report

FOUND = [
    Difference({"id": 5}, DIFFERS, ("balance",), {"id": 5, "balance": 1}, {"id": 5, "balance": 2}),
    Difference({"id": 9}, ONLY_LAKE, (), None, {"id": 9, "balance": 0}),
]


def test_a_lake_that_equals_its_upstream_is_one_line_a_table():
    report = Report("shop", 7, [TableReport("bank.accounts", 3, 3)], "upsert")
    assert report.equal
    assert _shown(report).splitlines() == [
        "shop at cut 7: equal",
        "  bank.accounts: 3 rows upstream, 3 in the lake",
    ]


def test_differences_are_told_by_key_with_what_may_explain_them_and_what_was_done():
    table = TableReport(
        "bank.accounts", 3, 3, 2, 2, FOUND, complete=False, note="why", repaired=Repaired(2, 1, 8)
    )
    report = Report("shop", 7, [table], "append")
    assert not report.equal
    assert _shown(report).splitlines() == [
        "shop at cut 7 (mode append: the current rows were compared): DIFFERS",
        "  bank.accounts: 3 rows upstream, 3 in the lake",
        "    {'id': 5}: differs in balance",
        "    {'id': 9}: only in the lake",
        "    2 or more rows differ in 2 ranges; --json --limit tells more",
        "    note: why",
        "    repaired as version 8: 2 keys removed, 1 rows written; verify once more to see",
    ]
    [document] = _document(report)["tables"]
    assert (document["differing_rows"], document["complete"]) == (2, False)
    assert document["repaired"] == {"removed": 2, "written": 1, "version": 8}
    assert document["differences"][0]["upstream"] == {"id": 5, "balance": 1}


def test_a_repair_that_was_only_wished_is_told_as_such():
    table = TableReport("bank.accounts", 3, 3, 2, 2, FOUND, repaired=Repaired(2, 1))
    assert _shown(Report("shop", 7, [table], "upsert")).splitlines()[-1] == (
        "    would be repaired: 2 keys removed, 1 rows written"
    )
