import re
from pathlib import Path

from prometheus_client import CollectorRegistry, generate_latest

from server.leader_gauge import LeaderGauge

ROOT = Path(__file__).parents[3]


def test_without_a_value_there_is_no_sample_but_the_family_is_known():
    registry = CollectorRegistry()
    gauge = LeaderGauge("tidemark_led", "Led.", registry)
    assert registry.get_sample_value("tidemark_led") is None
    assert b"# TYPE tidemark_led gauge" in generate_latest(registry)
    gauge.set(3)
    assert registry.get_sample_value("tidemark_led") == 3
    gauge.clear()
    assert registry.get_sample_value("tidemark_led") is None


def test_an_ended_term_does_not_take_the_next_ones_value():
    registry = CollectorRegistry()
    gauge = LeaderGauge("tidemark_led", "Led.", registry)
    first, second = gauge.showing(lambda: 1), gauge.showing(lambda: 2)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert registry.get_sample_value("tidemark_led") == 2
    second.__exit__(None, None, None)
    assert registry.get_sample_value("tidemark_led") is None


def test_every_gauge_of_a_leader_or_owner_alone_is_one():
    """And the other way round: its help says so."""
    made = re.compile(r"\b(\w*Gauge)\(\s*\"(\w+)\",\s*\"([^\"]+)\"")
    led = {}
    for path in (ROOT / "server").rglob("*.py"):
        for kind, name, text in made.findall(path.read_text(encoding="utf-8")):
            led[name] = (kind == "LeaderGauge", "only at the" in text)
    assert {name for name, each in led.items() if each[0] != each[1]} == set()
    assert sum(each[0] for each in led.values()) == 6
