"""Who may call: files that are right and wrong, tokens and names, and files that change."""

import string
from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.rpc import reloaded
from server.rpc.access_list import (
    EVERYBODY,
    ROLES,
    AccessFile,
    AccessFileError,
    ForbiddenError,
    OpenAccess,
    Right,
    UnauthenticatedError,
    clients_of,
    digest,
    open_access,
)
from sink.flight.tokens import tokens_of

NOW = datetime(2026, 11, 28, tzinfo=UTC)
FILE = f"""
[[client]]
name = "dashboard"
role = "read"
token-sha256 = "{digest(b"looks")}"

[[client]]
name = "shop lake"
role = "lake"
token-sha256 = "{digest(b"rows")}"
changefeeds = ["shop-*", "orders"]
expires = 2026-11-29T00:00:00Z

[[client]]
name = "captures"
role = "admin"
common-name = "tidemark"
"""


ONE = "[[client]]\nname='{}'\nrole='read'\ncommon-name='{}'"


@pytest.fixture
def path(tmp_path):
    path = tmp_path / "access.toml"
    path.write_text(FILE)
    return path


@pytest.fixture
def access(path):
    return AccessFile(str(path), lambda: NOW)


def test_clients_are_told_by_token_or_by_the_name_in_their_certificate(access):
    assert access.client([b"looks"]).name == "dashboard"
    assert access.client([b"rows"], [b"tidemark"]).name == "shop lake"
    assert access.client([], [b"tidemark"]).name == "captures"
    assert access.client([], [b"tidemark", b"tidemark"]).name == "captures"


@pytest.mark.parametrize(
    ("tokens", "names", "told"),
    [
        ([], [], "known clients only"),
        ([b""], [], "the token is none"),
        ([b"look"], [], "the token is none"),
        # A wrong token is not forgiven for a certificate, nor for another token.
        ([b"wrong"], [b"tidemark"], "the token is none"),
        ([b"looks", b"rows"], [], "the token is none"),
        ([b"looks", b"wrong"], [], "the token is none"),
        ([], [b"stranger"], "common name 'stranger'"),
        ([], [b"tidemark", b"stranger"], "common name"),
    ],
)
def test_nobody_else_is_known_and_no_token_is_repeated(access, tokens, names, told):
    with pytest.raises(UnauthenticatedError, match=told) as refused:
        access.client(tokens, names)
    assert not any(token and token.decode() in str(refused.value) for token in tokens)


def test_a_client_is_refused_from_its_end_on(path):
    times = iter([NOW, datetime(2026, 11, 29, tzinfo=UTC)])
    access = AccessFile(str(path), lambda: next(times))
    assert access.client([b"rows"]).role == "lake"
    with pytest.raises(UnauthenticatedError, match=r"'shop lake' has ended at 2026-11-29"):
        access.client([b"rows"])


def test_roles_and_changefeeds_bound_what_a_client_may(access):
    dashboard, lake = access.client([b"looks"]), access.client([b"rows"])
    dashboard.check(Right.SEE, "ListChangefeeds")
    dashboard.check(Right.SEE, "QueryChangefeed", "any")
    for right in (Right.ROWS, Right.OPERATE, Right.ADMIN):
        with pytest.raises(ForbiddenError, match="role read, which may not x: that takes"):
            dashboard.check(right, "x", "any")
    with pytest.raises(ForbiddenError, match=r"that takes lake or cluster or admin$"):
        dashboard.check(Right.ROWS, "read rows", "any")
    lake.check(Right.ROWS, "read rows", "shop-7")
    lake.check(Right.ROWS, "read rows", "orders")
    lake.check(Right.SEE, "ListCaptures")
    for other in ("orders2", "", "SHOP-7", "my-shop-1"):
        with pytest.raises(ForbiddenError, match="is for the changefeeds shop-"):
            lake.check(Right.ROWS, "read rows", other)
    with pytest.raises(ForbiddenError, match="for some changefeeds only"):
        lake.check(Right.ROWS, "read rows")


def test_each_role_may_look_and_only_admin_may_do_all():
    assert all(Right.SEE in rights for rights in ROLES.values())
    assert [role for role, rights in ROLES.items() if Right.ADMIN in rights] == ["admin"]
    assert [role for role, rights in ROLES.items() if Right.ROWS in rights] == [
        "lake",
        "cluster",
        "admin",
    ]


