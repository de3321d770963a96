import io
import json
import re

import grpc
import pytest
from grpc.aio import AioRpcError, Metadata
from tidemarkpb.v1 import changefeed_pb2 as pb

from server.cli import cli, cluster, main, pump
from server.cli.arguments import NotConfirmedError
from server.cli.changefeed_create import TablesFileError, read_tables
from server.cli.output import Output
from server.cli.remote import CaptureUnavailableError, make_change
from server.config import ConfigError
from storage.meta.meta import KeyValue
from storage.model.errors import CorruptError, InvalidError

NOBODY = "127.0.0.1:1"


def test_json_is_exactly_one_document():
    assert json.loads(Output([{"id": "a"}], (("ID", "id"),)).text(as_json=True)) == [{"id": "a"}]


def test_a_list_is_a_table_and_missing_members_are_empty():
    rows = [
        {"id": "bank", "summary": {"state": "normal", "error": None}},
        {"id": "b", "summary": {"state": "failed"}},
    ]
    columns = (("ID", "id"), ("STATE", "summary.state"), ("ERROR", "summary.error.code"))
    assert Output(rows, columns).text(as_json=False).splitlines() == [
        "ID    STATE   ERROR",
        "bank  normal",
        "b     failed",
    ]


def test_a_document_is_lines():
    document = {
        "id": "a",
        "error": None,
        "tables": [{"table": "x.y", "rows": 1}],
        "inner": {"deep": 2},
    }
    assert Output(document).text(as_json=False).splitlines() == [
        "id: a",
        "error: ",
        "tables:",
        "  - table: x.y, rows: 1",
        "inner:",
        "  deep: 2",
    ]


def test_tables_are_read_from_the_file(tmp_path):
    path = tmp_path / "tables.json"
    path.write_text('[{"schema_name": "bank", "table_info": {"id": 1}}]')
    [table] = read_tables(str(path))
    assert (table.schema_name, json.loads(table.table_info_json)) == ("bank", {"id": 1})


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[1]",
        '{"tables": []}',
        '[{"schema_name": "bank"}]',
        '[{"schema_name": 1, "table_info": {}}]',
    ],
)
def test_a_file_that_is_something_else_is_refused(tmp_path, text):
    path = tmp_path / "tables.json"
    path.write_text(text)
    with pytest.raises(TablesFileError):
        read_tables(str(path))


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(TablesFileError, match="nothing-here"):
        read_tables(str(tmp_path / "nothing-here"))


@pytest.mark.parametrize(
    "arguments",
    [
        "changefeed list -a -k default --ca ca.pem --cert cert.pem --key key.pem",
        "changefeed list --all=true",
        "changefeed pause -n default -c a -v",
        "changefeed query --simple=true -c a",
        "changefeed move-table -c a -t 7 -d other --mode 0 --wait=true",
        "changefeed move-split-table -c a --table-id 7 --target-node-id other",
        "changefeed split-table-by-region-count -c a -t 7",
        "processor list",
        "processor query -c a -p one",
        "unsafe reset --no-confirm --cluster-id default",
        "unsafe delete-service-gc-safepoint --no-confirm=true",
        "unsafe resolve-lock --region 4 --ts 7",
    ],
)
def test_commands_of_cdc_cli_are_understood(arguments):
    words = arguments.split()
    assert cli.cli_parser(words[0]).parse_args(words).command


def test_flags_of_cdc_cli_that_mean_nothing_here_are_refused_with_the_reason(capsys):
    create = ["changefeed", "create", "--sink-uri", "flight://"]
    for flags in (["--sort-engine=unified"], ["--sort-engine", "unified"]):
        with pytest.raises(SystemExit):
            cli.cli_parser("changefeed").parse_args([*create, *flags])
        assert "--sort-engine cannot be given: there is one sorter" in capsys.readouterr().err


async def test_locks_are_named_by_a_key_or_a_region():
    parser = cli.cli_parser("unsafe")
    for flags in ("--key 00", "--key 00 --start-ts 7 --ts 7", "--region 4 --start-ts 7"):
        arguments = parser.parse_args(["unsafe", "resolve-lock", *flags.split()])
        with pytest.raises(InvalidError, match="--start-ts"):
            await arguments.command(None, arguments)


