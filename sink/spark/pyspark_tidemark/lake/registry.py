"""The lake formats, in the order in which texts name them. Pure.

A new format is one package under `pyspark_tidemark.lake` and one entry here.
"""

from typing import Final

from pyspark_tidemark.errors import SourceError
from pyspark_tidemark.lake.databases import MYSQL, POSTGRESQL
from pyspark_tidemark.lake.delta import DELTA
from pyspark_tidemark.lake.format import UPSERT, LakeFormat
from pyspark_tidemark.lake.iceberg import ICEBERG
from pyspark_tidemark.lake.kafka import KAFKA
from pyspark_tidemark.lake.parquet import PARQUET

FORMATS: Final = {
    record.name: record for record in (DELTA, ICEBERG, PARQUET, POSTGRESQL, MYSQL, KAFKA)
}


def default_modes() -> str:
    """What a lake job does without `--mode`, as its help says: `upsert; of parquet: append`."""
    others = [record for record in FORMATS.values() if record.modes[0] != UPSERT]
    return "; ".join([UPSERT, *(f"of {record.name}: {record.modes[0]}" for record in others)])


def merging_formats() -> str:
    """The formats whose tables can be merged of shards, as messages name them."""
    *others, last = [record.title for record in FORMATS.values() if record.merges_shards]
    return f"{', '.join(others)} and {last}"


def find_format(name: str) -> LakeFormat:
    """The format of that name.

    Raises:
        SourceError: ErrTargetInvalid, there is none.
    """
    record = FORMATS.get(name)
    if record is None:
        raise SourceError(
            "ErrTargetInvalid", f"there is no lake format {name!r}; there are {', '.join(FORMATS)}"
        )
    return record
