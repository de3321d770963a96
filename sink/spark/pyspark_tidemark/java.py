"""The Java that Spark will run on, looked for before anything is started."""

import os
import re
import shutil
import subprocess

from pyspark_tidemark.errors import SourceError

OLDEST = 17
_VERSION = re.compile(r'version "(?P<major>\d+)')
_ADVICE = (
    f"Spark needs a JDK of version {OLDEST} or later; install one (Debian: "
    "openjdk-17-jre-headless) or set JAVA_HOME"
)


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
    """See that Spark's launcher will find a Java that it can use.

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
