"""GC SAFEPOINTS: the rules that keep history somebody needs, the service that stores them, the GC worker."""
