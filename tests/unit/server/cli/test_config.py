"""`tidemark config`: what it prints is what daemons take."""

import json
import tomllib

import pytest

from server.cli import main
from server.cli.config import sections
from server.cli.daemon import SECTIONS, _check_own_variables
from server.config import ConfigError
from tests.unit.server.certificates import Certificates


def test_the_printed_file_is_valid_and_has_all_sections(tmp_path, capsys):
    path = tmp_path / "tidemark.toml"
    assert main.main(["config", "print-default"]) == 0
    path.write_text(capsys.readouterr().out)
    assert list(tomllib.loads(path.read_text())) == list(SECTIONS)
    assert main.main(["config", "check", str(path)]) == 0
    assert "can be used" in capsys.readouterr().out


TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}


def takes(schema, value):
    """Whether a value is valid by the few words of JSON Schema that are used."""
    if not isinstance(value, TYPES[schema["type"]]):
        return False
    if isinstance(value, dict):
        known = schema["properties"]
        return value.keys() <= known.keys() and all(
            takes(known[key], each) for key, each in value.items()
        )
    if isinstance(value, list):
        return all(takes(schema["items"], each) for each in value)
    return value >= schema.get("minimum", value)


def test_the_schema_takes_what_daemons_take_and_refuses_what_they_refuse(capsys):
    assert main.main(["config", "schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert list(schema["properties"]) == list(SECTIONS)
    assert main.main(["config", "print-default"]) == 0
    assert takes(schema, tomllib.loads(capsys.readouterr().out))
    for document in (
        {"stores": {}},
        {"store": {"data-dirs": ""}},
        {"spark-keep": {"audit-rows-per-s": 0}},
        {"pump": {"heartbeat-seconds": "soon"}},
        {"log": {"log-level": 3}},
    ):
        assert not takes(schema, document), document


def test_all_faults_of_a_section_are_told(tmp_path, capsys):
    path = tmp_path / "tidemark.toml"
    path.write_text('[spark-keep]\naudit-rows-per-s = 0\ntriger = "1 second"\n')
    assert main.main(["config", "check", str(path)]) == 1
    said = capsys.readouterr().err
    assert "did you mean trigger" in said
    assert "audit-rows-per-s must be at least 1" in said


def test_faults_of_all_sections_are_told_and_where_they_are(tmp_path, capsys):
    path = tmp_path / "tidemark.toml"
    path.write_text('[store]\ngc-poll-interval = -1\n[pump]\nheartbeat-seconds = "soon"\n')
    assert main.main(["config", "check", str(path)]) == 1
    said = capsys.readouterr().err
    assert "in [store]: gc-poll-interval must be at least 0.001, not -1.0; " in said
    assert "in [pump]: heartbeat-seconds must be a number, not 'soon'" in said


@pytest.mark.parametrize(
    ("section", "setting", "advice"),
    [
        ("log", 'log-level = "loud"', "--log-level is one of"),
        ("log", 'log-format = "xml"', "--log-format json, text or auto"),
        ("rpc", 'rpc-engine = "twisted"', "--rpc-engine is one of"),
        ("rpc", "max-connections-per-address = 8193", "is from 0 to 8192"),
        ("gc-worker", "lease-seconds = 1", "--lease-seconds (1) must be at least 2"),
        ("store", "destroy-range-share = 2", "at most 1"),
        ("store", 'split-keys = "61,xyz"', "--split-keys must be hex numbers"),
        ("coordinator", 'metadata = "etcd:"', "must be etcd://host:port"),
        ("coordinator", 'metadata = "/data"', "or leveldb:DIRECTORY"),
        ("coordinator", 'gc-compat = "pd-8"', "must be one of classic, pd-9"),
        ("spark-keep", 'job = ["orders"]', "--job is CHANGEFEED:NAME=VALUE"),
        ("spark-keep", 'job = ["orders:compact-every=often"]', "must be a whole number"),
        ("spark-keep", 'conf = ["spark.x"]', "--conf is NAME=VALUE"),
    ],
)
def test_values_that_daemons_refuse_when_they_start_are_refused_here(
    section, setting, advice, tmp_path, capsys
):
    path = tmp_path / "tidemark.toml"
    path.write_text(f"[{section}]\n{setting}\n")
    assert main.main(["config", "check", str(path)]) == 1
    said = capsys.readouterr().err
    assert f"in [{section}]: " in said
    assert advice in said


@pytest.mark.parametrize("section", SECTIONS)
def test_the_reference_has_every_section(section, capsys):
    assert main.main(["config", "reference", section]) == 0
    assert capsys.readouterr().out.startswith(f"## {section}\n\n| setting |")


def test_variables_of_spark_keep_do_not_stop_spark_run_and_misspelt_ones_do(monkeypatch):
    monkeypatch.setenv("TIDEMARK_SPARK_KEEP_HTTP_ADDR", "127.0.0.1:1")
    spark = {"spark": sections()["spark"]}
    _check_own_variables(spark)
    monkeypatch.setenv("TIDEMARK_SPARK_KEP_HTTP_ADDR", "127.0.0.1:1")
    with pytest.raises(ConfigError, match="unknown configuration key TIDEMARK_SPARK_KEP_HTTP_ADDR"):
        _check_own_variables(spark)


COMMANDS = {
    "coordinator": ["coordinator"],
    "store": ["store"],
    "capture": ["capture"],
    "pump": ["pump"],
    "gc-worker": ["gc-worker"],
    "up": ["up"],
    "spark": ["spark", "run"],
    "spark-keep": ["spark", "keep"],
}
OWN = [
    ("coordinator", 'metadata = "etcd:"'),
    ("coordinator", 'gc-compat = "pd-8"'),
    ("store", 'split-keys = "61,xyz"'),
    ("store", "destroy-range-share = 2"),
    ("store", "read-threads = 0"),
    ("capture", "workers = 100000"),
    ("capture", 'workers = 2\nworker-flight-addr = "nowhere"'),
    ("capture", 'workers = 4\nworker-flight-addr = "host:65533"'),
    ("capture", 'workers = 2\ndata-dir = "/{}"'.format("d" * 120)),
    ("capture", 'flight-token-file = "/none/token"'),
    ("capture", 'token-file = "/none/token"'),
    ("capture", 'access-file = "/none/access.toml"'),
    ("capture", 'access-file = "FILE"\nflight-token-file = "TOKEN"'),
    ("capture", 'flight-addr = "host"'),
    ("coordinator", 'access-file = "FILE"'),
    ("store", 'access-file = "FILE"'),
    ("pump", 'access-file = "/none/access.toml"'),
    ("pump", 'addr = "127.0.0.1:http"'),
    ("gc-worker", "lease-seconds = 1"),
    ("gc-worker", 'min-gc-time = "soon"'),
    ("gc-worker", 'access-file = "/none/access.toml"'),
    ("up", 'store-addr = "127.0.0.1:99999"'),
    ("spark", 'conf = ["spark.x"]'),
    ("spark-keep", 'job = ["orders"]'),
    ("spark-keep", 'conf = ["fs.s3a.secret.key=x"]'),
]
SHARED_FAULTS = [
    'http-addr = "none"\n',
    '\n[security]\ncert-path = "/none/cert"\nkey-path = "/none/key"',
    '\n[log]\nlog-level = "loud"',
    '\n[rpc]\nrpc-engine = "twisted"',
]
LISTENERS_FAULTS = [
    '\n[security]\nca-path = "/none/ca"',
    '\n[security]\ncert-allowed-cn = ["me"]',
]


@pytest.mark.parametrize(
    ("section", "settings"),
    [
        *OWN,
        *((section, text) for section in COMMANDS for text in SHARED_FAULTS),
        *(
            (section, text)
            for section in COMMANDS
            for text in LISTENERS_FAULTS
            if not section.startswith("spark")
        ),
    ],
)
def test_a_daemon_and_the_check_refuse_the_same_in_the_same_words(
    section, settings, tmp_path, capsys
):
    access, token, path = (tmp_path / name for name in ("access.toml", "token", "tidemark.toml"))
    access.write_text(f'[[client]]\nname = "a"\nrole = "read"\ntoken-sha256 = "{"0" * 64}"\n')
    token.write_text("secret-secret-secret-secret")
    settings = settings.replace("FILE", str(access)).replace("TOKEN", str(token))
    path.write_text(f"[{section}]\n{settings}\n")
    assert main.main(["config", "check", str(path)]) == 1
    checked = capsys.readouterr().err
    assert main.main([*COMMANDS[section], "--config", str(path)]) == 1
    started = capsys.readouterr().err
    assert started.startswith("[TM:Err")
    message = started.strip().partition("] ")[2].removeprefix(f"in [{section}]: ")
    assert message in checked


def test_several_faults_are_told_at_the_start_as_they_are_by_the_check(tmp_path, capsys):
    path = tmp_path / "tidemark.toml"
    path.write_text(
        '[capture]\nworkers = 100000\n[log]\nlog-level = "loud"\n[rpc]\nrpc-engine = "x"\n'
    )
    assert main.main(["config", "check", str(path)]) == 1
    checked = capsys.readouterr().err
    assert main.main(["capture", "--config", str(path)]) == 1
    started = capsys.readouterr().err
    assert all(part in checked for part in told(started))
    assert len(told(started)) == len(told(checked)) == 3
    assert all(f"in [{section}]: " in checked for section in ("capture", "log", "rpc"))


def test_an_unknown_section_hides_no_fault_of_another_one(tmp_path, capsys):
    path = tmp_path / "tidemark.toml"
    path.write_text('pump = 1\n[captur]\n[capture]\nflight-adr = "x"\n')
    assert main.main(["config", "check", str(path)]) == 1
    said = capsys.readouterr().err
    for fault in ("[captur], did you mean capture?", "flight-adr, did you mean flight-addr?"):
        assert fault in said
    assert "[pump] must be a table" in said


def told(message):
    """The faults of a message."""
    return message.strip().partition("] in [")[2].split("; in [")


def test_what_only_calls_others_needs_no_certificate_of_its_own(tmp_path, capsys):
    """A CA alone is for jobs of Spark, and refused by daemons that listen."""
    Certificates(tmp_path)
    ca, path = tmp_path / "ca.pem", tmp_path / "tidemark.toml"
    path.write_text(f'[spark-keep]\n[security]\nca-path = "{ca}"\n')
    assert main.main(["config", "check", str(path)]) == 0
    path.write_text(f'[spark-keep]\n[store]\n[security]\nca-path = "{ca}"\n')
    assert main.main(["config", "check", str(path)]) == 1
    assert "TLS needs --cert-path and --key-path" in capsys.readouterr().err
