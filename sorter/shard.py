"""Which of the sorter's databases a table belongs to: tables share a few, so that one slow disk write stops only some.

Source: TiCDC's `getDB`, which hashes the table id and the start of its span.
"""

import google_crc32c

from storage.codec import encode_i64
from storage.model.span import Span


def get_db(span: Span, count: int) -> int:
    """The number of the table's database, in `[0, count)`; two spans of one table may have different ones."""
    digest: int = google_crc32c.extend(google_crc32c.value(encode_i64(span.table_id)), span.start_key)
    return digest % count
