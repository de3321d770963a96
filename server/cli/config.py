"""`tidemark config check|print-default|reference|schema`: the file that `--config` names."""

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import Field, fields
from typing import Any, Final

from server.cli.arguments import Parser
from server.cli.daemon import SECTIONS, SHARED, Settings
from server.config import ConfigError, parse_document, section_faults
from server.exit_status import EXIT_OK

_TYPES: Final = {bool: "boolean", int: "integer", float: "number", str: "string"}
"""JSON Schema's names."""


def run(argv: Sequence[str]) -> int:
    """Run one verb; returns the exit code. Raises ConfigError for a file that cannot be used."""
    arguments = config_parser().parse_args(list(argv))
    if arguments.verb == "check":
        print(_checked(arguments.file))
        return EXIT_OK
    chosen = {
        name: section for name, section in sections().items() if arguments.section in (None, name)
    }
    if arguments.verb == "schema":
        print(json.dumps(schema(chosen), indent=2))
        return EXIT_OK
    lines = _defaults if arguments.verb == "print-default" else _tables
    print("\n\n".join("\n".join(lines(name, section)) for name, section in chosen.items()))
    return EXIT_OK


def config_parser() -> Parser:
    """The verbs of `tidemark config`."""
    parser = Parser(prog="tidemark config")
    verbs = parser.add_subparsers(required=True, metavar="VERB", dest="verb")
    check = verbs.add_parser(
        "check",
        help=("check a file as the daemons do when they start, and report all faults at once"),
    )
    check.add_argument("file", metavar="FILE", help="the TOML file to check")
    for name, text in (
        ("print-default", "print a file with all settings and their defaults"),
        ("reference", "print all settings as Markdown tables"),
        ("schema", "print all settings as a JSON Schema, by which editors check a file"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("section", nargs="?", choices=SECTIONS, help="only this section")
    return parser


def sections() -> dict[str, type[Any]]:
    """The settings of each section of the file, by its name."""
    from server.capture.config import CaptureConfig
    from server.coordinator.daemon import CoordinatorConfig
    from server.gc_worker.daemon import GCWorkerConfig
    from server.log import LogConfig
    from server.pump.app import PumpConfig
    from server.rpc.config import RpcConfig
    from server.rpc.credentials import SecurityConfig
    from server.spark.config import KeepConfig, SparkConfig
    from server.store.config import StoreConfig
    from server.up.tree import UpConfig

    of_daemons = (
        CoordinatorConfig,
        StoreConfig,
        CaptureConfig,
        PumpConfig,
        GCWorkerConfig,
        UpConfig,
        SparkConfig,
        KeepConfig,
    )
    shared = (SecurityConfig, RpcConfig, LogConfig)
    return dict(zip(SECTIONS, (*of_daemons, *shared), strict=True))


def schema(chosen: Mapping[str, type[Any]]) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of these sections of the file."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Tidemark's configuration file",
        **_object(
            {
                name: _object(
                    {field.name.replace("_", "-"): _value(field) for field in fields(section)}
                )
                for name, section in chosen.items()
            }
        ),
    }


def _object(properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "additionalProperties": False, "properties": properties}


def _value(field: Field[Any]) -> dict[str, Any]:
    kind = type(field.default)
    shown = {"description": field.metadata.get("help", ""), "default": field.default}
    if kind in (int, float):
        return {"type": _TYPES[kind], "minimum": field.metadata.get("least", 0), **shown}
    if kind is tuple:
        return {"type": "array", "items": {"type": "string"}, **shown}
    return {"type": _TYPES[kind], **shown}


def _checked(path: str) -> str:
    document = parse_document(path)
    faults = dict.fromkeys(section_faults(document, SECTIONS))
    # What stands in the sections that can be read is told in the same breath.
    document = {name: value for name, value in document.items() if isinstance(value, dict)}
    for name, section in sections().items():
        if name in SHARED:
            continue
        settings = Settings(name, section, document=document, environ={}, flags={})
        # Each daemon reads the sections that all have; a fault of one is told once.
        faults |= dict.fromkeys(settings.fault_texts(is_meant=name in document))
    if faults:
        raise ConfigError("; ".join(faults))
    return f"{os.fspath(path)} can be used; it has the sections {', '.join(document) or '(none)'}"


def _defaults(name: str, section: type[Any]) -> Iterator[str]:
    yield f"[{name}]"
    for field in fields(section):
        yield f"# {field.metadata.get('help', '')}"
        yield f"{field.name.replace('_', '-')} = {_toml(field.default)}"


def _tables(name: str, section: type[Any]) -> Iterator[str]:
    yield f"## {name}\n\n| setting | default | least | what it says |\n|---|---|---|---|"
    for field in fields(section):
        is_number = isinstance(field.default, int | float) and not isinstance(field.default, bool)
        least = f"{field.metadata.get('least', 0):g}" if is_number else ""
        what = field.metadata.get("help", "").replace("|", "\\|")
        default = f"`{_toml(field.default)}`"
        yield f"| `{field.name.replace('_', '-')}` | {default} | {least} | {what} |"


def _toml(value: Any) -> str:
    """JSON's scalars and lists are TOML's, too."""
    return json.dumps(value, ensure_ascii=False)