@pytest.mark.parametrize(
    "arguments", [[], ["changefeed"], ["changefeed", "query"], ["--what"], ["tso", "query", "x"]]
)
def test_wrong_usage_exits_with_2(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.run(arguments)
    assert caught.value.code == 2


@pytest.mark.parametrize(
    "arguments",
    [
        ["changefeed", "create", "-c", "a", "--sink-uri", "delta:///x", "--start-ts", "-5"],
        [
            "changefeed",
            "create",
            "-c",
            "a",
            "--sink-uri",
            "delta:///x",
            "--target-ts",
            str(1 << 64),
        ],
        ["changefeed", "resume", "-c", "a", "--yes", "--overwrite-checkpoint-ts", "-1"],
        ["changefeed", "dumpstart", "-c", "a", "--rows-per-second", "-1"],
        ["changefeed", "dumpupdate", "-c", "a", "--parallel", str(1 << 40)],
        ["unsafe", "resolve-lock", "--key", "00", "--start-ts", "0x1g"],
        ["verify", "-c", "a", "--at", "soon"],
        ["gc", "history", "-n", "-1"],
        ["tso", str(1 << 64)],
    ],
)
def test_numbers_that_do_not_fit_are_wrong_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.run(arguments)
    assert caught.value.code == 2
    assert re.search("is not (a number|between 0 and)", capsys.readouterr().err)


@pytest.mark.parametrize("value", [b"", b"{", b"[]", b"5", b'{"nodeId": "a"}'])
def test_a_registry_entry_that_is_none_is_named(value):
    pair = KeyValue(b"/tidb-binlog/v1/pumps/a", value, 1, 1, 1)
    with pytest.raises(CorruptError, match=r"pumps/a.*, which is no registry entry"):
        pump._parsed(pair)


def test_a_timestamp_to_resume_from_is_a_number_or_now():
    for text in ("now", "17"):
        arguments = [
            "changefeed",
            "resume",
            "-c",
            "a",
            "--overwrite-checkpoint-ts",
            text,
            "--server",
            NOBODY,
        ]
        with pytest.raises(NotConfirmedError):
            cli.run(arguments)
    with pytest.raises(SystemExit):
        cli.run(["changefeed", "resume", "-c", "a", "--overwrite-checkpoint-ts", "soon"])


def test_nobody_listening_says_which_daemon_to_start():
    with pytest.raises(CaptureUnavailableError, match="tidemark capture"):
        cli.run(["capture", "list", "--server", NOBODY])


def test_flags_may_stand_before_and_behind_the_verb():
    for arguments in (
        ["--server", NOBODY, "capture", "list"],
        ["capture", "list", "--json", "--server", NOBODY],
    ):
        with pytest.raises(CaptureUnavailableError, match=NOBODY):
            cli.run(arguments)


def test_without_a_terminal_nothing_is_assumed(monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    with pytest.raises(NotConfirmedError, match="--no-confirm"):
        cli.run(["changefeed", "resume", "-c", "a", "--overwrite-checkpoint-ts", "17"])


def test_the_version_is_that_of_the_package(capsys):
    assert main.main(["--version"]) == 0
    assert re.match(r"tidemark \d+\.\d+\.\d+ \(Python 3\.", capsys.readouterr().out)


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["coordinater"], "tidemark: no command 'coordinater'; did you mean tidemark coordinator?"),
        (["changefeed", "list"], "no command 'changefeed'; did you mean tidemark cli changefeed?"),
        (["docter"], "no command 'docter'; did you mean tidemark cli doctor?"),
        (["qqqq"], "tidemark: no command 'qqqq'."),
        (["capture", "list"], "Did you mean tidemark cli capture list?"),
        (["store", "1"], "Did you mean tidemark cli store 1?"),
    ],
)
def test_a_wrong_command_is_answered_in_one_line_with_the_one_that_is_meant(
    arguments, said, capsys
):
    assert main.main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert line.endswith(" See tidemark --help")


@pytest.mark.parametrize(
    ("arguments", "prog", "said"),
    [
        (
            ["changefeed", "query"],
            "tidemark cli changefeed query",
            "the following arguments are required: -c/--changefeed-id.",
        ),
        (
            ["changefed", "list"],
            "tidemark cli",
            "argument GROUP: there is no 'changefed'; did you mean changefeed?",
        ),
    ],
)
def test_wrong_usage_is_told_in_one_line_that_names_the_help(arguments, prog, said, capsys):
    with pytest.raises(SystemExit):
        cli.run(arguments)
    assert capsys.readouterr().err == f"{prog}: {said} See {prog} --help\n"


def test_an_argument_that_is_not_utf8_is_wrong_usage(capsys):
    assert main.main(["cli", "changefeed", "query", "-c", "\udcff"]) == 2
    assert "is not UTF-8" in capsys.readouterr().err


def test_yaml_is_blocks_with_scalars_of_json():
    document = {"id": "a: b", "none": [], "on": True, "rows": [{"x": 1, "deep": {"z": None}}, [2]]}
    assert Output(document).text(form="yaml").splitlines() == [
        'id: "a: b"',
        "none: []",
        '"on": true',
        "rows:",
        "  - x: 1",
        "    deep:",
        "      z: null",
        "  - - 2",
    ]


