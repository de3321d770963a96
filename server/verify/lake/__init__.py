"""The lake's side of a comparison, in a process of its own: `client` sends a `question`, `job`
answers it.
"""
