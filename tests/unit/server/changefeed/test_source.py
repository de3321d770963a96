"""Each source is one record, and an unknown one is a named error."""

import subprocess
import sys

import pytest

from server.changefeed.source import KINDS, SourceUriError, find_kind, load, with_option


@pytest.mark.parametrize("scheme", KINDS)
def test_what_a_record_names_is_there(scheme):
    kind = KINDS[scheme]
    named = [kind.source_at, kind.table_at, kind.upstream_at, kind.check_at]
    assert all(callable(load(each)) for each in named if each)


def test_an_unknown_source_is_a_named_error():
    schemes = ", ".join(f"{scheme}://" for scheme in sorted(KINDS) if scheme)
    with pytest.raises(SourceUriError, match=rf"there are no oracle:.* use {schemes}$"):
        find_kind("oracle")


def test_a_flag_is_refused_for_sources_without_such_an_option():
    for uri in ("", "pump://", "oracle://db"):
        with pytest.raises(SourceUriError, match="is of mysql:// sources only"):
            with_option(uri, "on-unclear-ddl", "reread")


def test_the_table_of_kinds_loads_no_source():
    check = (
        "import sys; from server.changefeed.source import SourceUri, find_kind;"
        "find_kind(SourceUri.parse('mysql://a@b').scheme);"
        "print(sorted({'sqlglot', 'pymysql', 'server.puller'} & set(sys.modules)))"
    )
    path = ":".join(filter(None, sys.path))
    answer = subprocess.run(
        [sys.executable, "-c", check], env={"PYTHONPATH": path}, capture_output=True, check=True
    )
    assert answer.stdout.strip() == b"[]"
