"""The server's side of the lake job: settings, supervision, metrics;
the job itself is `sink/spark`.
"""
