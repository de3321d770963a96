"""`DATA/sql`: a Spark SQL shell that knows the lake's tables,
as a script that can be started from anywhere.
"""

import shlex
import sys
from collections.abc import Iterable
from pathlib import Path

from pyspark_tidemark.jars import default_directory, install

_SETTINGS = {
    "spark.master": "local[1]",
    "spark.sql.catalogImplementation": "in-memory",
    "spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension",
    "spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog",
    "spark.sql.session.timeZone": "UTC",
    # a few thousand rows: more partitions cost more than they save
    "spark.sql.shuffle.partitions": "1",
    "spark.databricks.delta.snapshotPartitions": "1",
    "spark.ui.enabled": "false",
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.driver.extraJavaOptions": "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC",
}
# not before: statements without rows would print one, too
_HEADERS = "SET spark.sql.cli.print.header=true;\n"
_QUIET = "rootLogger.level = error\nrootLogger.appenderRef.console.ref = console\n" + "".join(
    f"appender.console.{line}\n"
    for line in (
        "type = Console",
        "name = console",
        "target = SYSTEM_ERR",
        "layout.type = PatternLayout",
    )
)


def write_shell(script: Path, lake: Path, tables: Iterable[str]) -> None:
    """Write the script, and beside it the directory `spark` with its settings;
    `tables` are `database.table`.

    Raises:
        SourceError: ErrJavaNotFound, ErrJarsUnavailable.
    """
    spark = script.parent / "spark"
    spark.mkdir(exist_ok=True)
    jars = ",".join(map(str, install(default_directory(), "delta")))
    settings = _SETTINGS | {"spark.jars": jars, "spark.sql.warehouse.dir": str(spark / "warehouse")}
    lines = "".join(f"{name} {value}\n" for name, value in settings.items())
    (spark / "spark-defaults.conf").write_text(lines, encoding="utf-8")
    (spark / "log4j2.properties").write_text(_QUIET, encoding="utf-8")
    (spark / "tables.sql").write_text(
        "".join([*_statements(lake, tables), _HEADERS]), encoding="utf-8"
    )
    program = Path(sys.executable).parent / "spark-sql"
    script.write_text(
        "#!/bin/sh\n"
        f"export PYSPARK_PYTHON={shlex.quote(sys.executable)} "
        f"SPARK_CONF_DIR={shlex.quote(str(spark))}\n"
        f'exec {shlex.quote(str(program))} -i {shlex.quote(str(spark / "tables.sql"))} "$@"\n',
        encoding="utf-8",
    )
    script.chmod(0o755)


def _statements(lake: Path, tables: Iterable[str]) -> Iterable[str]:
    for name in tables:
        schema, table = name.split(".")
        place = str(lake / schema / table).replace("'", "\\'")
        yield (
            f"CREATE DATABASE IF NOT EXISTS {schema};\nCREATE TABLE {name} USING delta LOCATION "
            f"'{place}';\n"
        )
