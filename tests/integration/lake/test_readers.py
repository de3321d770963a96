"""Lakes as engines see them that share no code with us: delta-rs, pyiceberg, Polars, DuckDB. What
an engine can read equals the upstream, at each cut; what it cannot, it refuses by name.
"""

import json
import random
import subprocess
import sys
from datetime import UTC, date, datetime
from decimal import Decimal
from pathlib import Path

import pyarrow as pa
import pytest
from pyspark_tidemark.lake.cut import Cut, CutApplier, TableWriters
from pyspark_tidemark.lake.delta.files import written
from pyspark_tidemark.lake.delta.log import Listing, commit_on_disk
from pyspark_tidemark.lake.delta.protocol import creation
from pyspark_tidemark.lake.delta.target import DeltaTarget
from pyspark_tidemark.lake.iceberg.target import IcebergTarget
from pyspark_tidemark.lake.maintenance import KeptCuts
from pyspark_tidemark.lake.manifest import DIRECTORY, FileManifest, read_cuts
from pyspark_tidemark.lake.schema import Policy

from tests.integration.lake.aged import AcknowledgedFeed

pytestmark = pytest.mark.timeout(300)
PYTHON = Path(sys.prefix, "readers", "bin", "python")
SCRIPT = Path(__file__).parents[2] / "readers.py"
CUTS, STEP = 30, 10
TYPES = {
    "i8": (pa.int8(), [-128, 127, 0]),
    "i16": (pa.int16(), [-(2**15), 2**15 - 1]),
    "i32": (pa.int32(), [-(2**31), 2**31 - 1]),
    "i64": (pa.int64(), [-(2**63), 2**63 - 1]),
    "f32": (pa.float32(), [0.0, -0.5, 2.0**100]),
    "f64": (pa.float64(), [1e300, -1e-300, 0.1]),
    "s": (pa.string(), ["", "日é'\\\"\n", "x" * 50]),
    "b": (pa.binary(), [b"", b"\xff\x00"]),
    "d": (pa.date32(), [date(1, 1, 1), date(9999, 12, 31), date(1582, 10, 10), date(2024, 2, 29)]),
    "dt": (pa.timestamp("us"), [datetime(1, 1, 1), datetime(9999, 12, 31, 23, 59, 59, 999999)]),  # noqa: DTZ001 - no zone
    "ts": (
        pa.timestamp("us", "UTC"),
        [
            datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC),
            datetime(2038, 1, 19, 3, 14, 7, 999999, tzinfo=UTC),
        ],
    ),
    "dec": (
        pa.decimal128(38, 10),
        [Decimal("-9999999999999999999999999999.9999999999"), Decimal(0)],
    ),
    "small": (pa.decimal128(9, 2), [Decimal("9999999.99"), Decimal("-0.01")]),
    "yes": (pa.bool_(), [True, False]),
}
ODD = {"id": pa.int64(), "a b": pa.string(), "x,y;{z}": pa.int32(), "Grüße": pa.string()}
EQUAL = ""


@pytest.fixture(scope="module", autouse=True)
def _readers():
    if not PYTHON.exists():
        pytest.skip("other engines are missing; `make readers` installs them")


def history():
    """Tables with all types, with odd names, whose columns change, and are renamed; rows come, are
    changed and go.
    """
    feed, dice = AcknowledgedFeed(), random.Random(7)
    feed.create(0, "shop.types", id=pa.int64(), **{name: kind for name, (kind, _) in TYPES.items()})
    feed.create(0, "shop.odd", **ODD)
    feed.create(0, "shop.widened", id=pa.int64(), v=pa.int32())
    feed.create(0, "shop.renamed", id=pa.int64(), v=pa.int64(), w=pa.string())
    columns = {"shop.widened": ["id", "v"], "shop.renamed": ["id", "v", "w"]}
    for number in range(1, CUTS + 1):
        ts = number * STEP - 5
        _change(feed, dice, ts, columns)
        ends = number * STEP
        if number == 8:
            feed.alter(
                ends,
                "shop.widened",
                "…",
                None,
                {"n": 77},
                id=pa.int64(),
                v=pa.int32(),
                n=pa.int64(),
            )
            columns["shop.widened"].append("n")
        if number == 14:
            feed.alter(ends, "shop.widened", "…", id=pa.int64(), v=pa.int64(), n=pa.int64())
        if number == 18:
            feed.alter(
                ends, "shop.renamed", "…", {"v": "vv"}, id=pa.int64(), vv=pa.int64(), w=pa.string()
            )
            columns["shop.renamed"] = ["id", "vv", "w"]
        if number == 22:
            feed.truncate(ends, "shop.renamed")
    return feed


