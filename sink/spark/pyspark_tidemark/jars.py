"""Jars of lake formats: `python -m pyspark_tidemark.jars [--dir DIR] [FORMAT …]` puts them into a
directory, once.

Spark's own resolver (Ivy) fetches them; what is kept is this list and nothing else that their
metadata asks for, because Spark brings it in newer versions. A jar whose content is not the one
tested is refused.
"""

import argparse
import hashlib
import multiprocessing
import shutil
import sys
import tempfile
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.java import check_java

COORDINATES = {
    "delta": "io.delta:delta-spark_4.2_2.13:4.4.0",
    # for its table library: see lake.iceberg
    "iceberg": "org.apache.iceberg:iceberg-spark-runtime-4.1_2.13:1.12.0",
}
_DELTA = {
    "io.delta_delta-kernel-api-4.4.0.jar": "ee9b5a14ac3b7efdff4d61a58478fe8eb0e5a3fbca43889dca7290795fe79a11",
    "io.delta_delta-kernel-defaults-4.4.0.jar": "225c975199e4718b38ee5b7e6da7f19e9585024262b2cec2656b32151a856b0b",
    "io.delta_delta-kernel-unitycatalog-4.4.0.jar": "cea22dfb4ac562b3cd27bf652697750e8336009d73fb06631363aaaad5345ffa",
    "io.delta_delta-spark_4.2_2.13-4.4.0.jar": "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead",
    "io.delta_delta-storage-4.4.0.jar": "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc",
    "io.unitycatalog_unitycatalog-client-0.6.0.jar": "48257499a86b801a3e2372cec55ac226ca1c1c7eabe5c118e7302f29a1fdbc19",
    "io.unitycatalog_unitycatalog-hadoop-0.6.0.jar": "c47b63c961c87102b9e1d63809a0915ba4c86b7652f57c8d39ca3a05b441a150",
}
_ICEBERG_JAR = "org.apache.iceberg_iceberg-spark-runtime-4.1_2.13-1.12.0.jar"
_ICEBERG = {_ICEBERG_JAR: "3123c3798af642dd537230923548e013ef41cc28b6626e5225808cf5670a0f82"}
JARS = {"delta": _DELTA, "iceberg": _ICEBERG}
"""The files of each format, and their SHA-256."""
_NOT_WANTED = "org.apache.hadoop:*,org.apache.logging.log4j:*,org.apache.parquet:*,com.fasterxml.jackson*:*,org.slf4j:*"


def default_directory() -> Path:
    """Inside the virtual environment, beside the packages it belongs to."""
    return Path(sys.prefix) / "share" / "tidemark" / "jars"


def present(directory: Path, lake: str) -> list[Path]:
    """A format's jars, if all are there with the right content; else none."""
    expected = JARS[lake]
    paths = [directory / name for name in expected]
    return (
        paths
        if all(path.is_file() and _digest(path) == expected[path.name] for path in paths)
        else []
    )


def install(directory: Path, lake: str) -> list[Path]:
    """Fetch what is missing of a format's jars.

    Raises:
        SourceError: ErrJavaNotFound, ErrJarsUnavailable.
    """
    if installed := present(directory, lake):
        return installed
    check_java()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".ivy-") as cache:
        _resolve(COORDINATES[lake], cache)
        for name, digest in JARS[lake].items():
            fetched = Path(cache) / "jars" / name
            if not fetched.is_file() or _digest(fetched) != digest:
                raise SourceError(
                    "ErrJarsUnavailable",
                    f"{name} was not fetched as tested; see the resolver's lines above",
                )
            shutil.move(fetched, directory / name)
    return present(directory, lake)


def _resolve(coordinates: str, cache: str) -> None:
    from py4j.protocol import Py4JError  # type: ignore[import-untyped]
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]")
    settings = {
        "spark.jars.packages": coordinates,
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
            "ErrJarsUnavailable",
            f"Spark could not fetch {coordinates} ({err}); is a Maven repository reachable?",
        ) from None


def _digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def main() -> int:
    """Install the jars; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m pyspark_tidemark.jars", description="Fetch the jars of formats."
    )
    add = parser.add_argument
    add(
        "--dir",
        type=Path,
        default=default_directory(),
        help="where to put them (default: %(default)s)",
    )
    add("formats", nargs="*", metavar="FORMAT", help=f"{' or '.join(JARS)} (default: all)")
    given = parser.parse_args()
    try:
        for lake in given.formats or JARS:
            if lake not in JARS:
                parser.error(f"there are no jars for {lake!r}; there are for {', '.join(JARS)}")
            _install_apart(given.dir, lake)
    except SourceError as err:
        sys.stderr.write(f"{err}\n")
        return 1
    return 0


def _install_apart(directory: Path, lake: str) -> None:
    """A JVM resolves packages only when it starts, so each format has a process of its own."""
    if present(directory, lake):
        return
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as processes:
        processes.submit(install, directory, lake).result()


if __name__ == "__main__":
    sys.exit(main())
