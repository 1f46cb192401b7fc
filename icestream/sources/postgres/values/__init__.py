"""Values of PostgreSQL as Arrow columns, from either form in which the server sends them.

    COPY answer, pgoutput messages ──`tuples`──► places of values ──`decode`──► one Arrow column

`tuples` only notes where each value lies; `decode` then makes one column at a time. `kinds` says
which Iceberg type a column has. The modules of kernels are compiled loops, one for each kind of
value.

The text form is that of a session with DateStyle ISO, IntervalStyle postgres, TimeZone UTC,
bytea_output hex, extra_float_digits 1 or more, and client_encoding UTF8.
"""
