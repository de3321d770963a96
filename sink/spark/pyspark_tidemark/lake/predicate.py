"""SQL identifiers."""


def quoted(name: str) -> str:
    """An identifier."""
    return "`" + name.replace("`", "``") + "`"
