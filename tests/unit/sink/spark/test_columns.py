from pyspark_tidemark.lake.columns import quoted


def test_identifiers_are_quoted():
    assert quoted("a`b") == "`a``b`"
