"""The dashboards: what each panel asks Prometheus, and what its answer means."""

from typing import Final

from deploy.grafana.panels.changefeed import CHANGEFEED
from deploy.grafana.panels.coordinator_and_gc import COORDINATOR_AND_GC
from deploy.grafana.panels.overview import OVERVIEW
from deploy.grafana.panels.pump import PUMP
from deploy.grafana.panels.sorter_and_sink import SORTER_AND_SINK
from deploy.grafana.panels.spark import SPARK

DASHBOARDS: Final = (OVERVIEW, CHANGEFEED, SORTER_AND_SINK, COORDINATOR_AND_GC, PUMP, SPARK)
