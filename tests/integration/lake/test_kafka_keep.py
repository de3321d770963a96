"""From MariaDB to a topic under `tidemark spark keep`, by a login: rows with what they were before,
once each, though the job is killed; and the password stands nowhere.
"""

import contextlib
import os
import signal
import subprocess
from pathlib import Path

import pytest

from tests.e2e.kill_matrix import command, descendants
from tests.integration.capture.processes import COMMAND, running_cluster
from tests.integration.lake.test_job_errors import until
from tests.kafka import PASSWORD, USER
from tests.kafka_messages import received, row_messages
from tests.mariadb import running_mariadb

pytestmark = pytest.mark.timeout(500)


@contextlib.contextmanager
def keeping(cluster, directory):
    """`tidemark spark keep` for the block, with an event log of Spark's."""
    (directory / "events").mkdir()
    flags = ["--capture", cluster.capture.endpoints["capture"], "--http-addr", "127.0.0.1:0"]
    flags += ["--checkpoint-dir", str(directory / "checkpoints"), "--trigger", "0 seconds"]
    flags += ["--conf", "spark.eventLog.enabled=true"]
    flags += ["--conf", f"spark.eventLog.dir={(directory / 'events').as_uri()}"]
    with (directory / "keep.log").open("wb") as log:
        process = subprocess.Popen(
            [*COMMAND, "spark", "keep", "--master", "local[1]", *flags], stdout=log, stderr=log
        )
    try:
        yield process
    finally:
        process.terminate()
        process.wait(100)


def test_a_topic_has_each_change_once_and_nobody_sees_the_password(spark, broker, topic, tmp_path):
    secret = tmp_path / "password"
    secret.write_text(PASSWORD + "\n")
    login = f"sasl-user={USER}&sasl-mechanism=plain&password-file={secret}"
    uri = f"kafka://{broker.sasl_address}/{topic}?protocol=debezium-json&partition-num=2&{login}"

    def changes():
        return [
            (payload["op"], payload["before"], payload["after"])
            for payload in (
                each.document["payload"]
                for each in row_messages(received(spark, broker.address, topic))
            )
            if "op" in payload
        ]

    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute("CREATE DATABASE shop", "CREATE TABLE shop.a (id INT PRIMARY KEY, v INT)")
        server.execute("INSERT INTO shop.a VALUES (1, 10)")
        made = cluster.cli(
            *("changefeed", "create", "-c", "log", "--sink-uri", uri, "--filter", "shop.*"),
            *("--source-uri", f"{server.uri}?idle-row-ms=300", "--dump"),
        )
        assert made["state"] == "normal", made
        with keeping(cluster, tmp_path) as process:
            expected = [("r", None, {"id": 1, "v": 10})]
            until(changes, expected)
            server.execute("UPDATE shop.a SET v = 11", "ALTER TABLE shop.a ADD w INT")
            expected += [("u", {"id": 1, "v": 10}, {"id": 1, "v": 11})]
            until(changes, expected)
            job = only_job(process.pid)
            lines = [command(pid) for pid in (process.pid, *descendants(process.pid))]
            # The JVM goes on; the next job's process takes the topic over in it.
            os.kill(job, signal.SIGKILL)
            server.execute("UPDATE shop.a SET w = 5", "DELETE FROM shop.a")
            expected += [
                ("u", {"id": 1, "v": 11, "w": None}, {"id": 1, "v": 11, "w": 5}),
                ("d", {"id": 1, "v": 11, "w": 5}, None),
            ]
            until(changes, expected)
            assert only_job(process.pid) != job
            until(lambda: cluster.cli("changefeed", "query", "-c", "log")["state"], "normal")
        assert cluster.cli("verify", "-c", "log").count("consume its messages") == 1
    assert list((tmp_path / "events").iterdir())
    logs = [path.read_text(errors="replace") for path in texts(tmp_path, secret)]
    assert not [text for text in (*logs, *lines) if PASSWORD in text]
    statements = {
        each.document["payload"]["ddl"]
        for each in row_messages(received(spark, broker.address, topic))
        if "ddl" in each.document["payload"]
    }
    assert statements == {"ALTER TABLE shop.a ADD w INT"}


def test_routed_tables_have_their_other_names_in_messages_and_statements_no_text(
    spark, broker, topic, tmp_path
):
    uri = f"kafka://{broker.address}/{topic}?protocol=canal-json&partition-num=1"

    def messages():
        documents = [each.document for each in row_messages(received(spark, broker.address, topic))]
        return [
            (each["type"], f"{each['database']}.{each['table']}", each.get("data") or each["sql"])
            for each in documents
        ]

    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        for name in ("shop_a", "shop_b"):
            server.execute(
                f"CREATE DATABASE {name}", f"CREATE TABLE {name}.t (id INT PRIMARY KEY, v INT)"
            )
        server.execute("INSERT INTO shop_a.t VALUES (1, 10)")
        create = ["changefeed", "create", "-c", "routed", "--sink-uri", uri, "--dump"]
        create += ["--filter", "shop_*.*", "--source-uri", f"{server.uri}?idle-row-ms=300"]
        refused = cluster.cli(*create, "--route", "*.*=lake.{table}")
        assert "ErrTableRouteConflict" in refused, "two tables of a topic have two names, too"
        made = cluster.cli(*create, "--route", "shop_a.*=lake.{schema}_{table}")
        assert made["state"] == "normal", made
        with keeping(cluster, tmp_path):
            expected = [("INSERT", "lake.shop_a_t", [{"id": "1", "v": "10"}])]
            until(messages, expected)
            server.execute(
                "ALTER TABLE shop_a.t ADD w INT",
                "ALTER TABLE shop_b.t ADD w INT",
                "INSERT INTO shop_b.t VALUES (2, 20, 200)",
                "RENAME TABLE shop_a.t TO shop_a.u",
                "DELETE FROM shop_a.u",
            )
            expected += [
                ("ALTER", "lake.shop_a_t", ""),
                ("ALTER", "shop_b.t", "ALTER TABLE shop_b.t ADD w INT"),
                ("INSERT", "shop_b.t", [{"id": "2", "v": "20", "w": "200"}]),
                ("RENAME", "lake.shop_a_u", ""),
                ("DELETE", "lake.shop_a_u", [{"id": "1", "v": "10", "w": None}]),
            ]
            until(messages, expected)


def only_job(pid):
    """The process of the one job."""
    jobs = [each for each in descendants(pid) if "pyspark_tidemark.job" in command(each)]
    assert len(jobs) == 1, jobs
    return jobs[0]


def texts(directory: Path, secret: Path):
    """Everything that was written: logs, metadata, checkpoints, Spark's event log."""
    return [path for path in directory.rglob("*") if path.is_file() and path != secret]
