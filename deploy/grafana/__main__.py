"""`python -m deploy.grafana` writes the dashboards, deploy/grafana/dashboards/*.json.

tests/unit/deploy/test_grafana.py refuses files that differ from the tables in `panels`.
"""

from pathlib import Path
from typing import Final

from deploy.grafana.dashboard import text_of
from deploy.grafana.panels import DASHBOARDS

DIRECTORY: Final = Path(__file__).parent / "dashboards"


def files() -> dict[Path, str]:
    """The text of each file."""
    return {DIRECTORY / f"{each.name}.json": text_of(each) for each in DASHBOARDS}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text, encoding="utf-8")
