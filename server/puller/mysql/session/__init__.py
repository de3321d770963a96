"""Sessions with a server: how it is reached and asked, what its errors mean, and whether its log
can be followed.
"""
