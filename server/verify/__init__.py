"""`tidemark cli verify`: whether a lake equals its upstream at a cut, and where it does not (docs/design/0025)."""
