"""Settings: frozen dataclasses filled from a TOML file, then the environment, then flags;
unknown keys are errors.

A section `[store]` with key `data-dir` is the environment variable TIDEMARK_STORE_DATA_DIR and the
flag `--data-dir`. The classes stand beside what they configure. Only `HTTP_ADDRS` stands here:
`tidemark health`, which probes run every few seconds, need not import a daemon for it.
"""

import argparse
import dataclasses
import difflib
import os
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

from storage.model.errors import InvalidError

T = TypeVar("T")
_ENV_PREFIX = "TIDEMARK_"
_PORT_MAX: Final = 65535
_TRUE = {"1", "true", "yes", "on"}
_FALSE = {"0", "false", "no", "off"}
HTTP_ADDRS: Final = {
    "coordinator": "127.0.0.1:8391",
    "store": "127.0.0.1:20180",
    "capture": "127.0.0.1:8303",
    "pump": "127.0.0.1:8251",
    "gc-worker": "127.0.0.1:8392",
    "up": "127.0.0.1:8390",
    "spark": "127.0.0.1:0",
    "spark-keep": "127.0.0.1:8394",
}
"""The HTTP address of each daemon unless its `http-addr` says otherwise, by its section; with port
0 the kernel chooses, as many such jobs run side by side.
"""


class ConfigError(InvalidError):
    """The configuration cannot be used; the message lists every fault."""

    code = "ErrConfigInvalid"


def setting(default: Any, help_text: str, *, least: float = 0) -> Any:
    """A dataclass field with its one-line description (unit, source); `least` is for numbers."""
    return dataclasses.field(default=default, metadata={"help": help_text, "least": least})


def add_flags(parser: argparse.ArgumentParser, section: type[Any]) -> None:
    """One flag for each field of `section`: `--x` and `--no-x` if it is true or false,
    repeated if it is a list.
    """
    for field in dataclasses.fields(section):
        shown = f"{field.metadata.get('help', '')}{_default(field.default)}".replace("%", "%%")
        flag = f"--{_kebab(field.name)}"
        if isinstance(field.default, bool):
            parser.add_argument(
                flag,
                dest=field.name,
                default=None,
                action=argparse.BooleanOptionalAction,
                help=shown,
            )
        elif isinstance(field.default, tuple):
            parser.add_argument(flag, dest=field.name, default=None, action="append", help=shown)
        else:
            parser.add_argument(flag, dest=field.name, default=None, help=shown)


def _default(value: Any) -> str:
    """What `--help` says of a default; nothing of an empty one."""
    if isinstance(value, bool):
        return f" (default: {'yes' if value else 'no'})"
    return "" if value in ("", ()) else f" (default: {value})"


def load(
    section: type[T],
    name: str,
    *,
    document: Mapping[str, Any],
    environ: Mapping[str, str],
    flags: Mapping[str, Any],
) -> T:
    """Fill `section` from `document[name]`, the environment and the flags, the later winning.

    Raises:
        ConfigError: unknown keys (with the nearest known one), values of the wrong type, or numbers
        that are too small; all of them at once.
    """
    fields = {field.name: field for field in dataclasses.fields(section)}  # type: ignore[arg-type]  # a dataclass, which no type says
    faults: list[str] = []
    values: dict[str, Any] = {}
    for key, value in document.get(name, {}).items():
        field_name = key.replace("-", "_")
        if field_name in fields and "_" not in key:
            values[field_name] = value
        else:
            faults.append(_unknown(f"[{name}] {key}", key, [_kebab(each) for each in fields]))
    prefix = f"{_ENV_PREFIX}{name.upper().replace('-', '_')}_"
    for variable, text in environ.items():
        if (
            variable.startswith(prefix)
            and (field_name := variable.removeprefix(prefix).lower()) in fields
        ):
            values[field_name] = text
    values |= {key: value for key, value in flags.items() if key in fields and value is not None}
    checked = {key: _typed(fields[key], value, faults) for key, value in values.items()}
    if faults:
        raise ConfigError("; ".join(faults))
    return section(**checked)


