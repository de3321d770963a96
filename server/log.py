"""Logs: structlog to stderr, one JSON object a line (or readable text on a terminal);
secrets never get here.

Where `redact-info-log` is on, users' data stay out of them: keys and values, which are logged in
hexadecimal, literals of SQL statements, and whatever else is quoted. Each is a `?`. Names of
tables, changefeeds and daemons stay where they are fields of their own: without them a log helps
nobody. Source: TiKV's and TiCDC's setting of this name.
"""

import logging
import re
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import structlog

from server.config import ConfigError, setting

AUDIT: Final = "audit"
"""The `logger` of lines that say who changed what."""

_LEVELS = {
    "debug": logging.DEBUG,
    "info": logging.INFO,
    "warning": logging.WARNING,
    "error": logging.ERROR,
}
_SWITCHED = {"on": True, "off": False}
_HIDDEN: Final = "?"
_LITERAL: Final = re.compile(r"'(?:[^'\\]|\\.|'')*'|\"(?:[^\"\\]|\\.|\"\")*\"", re.DOTALL)
_HEXADECIMAL: Final = re.compile(r"(?<![0-9A-Za-z])(?:0x)?[0-9A-Fa-f]{16,}(?![0-9A-Za-z])")
_NUMBER: Final = re.compile(r"(?<![\w`.])\d+(?:\.\d+)?(?![\w`])")
_STATEMENTS: Final = frozenset({"query", "statement", "sql"})
"""Fields with a statement, of which the numbers are literals, too."""
_OURS: Final = frozenset(
    {
        *("event", "level", "timestamp", "daemon", "logger", "code", "kind", "state", "outcome"),
        *("changefeed", "capture", "uuid", "client", "peer", "method", "of", "leader", "store"),
        *("address", "version", "traceparent", "table", "tables", "worker", "source", "target"),
    }
)
"""Fields that hold nothing of a row."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogConfig:
    """Settings of the log."""

    log_level: str = setting("info", "debug, info, warning or error")
    log_format: str = setting("auto", "json, text, or auto: text on a terminal, else json")
    redact_info_log: bool = setting(
        False,  # noqa: FBT003 - a setting's default
        "replace keys, values, literals of statements and quoted text in logs by ?",
    )

    def checked(self) -> "LogConfig":
        """This configuration.

        Raises:
            ConfigError: an unknown level or format.
        """
        if self.log_level not in _LEVELS or self.log_format not in ("json", "text", "auto"):
            raise ConfigError(
                f"--log-level is one of {', '.join(_LEVELS)}, --log-format json, text or auto; "
                f"got {self.log_level!r} and {self.log_format!r}"
            )
        return self


class RateLimitedWarning:
    """One warning about something that is tried again and again: logged at most every ten seconds,
    since it may fail for hours.
    """

    _EVERY_S = 10.0

    def __init__(self, log: Any, message: str) -> None:
        self._log = log
        self._message = message
        self._next_s = 0.0

    def warn(self, **details: Any) -> None:
        """Log it with these details, unless it was logged a moment ago."""
        if time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + self._EVERY_S
            self._log.warning(self._message, **details)


_in_force = LogConfig()


def log_config() -> LogConfig:
    """The settings of this process's log: its child processes log the same way."""
    return _in_force


def set_level(level: str) -> None:
    """Log from this level on, now, and in the child processes that start from now on.

    Raises:
        ConfigError: an unknown level.
    """
    _check_level("the level", level)
    global _in_force  # noqa: PLW0603 - as in `configure`
    _in_force = replace(_in_force, log_level=level)


def set_redaction(text: str) -> None:
    """Keep users' data out of the log (`on`) or not (`off`), now, and in the child processes that
    start from now on.

    Raises:
        ConfigError: it is neither.
    """
    if text.lower() not in _SWITCHED:
        raise ConfigError(f"redaction of logs is on or off; got {text[:40]!r}")
    global _in_force  # noqa: PLW0603 - as in `configure`
    _in_force = replace(_in_force, redact_info_log=_SWITCHED[text.lower()])


def configure_command(level: str) -> None:
    """Set up structlog for a command: only what its user must know, as text,
    and never where its output goes.

    Raises:
        ConfigError: an unknown level.
    """
    _check_level("--log-level", level)
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(_LEVELS[level]),
        logger_factory=lambda *_: structlog.PrintLogger(sys.stderr),
    )


def configure(config: LogConfig, daemon: str) -> None:
    """Set up structlog for this process.

    Raises:
        ConfigError: an unknown level or format.
    """
    global _in_force  # noqa: PLW0603 - structlog's own settings are the process's, too
    _in_force = config.checked()
    is_text = config.log_format == "text" or (config.log_format == "auto" and sys.stderr.isatty())
    renderer: structlog.typing.Processor
    renderer = structlog.dev.ConsoleRenderer() if is_text else structlog.processors.JSONRenderer()
    structlog.configure(
        processors=[
            _from_the_level_on,
            structlog.contextvars.merge_contextvars,
            structlog.processors.add_log_level,
            structlog.processors.TimeStamper(fmt="iso", utc=True),
            structlog.processors.format_exc_info,
            _without_users_data,
            renderer,
        ],
        # the level may change: `_from_the_level_on` compares; debug lines are few
        wrapper_class=structlog.make_filtering_bound_logger(logging.DEBUG),
        logger_factory=structlog.WriteLoggerFactory(file=sys.stderr),
        cache_logger_on_first_use=True,
    )
    structlog.contextvars.bind_contextvars(daemon=daemon)


def _from_the_level_on(
    _: object, method: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    """Drop what is below the level in force; never the record of who changed something."""
    level = getattr(logging, method.upper(), logging.ERROR)
    if level < _LEVELS[_in_force.log_level] and event.get("logger") != AUDIT:
        raise structlog.DropEvent
    return event


def _without_users_data(
    _: object, __: str, event: structlog.typing.EventDict
) -> structlog.typing.EventDict:
    return redacted(event) if _in_force.redact_info_log else event


def _check_level(what: str, level: str) -> None:
    if level not in _LEVELS:
        raise ConfigError(f"{what} is one of {', '.join(_LEVELS)}; got {level!r}")


def redacted(event: Mapping[str, Any]) -> dict[str, Any]:
    """A log's event without users' data."""
    return {name: _hidden(name, value) for name, value in event.items()}


def _hidden(name: str, value: Any) -> Any:
    if name in _OURS:
        return value
    if isinstance(value, str):
        return _text(value, is_statement=name in _STATEMENTS)
    if isinstance(value, bytes):
        return _HIDDEN
    if isinstance(value, Mapping):
        return {key: _hidden(str(key), each) for key, each in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_hidden(name, each) for each in value]
    return value


def _text(text: str, *, is_statement: bool) -> str:
    hidden = _HEXADECIMAL.sub(_HIDDEN, _LITERAL.sub(_HIDDEN, text))
    return _NUMBER.sub(_HIDDEN, hidden) if is_statement else hidden
