"""SORTER: row changes of a table, in any order, come out sorted by (commit_ts, start_ts,
op, key).
"""

from sorter.backlog import Extent
from sorter.engine import Sorter, SorterSettings
from sorter.stats import SorterStats

__all__ = ["Extent", "Sorter", "SorterSettings", "SorterStats"]
