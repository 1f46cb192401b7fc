"""The guide to the architecture says of every known mechanism what does its job here."""

import re
from pathlib import Path

import pytest

GUIDE = Path(__file__).parent.parent.parent / "ARCHITECTURE.md"
COLUMNS = ["mechanism", "known from", "here", "why"]
MECHANISMS = (
    *("control topic", "channel", "leader election", "resend buffer", "minting", "capabilities"),
    *("source coordinator", "leases", "acknowledgement"),
)


def last_section() -> list[str]:
    """The lines behind the guide's last heading."""
    return re.split(r"^## .*$", GUIDE.read_text(), flags=re.MULTILINE)[-1].strip().splitlines()


def rows() -> list[list[str]]:
    """The cells of the section's table, its heading first."""
    lines = [line for line in last_section() if line.startswith("|")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    return [cells[0], *cells[2:]]


def test_the_guide_ends_with_a_table_of_known_mechanisms():
    """U9: nothing follows it, and every row says what does the job here, and why."""
    assert last_section()[-1].startswith("|")
    heading, *body = rows()
    assert heading == COLUMNS
    assert all(len(cells) == len(COLUMNS) for cells in body)
    assert [cells for cells in body if not all(cells)] == []


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_known_mechanism_is_mapped_to_what_does_its_job_here(mechanism):
    """U9: those who know another design find their way into this one."""
    assert any(mechanism in cells[0] for cells in rows()[1:])
