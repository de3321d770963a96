"""The command line of the lake job."""

import pytest
from pyspark_tidemark.lake.arguments import Arguments

from server.config import ConfigError
from server.rpc.credentials import SecurityConfig
from server.spark.config import SparkConfig, job_command

NEEDED = {"endpoint": "grpc://127.0.0.1:1", "changefeed": "bank", "target": "delta:///lake"}


def test_spark_settings_reach_the_job_as_they_were_given():
    conf = ("spark.executor.memory=2g", "spark.driver.extraJavaOptions=-Da=b -Dc=d", "spark.x=")
    command = job_command(SparkConfig(**NEEDED, conf=conf), SecurityConfig())
    given = Arguments.parse(command[command.index("--follow-parent") :])
    assert given.conf == {
        "spark.executor.memory": "2g",
        "spark.driver.extraJavaOptions": "-Da=b -Dc=d",
        "spark.x": "",
    }


@pytest.mark.parametrize("text", ["spark.executor.memory", "=2g", " =2g"])
def test_a_spark_setting_without_name_or_value_is_refused(text):
    with pytest.raises(ConfigError, match="--conf is NAME=VALUE, not"):
        job_command(SparkConfig(**NEEDED, conf=(text,)), SecurityConfig())


@pytest.mark.parametrize(
    "name",
    [
        "spark.hadoop.fs.s3a.secret.key",
        "spark.ssl.keyPassword",
        "spark.hadoop.fs.azure.account.key.me.blob",
    ],
)
def test_a_secret_never_gets_among_the_arguments_of_a_process(name):
    with pytest.raises(ConfigError, match="HADOOP_CONF_DIR") as refused:
        job_command(SparkConfig(**NEEDED, conf=(f"{name}=geheim",)), SecurityConfig())
    assert "geheim" not in str(refused.value)


@pytest.mark.parametrize(
    ("target", "said", "vectors"),
    [
        ("delta:///lake", "on", True),
        ("delta:///lake", "off", False),
        ("iceberg:///lake?deletion-vectors=off", "on", False),
        ("iceberg:///lake?deletion-vectors=on", "off", True),
    ],
)
def test_deletion_vectors_are_a_choice(target, said, vectors):
    config = SparkConfig(**NEEDED | {"target": target}, deletion_vectors=said)
    command = job_command(config, SecurityConfig())
    given = Arguments.parse(command[command.index("--follow-parent") :])
    assert given.deletion_vectors is vectors
    assert str(given.target) == target.partition("?")[0]


def test_what_the_targets_uri_says_wins_over_options_of_spark_run():
    target = "mysql://me@db/lake?mode=scd2&compact-every=0&password-file=/run/p"
    config = SparkConfig(
        **NEEDED | {"target": target}, mode="upsert", keep_cuts_hours=3, checkpoint_dir="/c"
    )
    command = job_command(config, SecurityConfig())
    given = Arguments.parse(command[command.index("--follow-parent") :])
    assert (given.mode, given.policy.mode, given.compact_every, given.keep_hours) == (
        "scd2",
        "scd2",
        0,
        3.0,
    )
    assert str(given.target) == "mysql://me@db:3306/lake?password-file=/run/p"
