"""The version of these daemons, as they report it and write it into records. Pure."""

from typing import Final

VERSION: Final = "0.2.0"
