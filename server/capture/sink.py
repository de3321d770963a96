"""The sink manager as a part of a changefeed that lies in several processes."""

from server.capture.cut import CutPart, cut_part
from sink.cut import Bounds
from sink.manager import SinkManager


class LocalSink(SinkManager):
    """A sink manager that answers for its part of a cut over several processes."""

    def cut_part(self, start_ts: int, upper_ts: int, bounds: Bounds) -> CutPart:
        """See `server.capture.cut`; raises as `cut`."""
        end_ts = min(upper_ts, self.cut(start_ts, bounds.max_rows, bounds.max_bytes))
        if bounds.is_open or end_ts <= start_ts:
            return CutPart(end_ts)
        return cut_part(self.extents(start_ts, end_ts), start_ts, end_ts)
