"""What `icestream demo` shows: an embedded PostgreSQL, and a busy shop in it."""
