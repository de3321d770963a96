"""Logs: one JSON object a line on stderr, with the daemon's name; unknown settings are refused."""

import json
import os
import sys

import pytest
import structlog

from server.config import ConfigError
from server.log import AUDIT, LogConfig, configure, log_config, redacted, set_level, set_redaction


@pytest.fixture(autouse=True)
def _as_before() -> object:
    yield
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def test_a_line_is_one_json_object_with_daemon_level_and_time(
    capfd: pytest.CaptureFixture[str],
) -> None:
    configure(LogConfig(), "store")
    structlog.get_logger().info("region split", region_id=7)
    line = json.loads(capfd.readouterr().err)
    assert (line["event"], line["daemon"], line["level"], line["region_id"]) == (
        "region split",
        "store",
        "info",
        7,
    )
    assert line["timestamp"].endswith("Z")


def test_below_the_level_nothing_is_written(capfd: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(log_level="warning"), "store")
    structlog.get_logger().info("not news")
    assert capfd.readouterr().err == ""


def test_who_changed_what_is_written_whatever_the_level(capfd: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(log_level="error"), "store")
    structlog.get_logger().info("call changed something", logger=AUDIT, method="PUT /log-level")
    assert json.loads(capfd.readouterr().err)["method"] == "PUT /log-level"


def test_the_level_changes_at_run_time(capfd: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(), "store")
    log = structlog.get_logger()
    log.debug("hidden")
    set_level("debug")
    log.debug("seen")
    set_level("error")
    log.warning("hidden again")
    with pytest.raises(ConfigError, match=r"the level is one of debug, .*; got 'loud'"):
        set_level("loud")
    assert [json.loads(line)["event"] for line in capfd.readouterr().err.splitlines()] == ["seen"]
    assert log_config().log_level == "error"


def test_users_data_stay_out_of_the_log_where_that_is_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    configure(LogConfig(redact_info_log=True), "store")
    log = structlog.get_logger()
    log.info("damage", first_key="7480000000000000ff", table="bank.accounts", rows=3)
    set_redaction("off")
    log.info("damage", first_key="7480000000000000ff")
    with pytest.raises(ConfigError, match="on or off; got 'often'"):
        set_redaction("often")
    hidden, shown = map(json.loads, capfd.readouterr().err.splitlines())
    assert (hidden["first_key"], hidden["table"], hidden["rows"]) == ("?", "bank.accounts", 3)
    assert (hidden["event"], hidden["daemon"], hidden["level"]) == ("damage", "store", "info")
    assert shown["first_key"] == "7480000000000000ff"


@pytest.mark.parametrize(
    ("name", "logged", "expected"),
    [
        ("error", "key 7480000000000000ff is locked", "key ? is locked"),
        ("error", "the bytes x'c3a4', for whose", "the bytes x?, for whose"),
        ("error", "row 'it''s \\' his' of 12 bytes", "row ? of 12 bytes"),
        ("error", "stopped at 470606556696674304", "stopped at ?"),
        ("error", "lease 1472381245585725607 of capture 42", "lease ? of capture 42"),
        ("query", "ALTER TABLE t2 ADD c INT DEFAULT 17 COMMENT 'x'", None),
        ("keys", [b"raw", "abcdefabcdefabcdef"], ["?", "?"]),
        ("found", {"value": "0x0123456789abcdef", "count": 1}, {"value": "?", "count": 1}),
        ("uuid", "0123456789abcdef0123", "0123456789abcdef0123"),
    ],
)
def test_what_is_hidden_of_a_field(name: str, logged: object, expected: object) -> None:
    if expected is None:
        expected = "ALTER TABLE t2 ADD c INT DEFAULT ? COMMENT ?"
    assert redacted({name: logged}) == {name: expected}


def test_text_is_for_people(capfd: pytest.CaptureFixture[str]) -> None:
    configure(LogConfig(log_format="text"), "store")
    structlog.get_logger().info("region split")
    assert "region split" in capfd.readouterr().err


def test_a_terminal_gets_text_without_being_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    master, terminal = os.openpty()
    with os.fdopen(terminal, "w") as stderr, os.fdopen(master, "rb", buffering=0) as seen:
        monkeypatch.setattr(sys, "stderr", stderr)
        configure(LogConfig(), "store")
        structlog.get_logger().info("region split")
        stderr.flush()
        line = seen.read(4096).decode()
    assert "region split" in line
    assert not line.startswith("{")


@pytest.mark.parametrize("config", [LogConfig(log_level="loud"), LogConfig(log_format="xml")])
def test_unknown_settings_name_the_known_ones(config: LogConfig) -> None:
    with pytest.raises(
        ConfigError,
        match="--log-level is one of debug, info, warning, error, --log-format json, text or auto",
    ):
        configure(config, "store")
