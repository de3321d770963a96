"""What the demo prints besides its results."""

import asyncio
import shlex

import pytest
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.cli.daemon import demo_parser
from server.demo import run
from server.demo.lake import FORMATS, JoinedLake, Lake
from server.demo.run import DemoConfig, Progress, hints, hints_while_up
from server.demo.workload import Tally
from storage.model.errors import TidemarkError


class _Applied:
    applied_ts, rows, cuts = 0, 60, 2


@pytest.mark.parametrize("lake", FORMATS)
def test_what_it_proposes_to_try_next_can_be_pasted(lake):
    config = DemoConfig(data_dir="./my data", lake=lake, any_ports=True)
    commands = [
        shlex.split(line, comments=True)
        for line in hints(config).splitlines()
        if line.startswith("  ")
    ]
    demos = [vars(demo_parser().parse_args(words[2:])) for words in commands if words[1] == "demo"]
    assert [(each["data_dir"], each["lake"] == lake) for each in demos[:2]] == [
        ("./my data", True)
    ] * 2
    # The changefeed of a data directory has one lake: another one needs a directory of its own.
    assert demos[2]["data_dir"] != "./my data"
    assert demos[2]["lake"] != lake
    Lake.at(demos[2]["data_dir"], demos[2]["lake"])
    assert commands[3][1:] == ["play"]


@pytest.mark.parametrize(
    ("lake", "refused"),
    [
        ("postgresql", "or a PostgreSQL database of yours"),
        ("postgresql://me@127.0.0.1/db?mode=append", "in mode upsert"),
        ("kafka://127.0.0.1:1/topic?protocol=canal-json", "or a PostgreSQL database of yours"),
        ("postgresql://me@127.0.0.1:1/db", "the database of --lake cannot be used"),
    ],
)
def test_a_lake_that_cannot_be_used_is_refused_before_anything_starts(
    monkeypatch, tmp_path, lake, refused
):
    monkeypatch.setattr(run, "require_java", lambda: None)
    monkeypatch.setattr(run.Cluster, "started", None)
    config = DemoConfig(data_dir=str(tmp_path), lake=lake)
    with pytest.raises(TidemarkError, match=refused):
        asyncio.run(run.run_demo(config))


def test_a_cluster_that_is_joined_is_named_whole(monkeypatch, tmp_path):
    monkeypatch.setattr(run, "require_java", lambda: None)
    config = DemoConfig(data_dir=str(tmp_path), join="127.0.0.1:1")
    with pytest.raises(TidemarkError, match="--join needs --capture"):
        asyncio.run(run.run_demo(config))


def test_what_it_proposes_while_the_cluster_is_up_names_its_ports():
    shown = hints_while_up({"capture": "127.0.0.1:1", "coordinator": "127.0.0.1:2"})
    assert "cli --server 127.0.0.1:1 --pd 127.0.0.1:2 verify -c bank" in shown


def test_each_line_of_progress_says_what_goes_on_before_and_after_the_transfers():
    progress = Progress(10, Tally(), _Applied())
    assert "waiting for the lake's first cuts" in progress.line()
    assert "rows in the lake 60  cuts 2" in progress.line()
    progress.begin_transfers()
    assert "transactions 0/10" in progress.line()
    progress.stage = "comparing"
    assert "] comparing  rows" in progress.line()


def test_the_rows_of_a_lake_that_somebody_elses_job_keeps_are_those_that_it_acknowledged():
    lake = JoinedLake(Lake.at("/lake", "delta"), "capture:1", "bank")
    # 70 rows of an earlier run, then two cuts of 5 and 3; another owner counts anew.
    for ts, rows in ((1, 70), (2, 75), (2, 75), (3, 78), (4, 2)):
        lake.take(pb.Changefeed(checkpoint_ts=ts, delivery=pb.Delivery(rows=rows)))
    assert (lake.applied_ts, lake.rows, lake.cuts) == (4, 10, 4)
