"""Masked columns of a real MariaDB in a lake in PostgreSQL: the dump and the log show them alike,
through renames, restarts and a missing salt; verify compares masked with masked.
"""

import hashlib
import hmac

import pytest

from tests.integration.capture.processes import running_cluster
from tests.integration.lake.test_job_errors import until
from tests.integration.verify.test_database import Lake, verify

pytestmark = pytest.mark.timeout(500)
SALT = "0123456789abcdef-not-to-be-found"
MASKS = (
    "crm.people=email:mask.hash.SHA-256,phone:mask.with.4.chars",
    "crm.*=note:truncate.to.3.chars",
)


def hashed(text):
    if text is None:
        return None
    return hmac.new(SALT.encode(), str(text).encode(), hashlib.sha256).hexdigest()


def masked(rows):
    """What the lake is to have of rows (email, phone, note, n)."""
    return {
        (hashed(email), phone and "****", note and note[:3], n) for email, phone, note, n in rows
    }


@pytest.fixture
def cluster(tmp_path):
    with running_cluster(tmp_path) as running:
        yield running


@pytest.fixture
def salt_file(tmp_path):
    path = tmp_path / "salt"
    path.write_text(SALT + "\n")
    return path


def test_masked_columns_are_one_from_the_dump_to_verify(
    cluster, mariadb, postgres, tmp_path, salt_file
):
    mariadb.execute(
        "CREATE OR REPLACE DATABASE crm",
        "USE crm",
        "CREATE TABLE crm.people (email VARCHAR(60) PRIMARY KEY, phone VARCHAR(20), note TEXT, n INT)",
        "INSERT INTO crm.people SELECT CONCAT('m', seq, '@x.org'), IF(seq % 3, seq, NULL), "
        "CONCAT('nöte', seq), seq FROM seq_1_to_2000",
    )
    uri = postgres.create("masks")
    create = ["changefeed", "create", "-c", "masks", "--sink-uri", uri]
    create += ["--source-uri", f"{mariadb.uri}?idle-row-ms=300", "--filter", "crm.people"]
    refused = cluster.cli(*create, "--mask", "crm.people=email:mask.with.3.chars")
    assert "ErrMaskRuleInvalid" in refused
    assert "email tells rows apart" in refused
    assert "--salt-file" in cluster.cli(*create, "--mask", MASKS[0])
    create += ["--mask", MASKS[0], "--mask", MASKS[1], "--salt-file", str(salt_file)]
    [dry] = cluster.cli(*create, "--dry-run")["eligible_tables"]
    assert dry["masks"] == {
        "email": "mask.hash.SHA-256",
        "phone": "mask.with.4.chars",
        "note": "truncate.to.3.chars",
    }
    assert cluster.cli("changefeed", "list") == []

    made = cluster.cli(*create)
    assert (made["masks"], made["salt_file"]) == (list(MASKS), str(salt_file))
    lake = Lake(cluster, "masks", uri, "upsert")
    assert cluster.cli("changefeed", "dumpstart", "-c", "masks")["state"] == "running"
    mariadb.execute(
        "INSERT INTO crm.people VALUES ('log@x.org', '5', NULL, -1), ('gone@x.org', '6', '', -2)",
        "UPDATE crm.people SET email = 'moved@x.org', n = -3 WHERE email = 'm7@x.org'",
        "DELETE FROM crm.people WHERE email IN ('gone@x.org', 'm8@x.org')",
    )

    def rows():
        try:
            return {tuple(row) for row in lake.rows("SELECT email, phone, note, n FROM crm.people")}
        except Exception:  # noqa: BLE001 - it may not be there yet
            return set()

    def upstream(columns="email, phone, note, n"):
        return masked(mariadb.execute(f"SELECT {columns} FROM crm.people"))

    end = lake.follow(int(made["start_ts"]), lambda: rows() == upstream())
    assert verify(cluster, "-c", "masks")[0] == 0

    cluster.capture.kill()
    cluster.capture.start()
    mariadb.execute(
        "ALTER TABLE crm.people CHANGE phone telephone VARCHAR(20), ADD COLUMN note2 VARCHAR(9) "
        "DEFAULT 'hidden', CHANGE note remark TEXT",
        "INSERT INTO crm.people VALUES ('late@x.org', '9', 'later', 0, 'x')",
        "UPDATE crm.people SET n = n + 1 WHERE n < 50",
    )

    until(lambda: bool(_shown(cluster)["maintainer"]), True)

    def renamed():
        try:
            query = "SELECT email, telephone, remark, n FROM crm.people"
            return {tuple(row) for row in lake.rows(query)}
        except Exception:  # noqa: BLE001 - the columns may not be there yet
            return set()

    end = lake.follow(end, lambda: renamed() == upstream("email, telephone, remark, n"))
    status, document, _ = verify(cluster, "-c", "masks")
    assert (status, document["equal"]) == (0, True)
    lake.execute(f"UPDATE crm.people SET remark = 'bad' WHERE email = '{hashed('late@x.org')}'")
    status, document, _ = verify(cluster, "-c", "masks")
    [difference] = document["tables"][0]["differences"]
    assert (status, difference["key"]) == (1, {"email": hashed("late@x.org")})
    assert difference["upstream"]["remark"] == "lat"

    lake.execute(f"UPDATE crm.people SET remark = 'lat' WHERE email = '{hashed('late@x.org')}'")

    cluster.capture.stop()
    salt_file.write_text("another salt than before")
    cluster.capture.start()
    mariadb.execute("INSERT INTO crm.people VALUES ('salt@x.org', NULL, NULL, 1, NULL)")
    assert verify(cluster, "-c", "masks")[0] not in (0, 1)
    until(lambda: (_shown(cluster)["error"] or {}).get("code"), "TM:ErrSaltUnavailable")
    salt_file.write_text(SALT)
    until(lambda: _shown(cluster)["state"], "normal")
    lake.follow(end, lambda: renamed() == upstream("email, telephone, remark, n"))

    texts = [path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()]
    assert sum(SALT.encode() in text for text in texts) == 1, "in its file only"


def _shown(cluster):
    return cluster.cli("changefeed", "query", "-c", "masks")
