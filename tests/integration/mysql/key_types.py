"""Key columns of every type, with values whose order or text is odd."""

KEYS = {
    "ci": ("k VARCHAR(20) COLLATE utf8mb4_general_ci", ["'Abc'", "'b '", "'ß'", "''", "'z'", "'é'"]),
    "unicode": ("k VARCHAR(20) COLLATE utf8mb4_unicode_nopad_ci", ["'Abc'", "'b'", "'b '", "'ß'", "''", "'😀'"]),
    "latin1": ("k CHAR(8) CHARACTER SET latin1 COLLATE latin1_german2_ci", ["'a'", "'b  '", "'é'", "'ä'", "'z'"]),
    "utf16": ("k CHAR(4) CHARACTER SET utf16", ["'a'", "'ü '", "'漢'"]),
    "binary": ("k BINARY(4)", ["'a'", "'a\\0b'", "''", "x'ff'"]),
    "varbinary": ("k VARBINARY(300)", ["'a'", "'a\\0'", "''", "REPEAT('b', 299)"]),
    "decimal": ("k DECIMAL(20,5)", ["-1.5", "0", "99999.99999", "-0.00001"]),
    "unsigned": ("k BIGINT UNSIGNED", ["0", "18446744073709551615", "9223372036854775808", "5"]),
    "tinyint": ("k TINYINT", ["-128", "-1", "127", "0"]),
    "mediumint": ("k MEDIUMINT", ["-8388608", "-1", "8388607", "0"]),
    "timestamp": (
        "k TIMESTAMP(3)",
        ["'1970-01-01 00:00:01'", "'2024-10-27 02:30:00.123'", "'2024-10-27 02:30'"],
    ),
    "datetime": ("k DATETIME(5)", ["'0000-00-00'", "'2023-00-10 01:02:03.04567'", "'9999-12-31 23:59:59.99999'"]),
    "time": ("k TIME(4)", ["'-838:59:59'", "'-00:00:00.0001'", "'12:13:14.5678'", "'0'"]),
    "date": ("k DATE", ["'0000-00-00'", "'2024-02-29'", "'1000-01-01'"]),
    "year": ("k YEAR", ["0", "1901", "2155"]),
    "enum": ("k ENUM('z','b','a')", ["'a'", "'z'", "'b'"]),
    "set": ("k SET('c','b','a')", ["''", "'a,c'", "'b'", "'c'"]),
    "bit": ("k BIT(12)", ["0", "4095", "1", "256"]),
    "double": ("k DOUBLE", ["0.1", "-1e300", "0.30000000000000004", "0.3"]),
    "float": ("k FLOAT", ["0.1", "16777216", "-0.5"]),
}
