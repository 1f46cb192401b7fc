"""`python -m icestream`."""

from icestream.cli import entry_point

entry_point()
