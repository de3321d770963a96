"""A MariaDB's table under a writer of transactions."""

import threading
import time

ROWS = 3000


class Writer(threading.Thread):
    """Transactions over all keys, as long as the block lasts."""

    def __init__(self, mariadb, name, pause_s=0.0):
        super().__init__()
        self._pause_s = pause_s
        self._connection = mariadb.connect(name)
        self._ended = threading.Event()
        self.written = 0

    def __enter__(self):
        self.start()
        return self

    def __exit__(self, *_):
        self._ended.set()
        self.join()
        self._connection.close()

    def run(self):
        with self._connection.cursor() as cursor:
            while not self._ended.is_set():
                number = self.written + 1
                for statement in (
                    "BEGIN",
                    f"UPDATE t SET v = 'é{number}', kind = 'b' WHERE id % 97 = {number % 97}",
                    f"DELETE FROM t WHERE id = {number * 7 % ROWS}",
                    f"REPLACE INTO t VALUES ({number * 11 % ROWS}, 'again', NULL, {number}.25)",
                    f"UPDATE IGNORE t SET id = id + {ROWS} WHERE id = {number * 5 % ROWS}",
                    f"INSERT INTO other VALUES ({number})",
                    "COMMIT",
                ):
                    cursor.execute(statement)
                self.written = number
                time.sleep(self._pause_s)


def created(mariadb):
    name = mariadb.database("verify")
    mariadb.execute(
        "CREATE TABLE t (id INT PRIMARY KEY, v VARCHAR(50), kind ENUM('a', 'b'), amount "
        "DECIMAL(12, 2))",
        f"INSERT INTO t SELECT seq, 'v', 'a', seq / 4 FROM seq_0_to_{ROWS - 1}",
        "CREATE TABLE other (id INT PRIMARY KEY)",
        database=name,
    )
    return name
