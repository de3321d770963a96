"""The Java that Spark runs on: looked for before anything is started, and an archive of the classes
that Spark loads, so that a job starts in little more than half the time.

Spark, Delta and Iceberg load some 20,000 classes before their first cut, and Java parses and
verifies each of them in every new JVM. A class archive (Java's CDS) has them ready to be mapped.
It is made once, by `python -m pyspark_tidemark.jars`, and lies beside the jars. So does a home of
Spark without its MLlib, for applications on this machine: of all that Spark does when a session
begins, MLlib's functions, which no lake needs, take the most (reflection, and classes that are
looked for in every jar). It has no Python either: Spark puts its `pyspark.zip` before the installed
package, and each of its Python processes would compile what it imports anew, half a second of CPU.

An archive belongs to one Java and one class path. Its name is a digest of both, and Java itself
ignores an archive that does not fit, so an archive changes how fast a job starts and nothing else.
"""

import contextlib
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from pyspark_tidemark.errors import SourceError

OLDEST = 17
_VERSION = re.compile(r'version "(?P<major>\d+)')
_ADVICE = (
    f"Spark needs a JDK of version {OLDEST} or later; install one (Debian: "
    "openjdk-17-jre-headless) or set JAVA_HOME"
)
_MLLIB = "spark-mllib_"
_HOME_PARTS = ("bin", "conf", "sbin")
"""What a home of Spark has besides jars; `conf` only where somebody has made it."""
_HOME_VERSION = 2
"""Of what such a home has, for those that an older version of this has made."""
QUIET = "-Xlog:cds=error -Xlog:cds+dynamic=error"
"""Options that silence what Java warns of: every class that an archive cannot hold, and an archive
that does not fit.
"""
LOG_ERRORS_ONLY = """\
# Errors only. The threshold is the appender's: shells announce it if it is that of the root logger.
rootLogger.level = warn
rootLogger.appenderRef.console.ref = console
appender.console.type = Console
appender.console.name = console
appender.console.target = SYSTEM_ERR
appender.console.layout.type = PatternLayout
appender.console.filter.threshold.type = ThresholdFilter
appender.console.filter.threshold.level = error
"""
"""`log4j2.properties` by which Spark logs errors only, to standard error."""


def java_program() -> str:
    """The Java that Spark's launcher takes.

    Raises:
        SourceError: ErrJavaNotFound, there is none.
    """
    home = os.environ.get("JAVA_HOME")
    program = f"{home}/bin/java" if home else shutil.which("java")
    if program is None:
        raise SourceError("ErrJavaNotFound", f"there is no java on the PATH; {_ADVICE}")
    return program


def check_java() -> None:
    """Check that Spark's launcher will find a Java that it can use.

    Raises:
        SourceError: ErrJavaNotFound.
    """
    program = java_program()
    try:
        done = subprocess.run(
            [program, "-version"], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as err:
        raise SourceError(
            "ErrJavaNotFound", f"cannot run {program}: {err.strerror}; {_ADVICE}"
        ) from None
    version = _VERSION.search(done.stderr + done.stdout)
    if version is None or int(version["major"]) < OLDEST:
        shown = (done.stderr + done.stdout).strip().splitlines()
        raise SourceError(
            "ErrJavaNotFound", f"{program} says {shown[0] if shown else 'nothing'!r}; {_ADVICE}"
        )


def spark_home(directory: Path) -> Path | None:
    """The home without MLlib in `directory`; None: there is none of this Spark."""
    home = _home_path(directory)
    kept = {jar.name for jar in _jars_without_mllib()}
    try:
        there = {jar.name for jar in (home / "jars").iterdir()}
    except OSError:
        return None
    return home if there == kept else None


def make_spark_home(directory: Path) -> None:
    """Make the home in `directory`, of links to Spark's files, and remove homes of other Sparks.

    Raises:
        OSError: `directory` is not ours to write.
    """
    home = _home_path(directory)
    if spark_home(directory) is None:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as scratch:
            made = Path(scratch) / "home"
            (made / "jars").mkdir(parents=True)
            for jar in _jars_without_mllib():
                (made / "jars" / jar.name).symlink_to(jar)
            for part in _HOME_PARTS:
                (made / part).symlink_to(_pyspark_directory() / part)
            shutil.rmtree(home, ignore_errors=True)
            made.rename(home)
    for old in directory.glob("spark-home-*"):
        if old != home:
            shutil.rmtree(old, ignore_errors=True)


def _home_path(directory: Path) -> Path:
    # Not at the top: daemons ask this module for Java alone.
    import pyspark

    made_of = f"{pyspark.__version__}\n{_pyspark_directory()}\n{_HOME_VERSION}"
    digest = hashlib.sha256(made_of.encode()).hexdigest()
    return directory / f"spark-home-{digest[:16]}"


def _jars_without_mllib() -> list[Path]:
    jars = (_pyspark_directory() / "jars").glob("*.jar")
    return [jar for jar in jars if not jar.name.startswith(_MLLIB)]


def _pyspark_directory() -> Path:
    import pyspark

    return Path(pyspark.__file__).resolve().parent


def java_options(directory: Path, class_path: Sequence[Path]) -> str:
    """What makes Java use the archive in `directory` for Spark and `class_path`; "" without one."""
    archive = archive_path(directory, class_path)
    return f"-XX:SharedArchiveFile={archive} {QUIET}" if archive.is_file() else ""


def make_class_archive(directory: Path, class_path: Sequence[Path]) -> None:
    """Make the archive for Spark and `class_path`, as `lake.session` sets it, and remove
    others from `directory`.

    It takes half a minute, and some 200 MB of disk.

    Raises:
        SourceError: ErrJavaNotFound, ErrClassArchive.
        OSError: the disk is full, or `directory` is not ours to write.
    """
    archive = archive_path(directory, class_path)
    directory.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=directory, prefix=".making-") as scratch:
        made = Path(scratch) / "classes.jsa"
        training = [sys.executable, "-m", "pyspark_tidemark.class_training", str(made), scratch]
        log = directory / "classes.log"
        with log.open("wb") as output:
            done = subprocess.run(training, stdout=output, stderr=output, check=False)
        if done.returncode != 0 or not made.is_file():
            raise SourceError("ErrClassArchive", f"Spark wrote none; see its lines in {log}")
        # Renamed in one step: a job that starts meanwhile sees all of the archive, or none.
        made.replace(archive)
    for old in directory.glob("*.jsa"):
        if old != archive:
            old.unlink(missing_ok=True)


def archive_path(directory: Path, class_path: Sequence[Path]) -> Path:
    """Where the archive is, or would be, for this Java, this Spark and `class_path`."""
    # Not at the top: daemons ask this module for Java alone.
    import pyspark

    java = Path(java_program()).resolve()
    parts = [pyspark.__version__, str(java), *map(str, class_path)]
    parts += [str(home)] if (home := spark_home(directory)) else []
    # Where there is no such Java, Spark's start says so.
    with contextlib.suppress(OSError):
        parts.append(str(java.stat().st_mtime_ns))
    digest = hashlib.sha256("\n".join(parts).encode()).hexdigest()
    return directory / f"spark-{digest[:16]}.jsa"