def test_without_a_file_everybody_may_do_everything():
    assert isinstance(open_access(""), OpenAccess)
    assert open_access("").client([b"anything"], [b"anybody"]) is EVERYBODY
    EVERYBODY.check(Right.ADMIN, "x")
    EVERYBODY.check(Right.ROWS, "x", "any")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "nobody could call"),
        ("[[client", "is not TOML"),
        ("client=" + "[" * 5000, "is not TOML"),
        ("client=" + "9" * 5000, "is not TOML"),
        ("client = 5", "nobody could call"),
        ("client = [5]", "client 1: it is no table"),
        ("[[clients]]\nname='a'", "'clients' is unknown"),
        ("[[client]]\nname='a'", "role is one of read, lake, operate, cluster, admin"),
        ("[[client]]\nname='a'\nrole='read'", "either token-sha256 or common-name"),
        ("[[client]]\nname='a'\nrole='root'\ncommon-name='a'", "role is one of"),
        ("[[client]]\nname='a'\nrole=['read']\ncommon-name='a'", "role is one of"),
        ("[[client]]\nname='a\\nb'\nrole='read'\ncommon-name='a'", "is not TOML|name is"),
        ('[[client]]\nname="a\\nb"\nrole="read"\ncommon-name="a"', "name is 1 to 128"),
        ("[[client]]\nname='a'\nrole='read'\ncommon-name=''", "common-name is"),
        ("[[client]]\nname='a'\nrole='read'\ntoken='x'", "'token' is none of name, role"),
        ("[[client]]\nname='a'\nrole='read'\ntoken-sha256='ABC'", "64 hexadecimal digits"),
        ("[[client]]\nname='a'\nrole='read'\ncommon-name='a'\nchangefeeds=[]", "leave it out"),
        ("[[client]]\nname='a'\nrole='read'\ncommon-name='a'\nchangefeeds='x'", "is a list"),
        ("[[client]]\nname='a'\nrole='read'\ncommon-name='a'\nchangefeeds=['x', 5]", "is a list"),
        ("[[client]]\nname='a'\nrole='read'\ncommon-name='a'\nchangefeeds=['x', '']", "is a list"),
        ("[[client]]\nname='a'\nrole='read'\ncommon-name='a'\nexpires=2026-01-01", "its zone"),
        ("[[client]]\nname='a'\nrole='read'\ncommon-name='a'\nexpires='never'", "its zone"),
        (
            f"{ONE.format('a', 'a')}\n{ONE.format('a', 'b')}",
            "two clients 'a'",
        ),
        (
            f"{ONE.format('a', 'x')}\n{ONE.format('b', 'x')}",
            "'a' and 'b' have the same token or common name",
        ),
    ],
)
def test_a_file_that_says_something_else_is_refused_by_name(tmp_path, text, told):
    path = tmp_path / "access.toml"
    path.write_text(text)
    with pytest.raises(AccessFileError, match=told):
        AccessFile(str(path))


def test_all_faults_are_told_at_once(tmp_path):
    text = "[[client]]\nrole='x'\n[[client]]\nname='b'\nrole='read'"
    with pytest.raises(AccessFileError) as refused:
        clients_of(text, "f")
    assert refused.value.message.count(";") == 3


def test_a_file_that_is_not_there_or_too_large_is_refused(tmp_path):
    with pytest.raises(AccessFileError, match="No such file"):
        AccessFile(str(tmp_path / "none"))
    (tmp_path / "large").write_bytes(b"#" * ((1 << 20) + 1))
    with pytest.raises(AccessFileError, match="more than 1048576 bytes"):
        AccessFile(str(tmp_path / "large"))
    (tmp_path / "largest").write_bytes(ONE.format("a", "a").encode().ljust(1 << 20))
    assert AccessFile(str(tmp_path / "largest")).client([], [b"a"]).name == "a"
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    with pytest.raises(AccessFileError, match="is not TOML"):
        AccessFile(str(tmp_path / "binary"))


def test_a_client_that_is_taken_out_is_refused_and_a_broken_file_changes_nothing(
    path, access, monkeypatch
):
    monkeypatch.setattr(reloaded, "_LOOK_EVERY_S", 0.0)
    path.write_text(FILE[:40])
    assert access.client([b"looks"]).name == "dashboard"
    replacement = path.with_suffix(".new")
    replacement.write_text("[[client]]\nname='a'\nrole='read'\ncommon-name='a'\n")
    replacement.replace(path)
    with pytest.raises(UnauthenticatedError):
        access.client([b"looks"])
    path.unlink()
    assert access.client([], [b"a"]).name == "a"


@pytest.mark.parametrize(
    ("value", "token"),
    [
        ("Bearer abc", b"abc"),
        ("bearer  abc ", b"abc"),
        (b"BEARER abc", b"abc"),
        ("Basic dXNlcjphOmI=", b"a:b"),
        ("Basic ???", b""),
        ("Basic", b""),
        ("abc", b""),
        ("", b""),
        ("Digest abc", b""),
    ],
)
def test_a_token_comes_as_bearer_or_as_the_password_of_basic(value, token):
    assert tokens_of([value], basic=True) == [token]
    assert tokens_of([value]) == [b"" if "asic" in str(value) else token]


TEXT = st.text(string.ascii_letters + string.digits + "_.@- ", min_size=1, max_size=20)


@given(
    name=TEXT.filter(lambda text: text[0] not in "_.@- "),
    role=st.sampled_from(sorted(ROLES)),
    patterns=st.lists(st.text(min_size=1, max_size=9).filter(str.isprintable), max_size=3),
    days=st.one_of(st.none(), st.integers(1, 3000)),
)
def test_what_access_create_writes_is_what_is_read(name, role, patterns, days):
    from server.cli.access import _with
    from server.rpc.access_list import Client

    expires = NOW + timedelta(days=days) if days else None
    client = Client(name, role, tuple(patterns), expires)
    text = _with(FILE, client, digest(b"new")) if name not in FILE else None
    if text is not None:
        assert clients_of(text, "f").of_tokens([b"new"]) == client
        assert clients_of(text, "f").of_tokens([b"looks"]).name == "dashboard"
