"""A batch's range is read from Spark's offset log;
whatever looks otherwise is left to Spark itself.
"""

import pytest
from pyspark_tidemark.job import logged_range


def write(checkpoint, batch, *lines):
    (checkpoint / "offsets").mkdir(exist_ok=True)
    (checkpoint / "offsets" / str(batch)).write_text("\n".join(lines), encoding="utf-8")


def test_a_batch_starts_where_the_one_before_it_ended(tmp_path):
    write(tmp_path, 0, "v1", '{"conf":{}}', '{"ts": 7, "changefeed": "bank"}')
    write(tmp_path, 1, "v1", '{"conf":{}}', '{"ts": 9, "changefeed": "bank"}')
    assert logged_range(tmp_path, 0, 3) == (3, 7)
    assert logged_range(tmp_path, 1, 3) == (7, 9)


@pytest.mark.parametrize(
    "lines",
    [
        (),
        ("v2", "{}", '{"ts": 9}'),
        ("v1", "{}", "-"),
        ("v1", "{}", '{"ts": 9}', '{"ts": 9}'),
        ("v1", "{}", "[9]"),
        ("v1", "{}", '{"ts": "9"}'),
        ("v1", "{}", "{"),
    ],
)
def test_what_is_not_known_is_not_guessed(tmp_path, lines):
    write(tmp_path, 0, "v1", "{}", '{"ts": 7}')
    write(tmp_path, 1, *lines)
    assert logged_range(tmp_path, 1, 3) is None
    assert logged_range(tmp_path, 2, 3) is None


def test_a_batch_whose_predecessor_is_purged_is_not_guessed(tmp_path):
    write(tmp_path, 8, "v1", "{}", '{"ts": 7}')
    assert logged_range(tmp_path, 8, 3) is None
