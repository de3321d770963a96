"""The upstream's side of a comparison: rows of a table as they were at the lake's cut."""
