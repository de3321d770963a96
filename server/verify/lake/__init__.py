"""The lake's side of a comparison, in a process of its own: `process` asks, `job` answers, by kind of lake."""
