"""What all tests share: Hypothesis has no deadline per example, which a busy machine misses; `timeout` bounds tests."""

from hypothesis import settings

settings.register_profile("tidemark", deadline=None)
settings.load_profile("tidemark")