def _change(feed, dice, ts, columns):
    for key in sorted(dice.sample(range(60), 9)):
        values = {name: dice.choice([None, *values]) for name, (_, values) in TYPES.items()}
        feed.put(ts, "shop.types", {"id": key} | values)
    keys = sorted(dice.sample(range(20), 4))
    feed.put(
        ts,
        "shop.odd",
        *[{"id": key, "a b": f"{ts}", "x,y;{z}": key, "Grüße": None} for key in keys],
    )
    for name, there in columns.items():
        values = {"v": ts, "vv": ts, "n": ts, "w": f"w{ts}"}
        feed.put(
            ts, name, *[{"id": key} | {each: values[each] for each in there[1:]} for key in keys]
        )
    for name in ("shop.types", "shop.odd", *columns):
        if len(live := feed.state(ts)[name]) > 5:
            feed.delete(ts + 1, name, dice.choice(list(live)))


def applied(spark, target, root, feed, ends):
    """One life of a job."""
    with FileManifest.opened(str(root), "evolving") as manifest:
        cuts = CutApplier(
            feed,
            "evolving",
            target,
            manifest,
            policy=Policy("upsert"),
            writers=TableWriters(source_options={}, spark=spark, parallel=1),
        )
        for end_ts in ends:
            start_ts = 0 if manifest.last is None else manifest.last.end_ts
            cuts.apply(Cut(0, start_ts, end_ts))
            cuts.acknowledge()
            target.maintain(KeptCuts(manifest, 1.0))
    target.close()


def by_engines(tmp_path, jobs):
    """What each job's engine read: rows, or what it said instead."""
    jobs = [job | {"out": str(tmp_path / f"out{number}")} for number, job in enumerate(jobs)]
    subprocess.run([PYTHON, SCRIPT], input=json.dumps(jobs).encode(), check=True, timeout=200)
    answers = []
    for job in jobs:
        try:
            with pa.OSFile(job["out"]) as file:
                answers.append(pa.ipc.open_file(file).read_all().to_pylist())
        except pa.ArrowInvalid:
            answers.append(Path(job["out"]).read_text())
    return answers


def newest_metadata(root, name):
    """Of an Iceberg table."""
    metadata = root / name.replace(".", "/") / "metadata"
    version = int((metadata / "version-hint.text").read_text())
    return str(metadata / f"v{version}.metadata.json")


def plain(rows):
    """Rows by id, without our own columns."""
    found = {
        row["id"]: {name: value for name, value in row.items() if name[0] != "_"} for row in rows
    }
    assert len(found) == len(rows), "an id comes twice"
    return found


def check(tmp_path, feed, path_of, cuts, expected):
    """Compare what each engine reads of each table with the upstream, or what it refuses."""
    asked = [
        (engine, name, cut) for engine, names in expected.items() for name in names for cut in cuts
    ]
    versions = [
        {table.table: table.version for table in cut.tables} if cut is not cuts[-1] else {}
        for cut in cuts
    ]
    jobs = [
        {"engine": engine, "path": path_of(name), "version": versions[cuts.index(cut)].get(name)}
        for engine, name, cut in asked
    ]
    for (engine, name, cut), answer in zip(asked, by_engines(tmp_path, jobs), strict=True):
        refusal = expected[engine][name]
        if refusal == EQUAL or (isinstance(answer, list) and cut is not cuts[-1]):
            assert isinstance(answer, list), (engine, name, cut.end_ts, answer)
            # A DDL at a cut's end is applied with the next one.
            assert plain(answer) == plain(feed.state(cut.end_ts - 1)[name].values()), (
                engine,
                name,
                cut.end_ts,
            )
        else:
            assert isinstance(answer, str), f"{engine} reads {name} now"
            assert refusal in answer, (engine, name, answer)


NAMES = ("shop.types", "shop.odd", "shop.widened", "shop.renamed")


