import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.options import Credentials, parse

BASE = {"endpoint": "grpc://a:1, grpc://b:2", "changefeed": "bank"}


def test_options_are_typed_and_their_names_case_insensitive():
    options = parse(
        BASE | {"TABLE": "bank.accounts", "startts": "5", "endTs": "9", "maxRowsPerTrigger": "7"}
    )
    assert options.endpoints == ("grpc://a:1", "grpc://b:2")
    assert (options.table, options.start_ts, options.end_ts, options.max_rows) == (
        "bank.accounts",
        5,
        9,
        7,
    )
    assert options.ack
    assert options.credentials == Credentials()


def test_a_time_becomes_the_tso_of_its_millisecond():
    options = parse(
        BASE
        | {"cuts": "true", "startTs": "1970-01-01T00:00:01.500Z", "endTs": "1970-01-01T00:00:02"}
    )
    assert options.start_ts == 1500 << 18
    assert options.end_ts == 2000 << 18


def test_names_of_deltas_change_feed_are_inclusive():
    own = {"table": "a.b"}
    versions = parse(BASE | own | {"startingVersion": "10", "endingVersion": "20"})
    assert (versions.start_ts, versions.end_ts) == (9, 20)
    times = {"startingTimestamp": "1970-01-01 00:00:01.5", "endingTimestamp": "1970-01-01 00:00:02"}
    options = parse(BASE | own | times)
    assert (options.start_ts, options.end_ts) == ((1500 << 18) - 1, (2001 << 18) - 1)
    assert parse(BASE | own | {"startingVersion": "0"}).start_ts == 0


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"startingVersion": "latest"}, "'startingVersion' must be a TSO"),
        ({"startTs": "1", "startingVersion": "1"}, "only one of 'startTs', 'startingVersion'"),
        ({"endTs": "1", "endingTimestamp": "1970-01-02"}, "only one of 'endTs', 'endingTimestamp'"),
    ],
)
def test_a_place_that_is_given_twice_or_is_none_is_told(extra, told):
    with pytest.raises(SourceError, match=told):
        parse(BASE | {"table": "a.b"} | extra)


def test_an_unknown_option_names_the_nearest():
    with pytest.raises(
        SourceError,
        match=r"\[TM:ErrOptionInvalid\] unknown option 'changefed', did you mean 'changefeed'",
    ):
        parse(BASE | {"changefed": "x", "table": "a.b"})
    with pytest.raises(SourceError, match="unknown option 'user', they are endpoint, changefeed"):
        parse(BASE | {"user": "x", "table": "a.b"})


def test_all_faults_are_told_at_once():
    with pytest.raises(SourceError) as caught:
        parse({"table": "a.b", "ack": "maybe", "maxRowsPerTrigger": "0", "startTs": "soon"})
    for fault in (
        "'endpoint' is missing",
        "'changefeed' is missing",
        "'ack'",
        "'maxRowsPerTrigger'",
        "'startTs'",
    ):
        assert fault in caught.value.message


@pytest.mark.parametrize(
    "extra", [{}, {"table": "a.b", "cuts": "true"}, {"table": "a.b", "tablePattern": "a.*"}]
)
def test_a_reader_is_for_one_table_a_pattern_or_cuts(extra):
    with pytest.raises(SourceError, match="and only one"):
        parse(BASE | {"envelope": "true"} | extra)


@pytest.mark.parametrize(
    ("extra", "told"),
    [
        ({"tablePattern": "a.*"}, "'tablePattern' needs 'envelope'"),
        ({"cuts": "true", "beforeImage": "true"}, "cuts have no rows"),
        ({"cuts": "true", "commitTime": "true"}, "cuts have no rows"),
        (
            {"table": "a.b", "startTs": "9", "endTs": "8"},
            r"'endTs' \(8\) is before 'startTs' \(9\)",
        ),
    ],
)
def test_options_that_contradict_each_other_are_told(extra, told):
    with pytest.raises(SourceError, match=told):
        parse(BASE | extra)


def test_patterns_choose_tables_of_a_database():
    options = parse(BASE | {"tablePattern": "shop.*, bank.acc?unts", "envelope": "true"})
    names = ("shop.a", "bank.accounts", "bank.transfers", "shopping.a")
    assert [options.chooses(name) for name in names] == [True, True, False, False]


def test_a_secret_is_never_part_of_the_options(tmp_path):
    (tmp_path / "token").write_text("s3cret")
    options = parse(BASE | {"table": "a.b", "tokenFile": str(tmp_path / "token")})
    assert "s3cret" not in repr(options)