def test_wide_has_all_members():
    rows = [{"id": "a", "summary": {"sink_uri": "x://"}}, {"id": "b", "more": 1}]
    assert Output(rows, (("ID", "id"),)).text(form="wide").splitlines() == [
        "ID  SINK URI  MORE",
        "a   x://",
        "b             1",
    ]


@pytest.mark.parametrize(
    ("arguments", "meant"),
    [
        (["changefeed", "lst"], "list"),
        (["changefed", "list"], "changefeed"),
        (["changefeed", "list", "--sever", "a:1"], "--server"),
        (["changefeed", "query", "-c", "x", "--wacth=1"], "--watch"),
        (["changefeed", "list", "-o", "jsn"], "json"),
        (["changefeed", "query", "--changfeed-id", "x"], "--changefeed-id"),
    ],
)
def test_what_is_misspelt_is_answered_with_the_nearest_name(arguments, meant, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.run(arguments)
    assert exit_.value.code == 2
    assert f"did you mean {meant}?" in capsys.readouterr().err


def test_addresses_come_from_the_environment_and_flags_win(monkeypatch):
    monkeypatch.setenv("TIDEMARK_CLI_SERVER", NOBODY)
    with pytest.raises(CaptureUnavailableError, match=NOBODY):
        cli.run(["capture", "list"])
    with pytest.raises(CaptureUnavailableError, match=r"127\.0\.0\.1:2"):
        cli.run(["capture", "list", "--server", "127.0.0.1:2"])
    monkeypatch.setenv("TIDEMARK_CLI_SEVER", NOBODY)
    with pytest.raises(ConfigError, match="TIDEMARK_CLI_SERVER"):
        cli.run(["capture", "list"])


def test_watching_shows_it_again_until_it_is_interrupted(monkeypatch, capsys):
    answers = iter(["first", "second"])

    async def asked(remote, arguments):
        try:
            return Output({}, shown=next(answers))
        except StopIteration:
            raise KeyboardInterrupt from None

    monkeypatch.setattr("server.cli.changefeed.list_changefeeds", asked)
    assert cli.run(["changefeed", "list", "--watch", "0.001"]) == 0
    assert capsys.readouterr().out == "first\nsecond\n"


def test_the_coordinators_say_what_pd_ctl_shows(monkeypatch, capsys):
    answers = {
        "stores": {"count": 1, "stores": [{"store": {"id": 4, "address": "s:1"}, "status": {}}]},
        "region/id/7": {"id": 7},
    }
    monkeypatch.setattr(cluster, "_fetched", lambda address, path, security: answers[path])
    assert cli.run(["store"]) == 0
    assert capsys.readouterr().out.splitlines()[1].split() == ["4", "s:1"]
    assert cli.run(["region", "7", "-o", "json"]) == 0
    assert json.loads(capsys.readouterr().out) == {"id": 7}


def test_commands_of_cdc_cli_are_read_as_they_are():
    parse = cli.cli_parser().parse_args
    created = parse(["changefeed", "create", "--sink-uri", "delta:///lake", "--no-confirm=true"])
    assert (created.changefeed_id, created.yes) == ("", True)
    assert parse(["changefeed", "query", "-s", "-c", "a"]).simple
    for words, is_confirmed in (([], False), (["--no-confirm"], True), (["--yes=false"], False)):
        assert parse(["changefeed", "remove", "-c", "a", *words]).yes is is_confirmed


@pytest.mark.parametrize("option", ["--route=a.b=c.d", "--start-ts=5", "--force-replicate"])
def test_what_update_cannot_change_is_said_by_name(option, capsys):
    with pytest.raises(SystemExit):
        cli.cli_parser().parse_args(["changefeed", "update", "-c", "a", option])
    assert (
        f"{option.partition('=')[0]} of a changefeed cannot be changed" in capsys.readouterr().err
    )


async def test_a_change_without_an_answer_is_sent_again_with_its_request_id() -> None:
    unanswered = [
        (grpc.StatusCode.UNAVAILABLE, "[TM:ErrChangeInterrupted] no answer"),
        (grpc.StatusCode.DEADLINE_EXCEEDED, ""),
    ]
    sent: list[str] = []

    async def call(request: pb.PauseChangefeedRequest, **_: float) -> str:
        sent.append(request.request_id)
        if unanswered:
            status, text = unanswered.pop()
            raise AioRpcError(status, Metadata(), Metadata(), text)
        return "paused"

    request = pb.PauseChangefeedRequest(id="feed")
    assert await make_change(call, request) == "paused"
    assert len(sent) == 3
    assert len({*sent}) == 1
    assert sent[0]
    unanswered.append((grpc.StatusCode.ABORTED, "[TM:ErrChangefeedUpdateRefused] no"))
    with pytest.raises(AioRpcError, match="ErrChangefeedUpdateRefused"):
        await make_change(call, request)
    assert len(sent) == 4