@pytest.mark.parametrize("vectors", ["on", "off"])
def test_every_engine_reads_iceberg_tables_at_each_cut_unless_vectors_are_off(
    spark, tmp_path, vectors
):
    feed, root = history(), tmp_path / "lake"
    settings = {"compact_every": 8} if vectors == "on" else {"compact_every": 0}
    for life in range(3):
        target = IcebergTarget(
            spark, str(root), "evolving", deletion_vectors=vectors == "on", **settings
        )
        applied(spark, target, root, feed, [STEP * n for n in range(10 * life + 1, 10 * life + 11)])
    answer = dict.fromkeys(NAMES, EQUAL if vectors == "on" else "equality deletes")
    expected = {"pyiceberg": answer, "polars_iceberg": answer}
    expected["duckdb_iceberg"] = dict.fromkeys(NAMES, EQUAL)  # it knows equality deletes
    check(tmp_path, feed, lambda name: newest_metadata(root, name), kept(root), expected)


DELTA = {
    "on": {
        "delta_rs": {"shop.widened": "TypeWidening"},
        "duckdb_delta": {},
        "delta_rs_pyarrow": dict.fromkeys(NAMES, "deletionVectors"),
        "polars_delta": {
            "shop.odd": "columnMapping",
            "shop.renamed": "columnMapping",
            "shop.widened": "typeWidening",
        },
    },
    "off": {
        "delta_rs": {},
        "duckdb_delta": {},
        "delta_rs_pyarrow": {"shop.odd": "columnMapping", "shop.renamed": "columnMapping"},
        "polars_delta": {"shop.odd": "columnMapping", "shop.renamed": "columnMapping"},
    },
}
"""What engines refuse of Delta tables, and why: all that they read is equal."""


@pytest.mark.parametrize("vectors", ["on", "off"])
def test_engines_read_delta_tables_as_far_as_they_know_their_features(spark, tmp_path, vectors):
    feed, root = history(), tmp_path / "lake"
    for life in range(3):
        target = DeltaTarget(
            spark, str(root), "evolving", compact_every=8, deletion_vectors=vectors == "on"
        )
        applied(spark, target, root, feed, [STEP * n for n in range(10 * life + 1, 10 * life + 11)])
        if vectors == "off":
            # Somebody else joins the files of a table that needs nothing special.
            [answer] = by_engines(
                tmp_path, [{"engine": "delta_rs_compacts", "path": f"{root}/shop/types"}]
            )
            assert answer[0]["removed"] >= 0
    expected = {
        engine: dict.fromkeys(NAMES, EQUAL) | refused for engine, refused in DELTA[vectors].items()
    }
    check(tmp_path, feed, lambda name: f"{root}/{name.replace('.', '/')}", kept(root), expected)


PARTITION_TEXTS = [
    "日é'\\\"\n",
    "a/b=c %20 +:?#&;",
    " ",
    "..",
    "%",
    "null",
    "\x7f\x01{*[^]}",
    "x\u2028y",
]


def test_engines_read_each_value_that_partitions_a_delta_table(tmp_path):
    """Without Spark: each table has partitions by a column of one type."""
    engines = ("delta_rs", "delta_rs_pyarrow", "polars_delta", "duckdb_delta")
    types = TYPES | {"s": (pa.string(), PARTITION_TEXTS)}
    rows = {}
    for name, (kind, values) in types.items():
        if pa.types.is_floating(kind) or pa.types.is_binary(kind):
            continue
        schema = pa.schema([("id", pa.int64()), (name, kind)])
        rows[name] = [{"id": key, name: value} for key, value in enumerate([None, *values])]
        root = tmp_path / name
        (root / "_delta_log").mkdir(parents=True)
        nothing = Listing.before_the_first(str(root))
        made = creation(schema, {}, {"delta.enableDeletionVectors": "false"}, [name])
        files = written(nothing.after(made).layout, pa.Table.from_pylist(rows[name], schema))
        assert len(files) == len(rows[name])
        assert commit_on_disk(str(root), 0, [*made, *files])
    jobs = [(engine, name) for name in rows for engine in engines]
    asked = [
        {"engine": engine, "path": str(tmp_path / name), "version": None} for engine, name in jobs
    ]
    for (engine, name), answer in zip(jobs, by_engines(tmp_path, asked), strict=True):
        if engine == "delta_rs_pyarrow" and name in ("dec", "small"):
            assert "not a valid decimal" in answer, f"{engine} reads negative fractions now"
        else:
            assert plain(answer) == plain(rows[name]), (engine, name)


def kept(root):
    """Cuts that readers may choose: some old ones, and the newest."""
    cuts = read_cuts(root / DIRECTORY)
    return [cut for cut in cuts if cut.end_ts in (50, 90, 170, 210)] + cuts[-1:]
