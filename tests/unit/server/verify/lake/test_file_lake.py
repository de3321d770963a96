"""What the files of a lake say of its cuts."""

import pytest
from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.sink_uri import SinkUri

from server.verify.lake.file_lake import FileLake


def test_a_lake_without_a_cut_says_how_its_job_is_looked_at(tmp_path):
    """Found by a stranger: `verify` right after `create` said `choose a later --at`."""
    lake = FileLake(SinkUri.parse(f"delta://{tmp_path}/lake"), "orders", tmp_path)
    with pytest.raises(SourceError, match=r"has no cut yet.*changefeed list` tells how the job is"):
        lake.cut(None)
