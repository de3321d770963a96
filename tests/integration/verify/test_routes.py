"""Tables of a real MariaDB under other names in a lake in PostgreSQL, kept by worker processes:
the dump, the log, DDLs and verify agree, and two tables never become one.
"""

from uuid import uuid4

import pytest

from tests.integration.capture.processes import running_cluster
from tests.integration.lake.test_job_errors import until
from tests.integration.verify.test_database import Lake, verify

pytestmark = pytest.mark.timeout(500)
# The names change places: each is also that of another table in the source.
ROUTES = ("shop_a.*=shop_b.{table}", "shop_b.*=shop_a.{table}", "shop_c.*=shop_b.{table}")


@pytest.fixture(params=["0", "2"], ids=["one process", "workers"])
def cluster(request, tmp_path):
    with running_cluster(tmp_path, "--workers", request.param) as running:
        yield running


def test_tables_keep_their_other_names_through_dump_ddl_and_verify(cluster, mariadb, postgres):
    for name in ("shop_a", "shop_b", "shop_c"):
        mariadb.execute(
            f"CREATE OR REPLACE DATABASE {name}",
            f"USE {name}",
            "CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(20))",
            f"INSERT INTO t SELECT seq, CONCAT('{name}', seq) FROM seq_1_to_500",
        )
    uri = postgres.create(f"routes{uuid4().hex[:8]}")
    create = ["changefeed", "create", "-c", "routes", "--sink-uri", uri]
    create += ["--source-uri", f"{mariadb.uri}?idle-row-ms=300"]
    routes = [part for route in ROUTES for part in ("--route", route)]
    refused = cluster.cli(*create, "--filter", "shop_*.t", *routes)
    assert "ErrTableRouteConflict" in refused
    assert "shop_a.t and shop_c.t would both be shop_b.t" in refused
    create += ["--filter", "shop_*.*", "--filter", "!shop_c.t"]
    assert "decides of no table" in cluster.cli(*create, *routes)
    routes = [*routes[:4], "--route", "shop_c.*=shop_b.{table}"]
    mariadb.execute("CREATE TABLE shop_c.other (id INT PRIMARY KEY, v VARCHAR(20))")
    explained = cluster.cli(*create, *routes, "--dry-run", "--explain")
    assert {"table": "shop_c.t", "reason": "the rule !shop_c.t of the filter leaves it out"} in (
        explained["not_taken"]
    )
    dry = explained["eligible_tables"]
    assert {each["rule"] for each in dry} == {"shop_*.*"}
    assert cluster.cli("changefeed", "list") == []
    assert {each["table"]: each["target"] for each in dry} == {
        "shop_a.t": "shop_b.t",
        "shop_b.t": "shop_a.t",
        "shop_c.other": "shop_b.other",
    }

    made = cluster.cli(*create, *routes)
    assert {each["table"]: each["target"] for each in made["tables"]}["shop_a.t"] == "shop_b.t"
    lake = Lake(cluster, "routes", uri, "upsert")
    assert cluster.cli("changefeed", "dumpstart", "-c", "routes")["state"] == "running"

    def kept(name):
        try:
            return sorted(map(tuple, lake.rows(f"SELECT id, v FROM {name}")))
        except Exception:  # noqa: BLE001 - it may not be there yet
            return None

    def source(name):
        return sorted(map(tuple, mariadb.execute(f"SELECT id, v FROM {name}")))

    def same(**names):
        return all(kept(new.replace("__", ".")) == source(old) for new, old in names.items())

    mariadb.execute(
        "UPDATE shop_a.t SET v = 'log' WHERE id < 9", "DELETE FROM shop_b.t WHERE id > 9"
    )
    end = lake.follow(
        int(made["start_ts"]), lambda: same(shop_b__t="shop_a.t", shop_a__t="shop_b.t")
    )
    assert verify(cluster, "-c", "routes")[0] == 0

    mariadb.execute(
        "TRUNCATE TABLE shop_a.t",
        "INSERT INTO shop_a.t VALUES (1, 'after')",
        "RENAME TABLE shop_b.t TO shop_b.u",
        "ALTER TABLE shop_b.u MODIFY v VARCHAR(40)",
        "INSERT INTO shop_b.u VALUES (1000, 'renamed')",
        "CREATE TABLE shop_b.t (id INT PRIMARY KEY, v VARCHAR(20))",
        "INSERT INTO shop_b.t VALUES (2, 'new')",
    )
    end = lake.follow(
        end,
        lambda: same(shop_b__t="shop_a.t", shop_a__u="shop_b.u", shop_a__t="shop_b.t"),
    )
    status, document, _ = verify(cluster, "-c", "routes")
    assert (status, document["equal"]) == (0, True)
    assert {each["table"] for each in document["tables"]} >= {"shop_a.t", "shop_b.u", "shop_b.t"}
    lake.execute("DELETE FROM shop_a.u WHERE id = 1000")
    status, document, _ = verify(cluster, "-c", "routes", "--table", "shop_b.u")
    assert (status, document["tables"][0]["differing_rows"]) == (1, 1)

    mariadb.execute(
        "INSERT INTO shop_a.t VALUES (3, 'before')",
        "CREATE TABLE shop_c.t2 (id INT PRIMARY KEY, v VARCHAR(20))",
        "RENAME TABLE shop_a.t TO shop_a.t2",
    )
    lake.follow(end, lambda: _shown(cluster)["state"] == "failed")
    error = _shown(cluster)["error"]
    assert error["code"] == "TM:ErrTableRouteConflict"
    assert "shop_c.t2 and shop_a.t2 would both be shop_b.t2" in error["message"]
    assert (3, "before") in kept("shop_b.t"), "what was before it is delivered"
    until(lambda: _shown(cluster)["state"], "failed")


def _shown(cluster):
    return cluster.cli("changefeed", "query", "-c", "routes")
