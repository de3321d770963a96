"""Settings: file, then environment, then flags; every fault named at once,
with the nearest known name.
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.config import ConfigError, add_flags, check_environment, load, read_document, setting


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """One field of each type."""

    data_dir: str = setting("./data", "where data lies")
    workers: int = setting(4, "how many, 100 % of the cores at most")
    ratio: float = setting(0.5, "how much")
    sync: bool = setting(True, "whether")
    conf: tuple[str, ...] = setting((), "may be repeated")
    every_s: float = setting(1.0, "seconds between two looks", least=0.001)


def loaded(
    document: dict[str, Any] | None = None,
    environ: dict[str, str] | None = None,
    flags: dict[str, Any] | None = None,
) -> Example:
    return load(
        Example,
        "store",
        document={"store": document or {}},
        environ=environ or {},
        flags=flags or {},
    )


def test_without_anything_the_defaults_hold() -> None:
    assert loaded() == Example()


def test_the_later_source_wins() -> None:
    document = {"data-dir": "file", "workers": 1, "ratio": 1}
    environ = {"TIDEMARK_STORE_DATA_DIR": "environment", "TIDEMARK_STORE_WORKERS": "2"}
    assert loaded(document, environ, {"data_dir": "flag"}) == Example(
        data_dir="flag", workers=2, ratio=1.0
    )


def test_a_flag_that_was_not_given_does_not_hide_the_file() -> None:
    assert loaded({"data-dir": "file"}, flags={"data_dir": None}).data_dir == "file"


@pytest.mark.parametrize("key", ["data-dri", "data_dir", "dataDir", "DATA-DIR"])
def test_an_unknown_key_names_the_nearest(key: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"unknown configuration key \[store\] {key}, did you mean data-dir\?"
    ):
        loaded({key: "x"})


def test_a_key_that_is_near_to_none_names_no_other_one() -> None:
    with pytest.raises(ConfigError, match=r"\[store\] password, `tidemark config reference` lists"):
        loaded({"password": "x"})


def test_all_faults_are_named_at_once() -> None:
    with pytest.raises(
        ConfigError,
        match=r"worker,.*workers must be a whole number, not 'many'.*sync must be true or",
    ):
        loaded({"worker": 1, "workers": "many", "sync": "perhaps"})


@pytest.mark.parametrize(
    ("document", "fault"),
    [
        ({"workers": -1}, "workers must be at least 0, not -1"),
        ({"ratio": -0.5}, "ratio must be at least 0, not -0.5"),
        ({"ratio": "nan"}, "ratio must be at least 0, not nan"),
        ({"every-s": 0}, "every-s must be at least 0.001, not 0.0"),
    ],
)
def test_numbers_that_are_too_small_are_told(document: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        loaded(document)


@pytest.mark.parametrize(
    "document",
    [
        {"workers": 3.7},
        {"workers": True},
        {"workers": [1]},
        {"ratio": {"a": 1}},
        {"ratio": None},
        {"data-dir": 7},
        {"data-dir": ["a"]},
        {"sync": 2},
        {"conf": 1},
        {"conf": ["a", 1]},
    ],
)
def test_a_value_of_the_wrong_type_is_a_fault_not_a_crash(document: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=f"{next(iter(document))} must be"):
        loaded(document)


@pytest.mark.parametrize(
    ("text", "value"), [("yes", True), ("0", False), ("Off", False), ("TRUE", True)]
)
def test_booleans_are_read_as_people_write_them(text: str, value: bool) -> None:
    assert loaded(environ={"TIDEMARK_STORE_SYNC": text}).sync is value


@given(
    st.dictionaries(
        st.text(max_size=9),
        st.none()
        | st.booleans()
        | st.integers()
        | st.floats()
        | st.text()
        | st.lists(st.integers()),
    )
)
def test_no_document_does_worse_than_a_config_error(document: dict[str, Any]) -> None:
    try:
        loaded(document)
    except ConfigError:
        return


def test_a_misspelt_variable_names_the_nearest() -> None:
    with pytest.raises(
        ConfigError, match="TIDEMARK_STORE_WORKER, did you mean TIDEMARK_STORE_WORKERS"
    ):
        check_environment({"store": Example}, {"TIDEMARK_STORE_WORKER": "1", "HOME": "/"})


def test_flags_are_made_from_the_fields_and_show_their_help() -> None:
    parser = argparse.ArgumentParser(prog="example")
    add_flags(parser, Example)
    flags = vars(parser.parse_args(["--data-dir", "d", "--workers", "9"]))
    assert loaded(flags=flags) == Example(data_dir="d", workers=9)
    shown = " ".join(parser.format_help().split())
    assert "100 % of the cores at most (default: 4)" in shown
    assert "''" not in shown, "an empty default is not worth a word"


def test_a_list_of_texts_is_a_repeated_flag_a_list_in_the_file_and_lines_in_the_environment() -> (
    None
):
    parser = argparse.ArgumentParser(prog="example")
    add_flags(parser, Example)
    texts = ("a=b c", "d=e,f")
    assert loaded(flags=vars(parser.parse_args(["--conf", texts[0], "--conf=d=e,f"]))).conf == texts
    assert loaded({"conf": list(texts)}, flags=vars(parser.parse_args([]))).conf == texts
    assert loaded(environ={"TIDEMARK_STORE_CONF": "a=b c\nd=e,f\n"}).conf == texts


def test_an_unknown_section_names_the_nearest(tmp_path: Path) -> None:
    path = tmp_path / "tidemark.toml"
    path.write_text("[stroe]\n")
    with pytest.raises(
        ConfigError, match=r"unknown configuration key \[stroe\], did you mean store\?"
    ):
        read_document(str(path), ["store", "log"])


def test_a_missing_file_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"cannot read the configuration file .*: No such file"):
        read_document(str(tmp_path / "none.toml"), ["store"])


@pytest.mark.parametrize("text", ["[store\n", "a=" + "[" * 5000, "a=" + "9" * 5000])
def test_a_broken_file_is_one_clear_error(tmp_path: Path, text: str) -> None:
    broken = tmp_path / "broken.toml"
    broken.write_text(text)
    with pytest.raises(ConfigError, match="is not TOML"):
        read_document(str(broken), ["store"])


def test_a_file_that_is_not_text_is_one_clear_error(tmp_path: Path) -> None:
    binary = tmp_path / "binary.toml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="is not TOML"):
        read_document(str(binary), ["store"])


def test_a_section_that_is_no_table_is_one_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "flat.toml"
    path.write_text("store = 3\n")
    with pytest.raises(ConfigError, match=r"\[store\] must be a table"):
        read_document(str(path), ["store"])
