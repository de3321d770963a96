"""Which statements give a table a foreign key that changes its rows."""

import pytest

from server.puller.mysql.cascade import cascades_in


@pytest.mark.parametrize(
    ("query", "count"),
    [
        ("CREATE TABLE t (id INT PRIMARY KEY, p INT REFERENCES p (id) ON DELETE CASCADE)", 1),
        ("ALTER TABLE t ADD FOREIGN KEY (p) REFERENCES p (id) on update set null on delete cascade", 2),
        ("ALTER TABLE t ADD FOREIGN KEY (p) REFERENCES p (id) ON DELETE RESTRICT ON UPDATE NO ACTION", 0),
        ("ALTER TABLE t ADD c TIMESTAMP ON UPDATE CURRENT_TIMESTAMP COMMENT 'references'", 0),
        ("ALTER TABLE t ADD c INT COMMENT 'FOREIGN KEY x ON DELETE CASCADE'", 0),
        ("ALTER TABLE t ADD c INT", 0),
    ],
)
def test_statements_with_such_a_foreign_key_are_found(query: str, count: int) -> None:
    assert len(cascades_in(query)) == count
