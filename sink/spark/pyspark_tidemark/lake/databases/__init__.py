"""Tables in a database: PostgreSQL (psycopg) and MySQL or MariaDB (pymysql), written by the driver.

A cut's changes of a table are staged in a temporary table and applied by set operations, in one
transaction together with the row that says so (`_tidemark_tables`): a table is either at a cut or
before it, and a repeated cut finds its row. Rows stream from the captures in Arrow batches, so
memory is bounded, whatever a cut holds.
"""
