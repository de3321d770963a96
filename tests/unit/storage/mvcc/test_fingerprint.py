"""The fingerprints of FarmHash: vectors made with the library that TiDB's clients use."""

import pytest

from storage.mvcc.fingerprint import fingerprint64


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (0, 0x9AE16A3B2F90404F),
        (1, 0xBEC09CC447469D8B),
        (3, 0x40B4412E33EEFD64),
        (4, 0xF3C7EE05197A7B92),
        (7, 0x4FEF0B39C12AA9A4),
        (8, 0x0C97ECBC1E9D2626),
        (16, 0x7EDA0ED8C837A168),
        (17, 0xC9518FE63EBF6127),
        (19, 0x7CAFB1BA5E879CB6),
        (30, 0xD48BB943C1A0DB0D),
        (32, 0xA53F806F23A314E8),
        (33, 0xC24F9D7CE864F0E9),
        (64, 0x0566266CB579ECA2),
        (65, 0x77E0867714E6B0E4),
        (100, 0x9E17C36FE4A61B08),
        (128, 0x666823960B3AC271),
        (129, 0x98206B8579BCA083),
        (300, 0xDFBCED116079AF13),
    ],
)
def test_fingerprints_are_those_of_farmhash(size: int, expected: int) -> None:
    assert fingerprint64(bytes((at * 7 + 3) & 0xFF for at in range(size))) == expected
