"""One scrape shows every daemon of the tree, told apart by a label."""

from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, generate_latest

from server import http
from server.up.tree import REGISTRY, child_http_addr, collect_from


@dataclass
class Daemon:
    name: str
    endpoints: dict[str, str] = field(default_factory=dict)


def test_samples_of_all_daemons_carry_their_name_and_the_dead_one_is_down():
    store = CollectorRegistry()
    Counter("tidemark_store_commits", "commits", registry=store).inc(7)
    with http.listen("127.0.0.1:0", ready=lambda: True, registry=store) as address:
        daemons = [Daemon("store", {"http": address}), Daemon("pump", {"http": "127.0.0.1:1"})]
        with collect_from(daemons):
            text = generate_latest(REGISTRY).decode()
    assert 'tidemark_store_commits_total{daemon="store"} 7.0' in text
    assert 'tidemark_up_alive{daemon="store"} 1.0' in text
    assert 'tidemark_up_alive{daemon="pump"} 0.0' in text


def test_the_tree_shows_nothing_after_its_end():
    with collect_from([]):
        pass
    assert generate_latest(REGISTRY) == b""


def test_daemons_of_a_tree_have_their_usual_http_ports_and_those_of_a_second_tree_others():
    assert child_http_addr("127.0.0.1:8390", "store") == "127.0.0.1:20180"
    assert child_http_addr("0.0.0.0:8490", "coordinator") == "127.0.0.1:8491"
    assert child_http_addr("127.0.0.1:0", "store") == "127.0.0.1:0"
    assert child_http_addr("127.0.0.1:65000", "store") == "127.0.0.1:0"
