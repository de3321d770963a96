"""The salt of hashed columns: known again, kept out of every text, and never half a secret."""

from pathlib import Path

import pytest

from server.changefeed.salt import BYTES_MAX, BYTES_MIN, Salt, SaltFileError, SaltUnavailableError

SECRET = "correct horse battery staple"


def written(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


def test_a_salt_is_the_files_content_without_its_last_line_end(tmp_path: Path) -> None:
    salts = [
        Salt.read(written(tmp_path / str(place), SECRET + end))
        for place, end in enumerate(("", "\n", "\r\n"))
    ]
    assert len({salt.check for salt in salts}) == 1
    assert {salt.secret() for salt in salts} == {SECRET.encode()}


def test_of_a_salt_only_the_path_and_a_check_value_are_kept(tmp_path: Path) -> None:
    salt = Salt.read(written(tmp_path / "salt", SECRET))
    assert Salt.parse(salt.to_document()) == salt
    assert SECRET not in f"{salt!r} {salt.to_document()}"


@pytest.mark.parametrize("size", [0, BYTES_MIN - 1, BYTES_MAX + 1, BYTES_MAX + 3])
def test_a_file_that_cannot_hold_a_salt_is_refused(tmp_path: Path, size: int) -> None:
    with pytest.raises(SaltFileError, match="openssl rand"):
        Salt.read(written(tmp_path / "salt", "s" * size))


def test_a_file_that_is_not_there_or_has_no_whole_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SaltFileError, match="on every capture"):
        Salt.read(str(tmp_path / "none"))
    with pytest.raises(SaltFileError, match="the whole path"):
        Salt.read("salt")


def test_another_salt_is_noticed_before_a_value_has_two_hashes(tmp_path: Path) -> None:
    path = tmp_path / "salt"
    salt = Salt.read(written(path, SECRET))
    written(path, SECRET + "!")
    with pytest.raises(SaltUnavailableError, match="another salt") as error:
        salt.secret()
    assert SECRET not in error.value.message
    path.unlink()
    with pytest.raises(SaltUnavailableError, match="cannot be read here"):
        salt.secret()
    written(path, SECRET)
    assert salt.secret() == SECRET.encode(), "the right file is found by the next attempt"
