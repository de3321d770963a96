"""Jars of lake formats: `python -m pyspark_tidemark.jars [--dir DIR] [FORMAT …]` puts them into a
directory, once. `iceberg-s3` is what Iceberg needs besides where its files are in S3; `all` stands
for everything.

Spark's own resolver (Ivy) fetches them. Those that a format's record lists (`lake.format.Jars`) are
kept, and no others that their metadata asks for, because Spark has newer versions of these. A jar
whose content is not the one tested is refused. In the end the classes of all formats go into a
class archive.
"""

import argparse
import functools
import hashlib
import multiprocessing
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.java import archive_path, check_java, make_class_archive, make_spark_home
from pyspark_tidemark.lake.registry import FORMATS, find_format

_FORMATS = {name: record.jars for name, record in FORMATS.items() if record.jars is not None}
JARS = _FORMATS | {
    f"{name}-{store}": jars
    for name, record in FORMATS.items()
    for store, jars in record.store_jars.items()
}
"""Those of each format that needs some, and those of formats in object stores."""
_ALL = "all"
_NOT_WANTED = "org.apache.hadoop:*,org.apache.logging.log4j:*,org.apache.parquet:*,com.fasterxml.jackson*:*,org.slf4j:*"


def default_directory() -> Path:
    """Inside the virtual environment, beside the packages it belongs to."""
    return Path(sys.prefix).resolve() / "share" / "tidemark" / "jars"


def present(directory: Path, lake: str) -> list[Path]:
    """A format's jars, if all are there with the right content; else none."""
    expected = JARS[lake].digests
    paths = [directory / name for name in expected]
    return (
        paths
        if all(path.is_file() and _digest(path) == expected[path.name] for path in paths)
        else []
    )


def of_stores(directory: Path, lake: str) -> list[Path]:
    """Those that are there of what a format needs for its files in object stores."""
    stores = find_format(lake).store_jars
    return [path for store in stores for path in present(directory, f"{lake}-{store}")]


def installed(directory: Path) -> list[Path]:
    """The jars of all formats whose jars are there, in an order that is always the same."""
    return [path for lake in JARS for path in present(directory, lake)]


def _log_of(directory: Path, lake: str) -> Path:
    """What Spark and its resolver say while they fetch a format's jars."""
    return directory / f"{lake}.log"


def install(directory: Path, lake: str) -> list[Path]:
    """Fetch those of a format's jars that are missing.

    Raises:
        SourceError: ErrJavaNotFound, ErrJarsUnavailable.
    """
    if paths := present(directory, lake):
        return paths
    check_java()
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".ivy-") as cache:
        _resolve(JARS[lake].coordinates, cache, _log_of(directory, lake))
        for name, digest in JARS[lake].digests.items():
            fetched = Path(cache) / "jars" / name
            if not fetched.is_file() or _digest(fetched) != digest:
                raise SourceError(
                    "ErrJarsUnavailable",
                    f"{name} was not fetched as tested; see the resolver's lines in "
                    f"{_log_of(directory, lake)}",
                )
            shutil.move(fetched, directory / name)
    return present(directory, lake)


def _resolve(coordinates: str, cache: str, log: Path) -> None:
    from py4j.protocol import Py4JError
    from pyspark.errors import PySparkException
    from pyspark.sql import SparkSession

    builder = SparkSession.builder.master("local[1]")
    settings = {
        "spark.jars.packages": coordinates,
        "spark.jars.excludes": _NOT_WANTED,
        "spark.jars.ivy": cache,
        # The resolver looks into ~/.m2 first, and ends with "download failed" where Maven has left
        # the description of a package there without its jar, as it does for most.
        "spark.driver.extraJavaOptions": f"-Duser.home={cache}",
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
            f"Spark could not fetch {coordinates} ({err}); is a Maven repository reachable? {log} has its lines",
        ) from None


def _digest(path: Path) -> str:
    status = path.stat()
    return _digest_of(path, status.st_mtime_ns, status.st_size)


@functools.cache
def _digest_of(path: Path, _mtime_ns: int, _size: int) -> str:
    """A session looks at each jar more than once, and 50 MB are worth reading once."""
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
    add(
        "--no-class-archive",
        action="store_true",
        help="save 200 MB of disk; jobs take some seconds more to start",
    )
    add(
        "formats",
        nargs="*",
        metavar="FORMAT",
        help=f"{', '.join(JARS)}, or {_ALL} of them (default: {', '.join(_FORMATS)})",
    )
    given = parser.parse_args()
    try:
        for lake in JARS if _ALL in given.formats else given.formats or _FORMATS:
            if lake not in JARS:
                parser.error(f"there are no jars for {lake!r}; there are for {', '.join(JARS)}")
            _install_in_process(given.dir, lake)
        if given.dir == default_directory():
            _make_start_fast(given.dir, with_archive=not given.no_class_archive)
    except SourceError as err:
        sys.stderr.write(f"{err}\n")
        return 1
    return 0


def _make_start_fast(directory: Path, *, with_archive: bool) -> None:
    """Make what lets Spark start faster, if it can be made: jobs start without it, too."""
    try:
        make_spark_home(directory)
    except OSError as err:
        sys.stderr.write(f"jobs start more slowly, with all of Spark's jars: {err}\n")
    if with_archive:
        _make_class_archive(directory)


def _make_class_archive(directory: Path) -> None:
    jars = installed(directory)
    if archive_path(directory, jars).is_file():
        return
    sys.stderr.write(
        "archiving the classes of Spark's JVM, once (half a minute, or some minutes on a busy machine)\n"
    )
    try:
        make_class_archive(directory, jars)
    except (SourceError, OSError) as err:
        sys.stderr.write(f"no class archive was made, so jobs start more slowly: {err}\n")


def install_some(directory: Path, formats: Iterable[str]) -> None:
    """Fetch the jars of formats that are missing; what cannot be had is told on standard error, and
    its changefeeds fail by name.
    """
    for lake in _FORMATS.keys() & {*formats}:
        try:
            _install_in_process(directory, lake)
        except SourceError as err:
            sys.stderr.write(f"WARNING: {err}\n")


def _install_in_process(directory: Path, lake: str) -> None:
    """A JVM resolves packages only when it starts, so each format has a process of its own."""
    if present(directory, lake):
        return
    directory.mkdir(parents=True, exist_ok=True)
    log = _log_of(directory, lake)
    sys.stderr.write(f"fetching the jars of {lake}; Spark's lines go to {log}\n")
    with ProcessPoolExecutor(
        1,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_write_to,
        initargs=(log,),
    ) as processes:
        jars = processes.submit(install, directory, lake).result()
    megabytes = sum(jar.stat().st_size for jar in jars) / 1e6
    sys.stderr.write(f"jars of {lake}: {len(jars)}, {megabytes:.0f} MB\n")


def _write_to(log: Path) -> None:
    """Send this process's output to a file, and that of the JVM which it starts."""
    with log.open("wb") as file:
        for descriptor in (sys.stdout.fileno(), sys.stderr.fileno()):
            os.dup2(file.fileno(), descriptor)


if __name__ == "__main__":
    sys.exit(main())
