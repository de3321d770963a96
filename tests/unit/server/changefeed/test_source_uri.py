from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.changefeed.source import Address, SourceUri, SourceUriError


def test_a_uri_has_user_servers_and_options():
    uri = SourceUri.parse(
        "mysql://tide%40mark@db-1:3307,[::1],db-2/?password-file=/run/secret&tls=require"
    )
    assert (uri.scheme, uri.user) == ("mysql", "tide@mark")
    assert uri.addresses == (Address("db-1", 3307), Address("::1"), Address("db-2"))
    assert uri.options == {"password-file": "/run/secret", "tls": "require"}


def test_no_uri_is_the_cluster():
    assert SourceUri.parse("").scheme == ""


@pytest.mark.parametrize(
    "text",
    [
        "mysql://u:geheim@h",
        "mysql://u@h?password=geheim",
        "mysql://u@h?PWD=geheim",
        "mysql://u:geheim@h:x",
    ],
)
def test_a_password_is_refused_without_being_repeated(text):
    with pytest.raises(SourceUriError, match="password-file=") as caught:
        SourceUri.parse(text)
    assert "geheim" not in str(caught.value)


@pytest.mark.parametrize(
    "text", ["db:3306", "//db", "mysql://db:x", "mysql://db:0", "mysql://:3306", "mysql://db?a"]
)
def test_what_is_no_source_uri_is_refused(text):
    with pytest.raises(SourceUriError):
        SourceUri.parse(text)


def test_unknown_options_are_refused_with_the_known_ones():
    uri = SourceUri.parse("mysql://u@h?tlss=require")
    with pytest.raises(
        SourceUriError, match=r"tlss, did you mean tls\? They have password-file, tls"
    ):
        uri.check_options(("tls", "password-file"))


@given(st.text())
def test_any_text_is_a_uri_or_a_named_error(text):
    with suppress(SourceUriError):
        SourceUri.parse(text)
