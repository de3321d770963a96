"""Every alert names the runbook that says what to do about it, is tried, and asks for metrics that
exist.
"""

import re

import yaml

from tests.dashboards import ROOT, documented_metrics, metrics_of

RULES = (ROOT / "deploy/prometheus/rules.yaml").read_text()
OF_PROMETHEUS = {"up", "process_start_time_seconds", "prometheus_target_interval_length_seconds"}


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    alerts = re.findall(r"alert: (\w+)", RULES)
    runbooks = re.findall(r'runbook: "docs/runbooks.md#(\w+)"', RULES)
    assert runbooks == [alert.lower() for alert in alerts]
    assert re.findall(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text(), re.M) == alerts


def test_every_alert_is_tried():
    cases = (ROOT / "tests/unit/deploy/rules_test.yaml").read_text()
    tried = set(re.findall(r"alertname: (\w+)", cases))
    assert set(re.findall(r"alert: (\w+)", RULES)) - tried == set()


def test_every_metric_of_a_rule_is_in_the_reference():
    rules = [rule for group in yaml.safe_load(RULES)["groups"] for rule in group["rules"]]
    asked = {name for rule in rules for name in metrics_of(rule["expr"])}
    assert asked - documented_metrics() - OF_PROMETHEUS == set()
