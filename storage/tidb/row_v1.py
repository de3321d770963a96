"""Row format v1: pairs of datums, column id then value; one nil byte stands for no pairs. Rows of old clusters.

Such rows are translated to format v2, so that there is one way to read a row.
"""

from storage.model.errors import CorruptError
from storage.tidb.datum import NIL, decode_datum
from storage.tidb.row import COLUMN_ID_MAX, VERSION, encode_row


def as_v2(row: bytes) -> bytes:
    """The same row in format v2; a row of that format is returned as it is.

    Raises:
        CorruptError: `row` is of neither format.
    """
    if row[:1] == bytes((VERSION,)):
        return row
    return encode_row(decode_pairs(row) if row != bytes((NIL,)) else {})


def decode_pairs(data: bytes, offset: int = 0) -> dict[int, bytes | None]:
    """Cells by column id; ends at the end of `data`.

    Raises:
        CorruptError: the bytes are not pairs of column id and value, each id once.
    """
    cells: dict[int, bytes | None] = {}
    if offset >= len(data):
        raise CorruptError("a row of format v1 is empty")
    while offset < len(data):
        column, offset = decode_datum(data, offset)
        column_id = int.from_bytes(column or b"", "little", signed=True)
        if column is None or column_id in cells or not 0 < column_id <= COLUMN_ID_MAX:
            raise CorruptError(f"a row of format v1 has no column id, or one twice, before offset {offset}")
        cells[column_id], offset = decode_datum(data, offset)
    return cells
