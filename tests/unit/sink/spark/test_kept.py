"""Values of files that stay in memory, as many as there is room for."""

import threading

import numpy as np
import pyarrow as pa
from pyspark_tidemark.lake.kept import Kept


def test_values_are_read_once_while_there_is_room():
    read, kept = [], Kept(2 * 80)
    column = pa.table({"k": pa.array(range(10), pa.int64())})
    for name in ("a", "a", "b", "a", "c", "a", "b"):
        assert kept.of(name, lambda name=name: read.append(name) or column) is column
    assert read == ["a", "b", "c", "b"], "the one that was used last stays"
    big = pa.table({"k": pa.array(range(100), pa.int64())})
    for _ in range(2):
        assert kept.of("big", lambda: read.append("big") or big) is big
    assert read[-2:] == ["big", "big"]


def test_what_was_written_need_not_be_read_and_what_is_there_stays():
    kept = Kept(100)
    kept.put("new", np.zeros(4))
    assert (kept.of("new", lambda: np.ones(4)) == 0).all()
    kept.put("new", np.ones(4))
    assert (kept.of("new", lambda: np.ones(4)) == 0).all(), "files never change"
    kept.put("nothing", np.zeros(0))
    assert len(kept.of("nothing", lambda: np.ones(1))) == 0


def test_threads_that_read_the_same_at_once_count_it_once():
    kept, together = Kept(100), threading.Barrier(4)

    def read():
        together.wait(10)
        return np.zeros(10)

    threads = [threading.Thread(target=kept.of, args=("a", read)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    kept.put("b", np.zeros(2))
    assert kept.of("a", lambda: np.ones(10)).sum() == 0, "both fit into 100 bytes"
