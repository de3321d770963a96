"""The Delta jars: `python -m pyspark_tidemark.jars [--dir DIR]` puts them into a directory, once.

Spark's own resolver (Ivy) fetches them; what is kept is this list and nothing else that Delta's metadata asks for,
because Spark brings it in newer versions. A jar whose content is not the one tested is refused.
"""

import argparse
import hashlib
import shutil
import sys
import tempfile
from pathlib import Path

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.java import check_java

COORDINATES = "io.delta:delta-spark_4.2_2.13:4.4.0"
SHA256 = {
    "io.delta_delta-kernel-api-4.4.0.jar": "ee9b5a14ac3b7efdff4d61a58478fe8eb0e5a3fbca43889dca7290795fe79a11",
    "io.delta_delta-kernel-defaults-4.4.0.jar": "225c975199e4718b38ee5b7e6da7f19e9585024262b2cec2656b32151a856b0b",
    "io.delta_delta-kernel-unitycatalog-4.4.0.jar": "cea22dfb4ac562b3cd27bf652697750e8336009d73fb06631363aaaad5345ffa",
    "io.delta_delta-spark_4.2_2.13-4.4.0.jar": "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead",
    "io.delta_delta-storage-4.4.0.jar": "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc",
    "io.unitycatalog_unitycatalog-client-0.6.0.jar": "48257499a86b801a3e2372cec55ac226ca1c1c7eabe5c118e7302f29a1fdbc19",
    "io.unitycatalog_unitycatalog-hadoop-0.6.0.jar": "c47b63c961c87102b9e1d63809a0915ba4c86b7652f57c8d39ca3a05b441a150",
}
_NOT_WANTED = "org.apache.hadoop:*,org.apache.logging.log4j:*,org.apache.parquet:*,com.fasterxml.jackson*:*,org.slf4j:*"


def default_directory() -> Path:
    """Inside the virtual environment, beside the packages it belongs to."""
    return Path(sys.prefix) / "share" / "tidemark" / "jars"


def present(directory: Path) -> list[Path]:
    """The jars, if all are there with the right content; else none."""
    found = [directory / name for name in SHA256]
    return found if all(path.is_file() and _digest(path) == SHA256[path.name] for path in found) else []


def install(directory: Path) -> list[Path]:
    """Fetch what is missing.

    Raises:
        SourceError: ErrJavaNotFound, ErrJarsUnavailable.
    """
    if found := present(directory):
        return found
    check_java()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".ivy-") as cache:
        _resolve(cache)
        for name, digest in SHA256.items():
            fetched = Path(cache) / "jars" / name
            if not fetched.is_file() or _digest(fetched) != digest:
                raise SourceError(
                    "ErrJarsUnavailable", f"{name} was not fetched as tested; see the resolver's lines above"
                )
            shutil.move(fetched, directory / name)
    return present(directory)


def _resolve(cache: str) -> None:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]")
    settings = {
        "spark.jars.packages": COORDINATES,
        "spark.jars.excludes": _NOT_WANTED,
        "spark.jars.ivy": cache,
        "spark.ui.enabled": "false",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    try:
        builder.getOrCreate().stop()
    except (PySparkException, Py4JError, OSError) as err:
        raise SourceError(
            "ErrJarsUnavailable", f"Spark could not fetch {COORDINATES} ({err}); is a Maven repository reachable?"
        ) from None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    """Install the jars; returns the exit code."""
    parser = argparse.ArgumentParser(prog="python -m pyspark_tidemark.jars", description="Fetch the Delta jars.")
    parser.add_argument(
        "--dir", type=Path, default=default_directory(), help="where to put them (default: %(default)s)"
    )
    try:
        install(parser.parse_args().dir)
    except SourceError as err:
        sys.stderr.write(f"{err}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
