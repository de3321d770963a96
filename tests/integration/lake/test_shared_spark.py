"""Several lake jobs of `tidemark spark keep` in one Spark application: one JVM, and each job for
itself, whatever happens to another one.
"""

import contextlib
import io
import json
import os
import signal
import urllib.parse
import urllib.request
from pathlib import Path

import pytest
from pyspark_tidemark.application import Gateways, serve
from pyspark_tidemark.lake.reading import as_of_cut

from tests.integration.capture.processes import running_cluster
from tests.integration.lake.test_databases import rows as rows_of_database
from tests.integration.lake.test_job_errors import keeping, until
from tests.mariadb import running_mariadb
from tests.ports import free_port

pytestmark = pytest.mark.timeout(500)


def processes(keeper, word):
    """The processes under `keeper` whose command line has `word`, by pid."""
    parents, lines = {}, {}
    for each in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(each.name)] = int((each / "stat").read_text().rpartition(")")[2].split()[1])
            lines[int(each.name)] = (each / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
    under = {keeper.pid}
    while more := {pid for pid, parent in parents.items() if parent in under} - under:
        under |= more
    return {pid: lines[pid] for pid in under if word in lines[pid]}


def jvms(keeper):
    return processes(keeper, "SparkSubmit")


def job_of(keeper, changefeed):
    return next(iter(processes(keeper, f"--changefeed {changefeed} ")))


def listening(pid):
    """The ports at which a process listens."""
    own, ports = set(), set()
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(OSError):  # closed meanwhile
            own.add(str(each.readlink()))
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                ports.add(int(fields[1].rpartition(":")[2], 16))
    return ports


def test_the_application_closes_the_gateway_of_a_changefeed_that_is_gone(spark):
    """Each one that was removed left a server in the JVM that the others share."""
    out, gateways = io.StringIO(), Gateways(spark)
    shop, other = {"changefeed": "shop"}, {"changefeed": "other"}
    lines = [shop, other, shop | {"ended": True}, shop | {"ended": True}]
    serve(gateways, io.StringIO("".join(json.dumps(line) + "\n" for line in lines)), out)
    answers = [json.loads(line) for line in out.getvalue().splitlines()]
    assert answers[0] == {"ready": True}
    assert answers[3:] == [{"closed": True}, {"closed": False}]
    # Not by connecting: another process may have been given the port by now.
    ports = listening(spark._jvm.java.lang.ProcessHandle.current().pid())
    gateways.close("other")
    assert [answer["port"] in ports for answer in answers[1:3]] == [False, True]


def test_jobs_share_a_jvm_and_nothing_else(spark, postgres, tmp_path):
    targets = {
        "delta": f"delta://{tmp_path}/delta?write=spark",
        "delta2": f"delta://{tmp_path}/delta2?mode=scd2",
        "iceberg": f"iceberg://{tmp_path}/iceberg?write=spark",
        "parquet": f"parquet://{tmp_path}/parquet",
        "postgres": postgres.create("shared"),
    }
    with running_mariadb() as server, running_cluster(tmp_path) as cluster:
        server.execute("CREATE DATABASE shop", "CREATE TABLE shop.a (id INT PRIMARY KEY, v INT)")
        for name, target in targets.items():
            made = cluster.cli(
                *("changefeed", "create", "-c", name, "--sink-uri", target, "--filter", "shop.*"),
                *("--source-uri", f"{server.uri}?idle-row-ms=300"),
            )
            assert made["state"] == "normal", made
        number = 0

        def change():
            nonlocal number
            number += 1
            server.execute(
                f"INSERT INTO shop.a VALUES ({number}, 0)", "UPDATE shop.a SET v = v + 1"
            )

        def all_are_current():
            """Every lake has the newest row."""
            for name, target in targets.items():
                until(lambda name=name, target=target: newest(spark, name, target), number)

        with keeping(cluster, tmp_path, "--ui-port", str(free_port())) as keeper:
            change()
            all_are_current()
            assert len(jvms(keeper)) == 1
            # Spark's UI, which all of them tell of, is on loopback.
            shown = {
                cluster.cli("changefeed", "query", "-c", name)["lake_job"]["spark_ui"]
                for name in targets
            }
            (ui,) = shown
            assert urllib.parse.urlsplit(ui).hostname == "127.0.0.1"
            assert b"Spark Jobs" in urllib.request.urlopen(f"{ui}/jobs/", timeout=60).read()
            before = jvms(keeper)

            # One that ends and begins anew ends no other one.
            jobs = {name: job_of(keeper, name) for name in targets}
            cluster.cli("changefeed", "pause", "-c", "delta")
            until(lambda: processes(keeper, "--changefeed delta "), {})
            cluster.cli("changefeed", "resume", "-c", "delta")
            change()
            all_are_current()
            assert jvms(keeper) == before
            others = {name: job_of(keeper, name) for name in targets} | {"delta": 0}
            assert others == jobs | {"delta": 0}

            # Nor does one that is asked to end while it starts.
            cluster.cli("changefeed", "pause", "-c", "delta")
            until(lambda: processes(keeper, "--changefeed delta "), {})
            cluster.cli("changefeed", "resume", "-c", "delta")
            until(lambda: bool(processes(keeper, "--changefeed delta ")), True)
            cluster.cli("changefeed", "pause", "-c", "delta")
            until(lambda: processes(keeper, "--changefeed delta "), {})
            cluster.cli("changefeed", "resume", "-c", "delta")
            change()
            all_are_current()
            assert jvms(keeper) == before

            # What one that was killed has begun may go on in the JVM: all begin anew.
            os.kill(job_of(keeper, "iceberg"), signal.SIGKILL)
            change()
            all_are_current()
            assert len(jvms(keeper)) == 1
            assert jvms(keeper) != before

            os.kill(next(iter(jvms(keeper))), signal.SIGKILL)
            change()
            all_are_current()
            assert len(jvms(keeper)) == 1
        for name, target in targets.items():
            assert counted(spark, name, target) == number, name


def held(spark, name, target):
    if name == "postgres":
        return [(row["id"], row["v"]) for row in rows_of_database(target, "shop.a")]
    frame = as_of_cut(spark, target.partition("?")[0])["shop.a"]
    if name == "delta2":
        frame = frame.where("is_current")
    return [(row["id"], row["v"]) for row in frame.collect()]


def newest(spark, name, target):
    try:
        return max(key for key, _ in held(spark, name, target))
    except Exception as err:  # noqa: BLE001 - it may not be there yet
        return f"{name}: {err}"


def counted(spark, name, target):
    """How many rows there are, each of which was updated as often as it should; changes of a
    changelog.
    """
    rows = held(spark, name, target)
    if name == "parquet":
        total = max(key for key, _ in rows)
        # An insert for each change, and an update of each row that was there.
        assert len(rows) == len({*rows}) == total + total * (total + 1) // 2
        return total
    total = len(rows)
    assert sorted(rows) == [(key, total - key + 1) for key in range(1, total + 1)]
    return total
