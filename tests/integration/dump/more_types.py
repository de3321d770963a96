"""Columns and rows that only sums of chunks find odd, beside those of
`tests.integration.mysql.every_type`.
"""

MORE = """, zi INT(9) ZEROFILL, zd DECIMAL(10,3) ZEROFILL, d10 DECIMAL(10,9), dneg DECIMAL(5,2),
cp CHAR(4) CHARACTER SET cp1251, u32t VARCHAR(5) CHARACTER SET utf32, le VARCHAR(5) CHARACTER SET utf16le,
kr VARCHAR(5) CHARACTER SET euckr, es ENUM(',', '-', 'x,1:') CHARACTER SET latin1,
ls SET('ä', ':') CHARACTER SET latin1, dz DOUBLE, fz FLOAT, `odd ``name?%s` VARCHAR(9)"""
MORE_ROWS = [
    {
        "zi": 5,
        "zd": "1.5",
        "d10": "0.000000001",
        "dneg": "-0.05",
        "cp": "Жя",
        "u32t": "😀,",
        "le": "ü😀",
        "kr": "가",
        "es": "x,1:",
        "ls": "ä,:",
        "dz": "-0.0",
        "fz": "-0.0",
        "`odd ``name?%%s`": "-",
        "dt6": "0000-03-01 01:02:03",
        "da": "2023-02-30",
    },
    {
        "dneg": "-0.001",
        "dz": "5e-324",
        "fz": "3.4028234e38",
        "es": "-",
        "dt6": "0001-01-01 00:00:00.000001",
        "da": "2023-10-00",
        "dt0": "2024-02-30 01:01:01",
    },
]
