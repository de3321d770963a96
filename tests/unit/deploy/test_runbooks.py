"""Every alert names the runbook that says what to do about it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
RULES = (ROOT / "deploy/prometheus/rules.yaml").read_text()


def test_every_alert_has_a_runbook_and_every_runbook_an_alert():
    alerts = re.findall(r"alert: (\w+)", RULES)
    runbooks = re.findall(r'runbook: "docs/runbooks.md#(\w+)"', RULES)
    assert runbooks == [alert.lower() for alert in alerts]
    assert re.findall(r"^## (\w+)$", (ROOT / "docs/runbooks.md").read_text(), re.M) == alerts
