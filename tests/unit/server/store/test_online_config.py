"""Settings changed online: sizes as tikv-ctl writes them, kept, and refused with a reason."""

import pytest

from server.store.admin_service import BadSizeError, parse_size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("0", 0),
        ("10MB", 10 << 20),
        ("10MiB", 10 << 20),
        ("512 KB", 512 << 10),
        ("1.5G", 3 << 29),
        ("7B", 7),
    ],
)
def test_sizes_are_read_as_tikv_reads_them(text: str, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "MB", "-1", "10XB", "ten", "1e9"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(BadSizeError, match="such as 10MB"):
        parse_size(text)
