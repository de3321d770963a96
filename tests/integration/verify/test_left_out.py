"""A column that a rule leaves out of a real MariaDB's table never comes to the lake: not by a new
name, and not by a new name in a log that was skipped.
"""

import pytest
from pyspark_tidemark.flight import Changefeed
from pyspark_tidemark.options import parse

from tests.integration.capture.processes import running_cluster
from tests.integration.spark.cluster import flight
from tests.integration.verify.test_database import Lake, verify

pytestmark = pytest.mark.timeout(500)
COLUMNS = (
    "SELECT column_name FROM information_schema.columns "
    "WHERE table_schema = 'crm' AND table_name = 'people'"
)


def test_a_left_out_column_stays_out_through_renames_and_a_skipped_log(mariadb, postgres, tmp_path):
    mariadb.execute(
        "CREATE OR REPLACE DATABASE crm",
        "CREATE TABLE crm.people (id INT PRIMARY KEY, name VARCHAR(20), phone VARCHAR(20))",
        "INSERT INTO crm.people VALUES (1, 'a', '555')",
    )
    uri = postgres.create("leftout")
    with running_cluster(tmp_path) as cluster:
        made = cluster.cli(
            *("changefeed", "create", "-c", "out", "--sink-uri", uri, "--filter", "crm.*"),
            *("--source-uri", f"{mariadb.uri}?idle-row-ms=300", "--columns", "crm.*=*,!phone"),
        )
        lake = Lake(cluster, "out", uri, "upsert")
        cluster.cli("changefeed", "dumpstart", "-c", "out")

        def rows():
            try:
                return sorted(map(tuple, lake.rows("SELECT id, name FROM crm.people")))
            except Exception:  # noqa: BLE001 - it may not be there yet
                return None

        def columns():
            return {name for (name,) in lake.rows(COLUMNS)} - {"_commit_ts", "_start_ts", "_seq"}

        end = lake.follow(int(made["start_ts"]), lambda: rows() == [(1, "a")])
        mariadb.execute(
            "ALTER TABLE crm.people RENAME COLUMN phone TO tel",
            "INSERT INTO crm.people VALUES (2, 'b', '666')",
        )
        lake.follow(end, lambda: rows() == [(1, "a"), (2, "b")])
        assert columns() >= {"id", "name"}
        assert not columns() & {"phone", "tel"}
        status, document, _ = verify(cluster, "-c", "out")
        assert (status, document["equal"]) == (0, True)

        cluster.cli("changefeed", "pause", "-c", "out")
        mariadb.execute("ALTER TABLE crm.people RENAME COLUMN tel TO mobile")
        resume = ("changefeed", "resume", "-c", "out", "--no-confirm")
        resume += ("--overwrite-checkpoint-ts", "now")
        refused = cluster.cli(*resume)
        assert "has no column tel any more" in refused
        assert "has mobile instead" in refused
        mariadb.execute("ALTER TABLE crm.people RENAME COLUMN mobile TO tel")
        resumed = cluster.cli(*resume)
        assert resumed["state"] == "normal", resumed
        options = {"endpoint": flight(cluster), "changefeed": "out", "cuts": "true"}
        people = Changefeed(parse(options)).describe().tables["crm.people"]
        assert {"id", "name"} <= set(people.schema.names)
        assert not {"phone", "tel", "mobile"} & set(people.schema.names)