def read_document(path: str | None, sections: Sequence[str]) -> dict[str, Any]:
    """Parse a TOML file; without a path the document is empty.

    Raises:
        ConfigError: the file cannot be read or parsed, or has an unknown section.
    """
    if path is None:
        return {}
    document = parse_document(path)
    if faults := section_faults(document, sections):
        raise ConfigError("; ".join(faults))
    return document


def parse_document(path: str) -> dict[str, Any]:
    """Parse a TOML file, whatever it holds.

    Raises:
        ConfigError: the file cannot be read or parsed.
    """
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as err:
        raise ConfigError(f"cannot read the configuration file {path}: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise ConfigError(f"{path} is not TOML: {err}") from err


def section_faults(document: Mapping[str, Any], sections: Sequence[str]) -> list[str]:
    """The sections that there are not, with the nearest one, and those that are no tables."""
    faults = [_unknown(f"[{key}]", key, sections) for key in document if key not in sections]
    faults += [
        f"[{key}] must be a table"
        for key in sections
        if not isinstance(document.get(key, {}), dict)
    ]
    return faults


def check_environment(
    sections: Mapping[str, type[Any]], environ: Mapping[str, str] | None = None
) -> None:
    """Refuse TIDEMARK_ variables that no section knows,
    so that a misspelt one is not silently ignored.

    Raises:
        ConfigError: naming the nearest known variable.
    """
    names = [
        f"{_ENV_PREFIX}{name.upper().replace('-', '_')}_{field.name.upper()}"
        for name, section in sections.items()
        for field in dataclasses.fields(section)
    ]
    seen = [
        variable
        for variable in (os.environ if environ is None else environ)
        if variable.startswith(_ENV_PREFIX)
    ]
    faults = [_unknown(variable, variable, names) for variable in seen if variable not in names]
    if faults:
        raise ConfigError("; ".join(faults))


def listening_address(flag: str, addr: str) -> tuple[str, int]:
    """The host and port of an address to listen on, which `--flag` gave.

    Raises:
        ConfigError: it is none.
    """
    host, _, port = addr.rpartition(":")
    if not (port.isascii() and port.isdecimal() and int(port) <= _PORT_MAX):
        raise ConfigError(f"--{flag} is host:port with a port from 0 to {_PORT_MAX}, not {addr!r}")
    return host, int(port)


def _kebab(name: str) -> str:
    return name.replace("_", "-")


def _unknown(shown: str, key: str, names: Sequence[str]) -> str:
    spelt = {name.lower(): name for name in names}
    near = difflib.get_close_matches(key.lower(), spelt, n=1)
    helps = f"did you mean {spelt[near[0]]}?" if near else "`tidemark config reference` lists all"
    return f"unknown configuration key {shown}, {helps}"


def _typed(field: dataclasses.Field[Any], value: Any, faults: list[str]) -> Any:
    expected: type[Any] = type(field.default)
    try:
        if expected is bool:
            return _boolean(value)
        if expected is tuple:
            return _texts(value)
        if (
            isinstance(value, str)
            or type(value) is expected
            or (expected is float and type(value) is int)
        ):
            return _bounded(field, expected(value), faults)
    except (ValueError, OverflowError):
        pass
    faults.append(f"{_kebab(field.name)} must be {_TYPE_NAMES[expected]}, not {value!r}")
    return field.default


_TYPE_NAMES = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    tuple: "a list of strings",
}


def _bounded(field: dataclasses.Field[Any], value: Any, faults: list[str]) -> Any:
    least = field.metadata.get("least", 0)
    # NaN is none of these
    if isinstance(value, int | float) and not value >= least:
        faults.append(f"{_kebab(field.name)} must be at least {least:g}, not {value!r}")
        return field.default
    return value


def _texts(value: Any) -> tuple[str, ...]:
    """A list of a file or of flags; one a line in the environment."""
    texts = value.splitlines() if isinstance(value, str) else value
    if not isinstance(texts, list | tuple) or not all(isinstance(text, str) for text in texts):
        raise ValueError(value)
    return tuple(text for text in texts if text)


def _boolean(value: Any) -> bool:
    if isinstance(value, bool):
        return value
    text = str(value).lower()
    if text in _TRUE:
        return True
    if text in _FALSE:
        return False
    raise ValueError(text)
