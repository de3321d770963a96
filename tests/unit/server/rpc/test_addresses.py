"""Addresses of other daemons, wherever they are given."""

import argparse
import traceback
from collections.abc import Callable

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.options import parse

from server.cli.arguments import host_port
from server.coordinator.daemon import CoordinatorConfig
from server.rpc.client import connect
from server.rpc.members import addresses_of
from storage.model.errors import TidemarkError

LOGIN = "root:geheim@127.0.0.1:1"


@pytest.mark.parametrize(
    "use",
    [
        addresses_of,
        connect,
        lambda login: CoordinatorConfig(metadata=f"etcd://{login}").checked(),
        lambda login: CoordinatorConfig(metadata=f"http://{login}").checked(),
        host_port,
        lambda login: parse({"endpoint": f"grpc://{login}", "changefeed": "c", "table": "d.t"}),
    ],
)
def test_an_address_with_a_password_is_refused_without_being_repeated(
    use: Callable[[str], object],
) -> None:
    with pytest.raises((TidemarkError, SourceError, argparse.ArgumentTypeError)) as caught:
        use(LOGIN)
    assert "geheim" not in "".join(traceback.format_exception(caught.value))
