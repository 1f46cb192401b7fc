"""Compiled loops over dates, times and timestamps.

They answer with counts of damaged and of unfit values, because numba's exceptions carry no facts,
and write a zero where a value is not of the wanted form. No read leaves the buffer.
"""

from icestream.kernels import Bytes, kernel, part, pointer
from icestream.sources.postgres.values.places import Lengths, Places, Positions

# Days from Iceberg's epoch, 1970-01-01, to PostgreSQL's, 2000-01-01.
EPOCH_DAYS = 10_957
DAY_MICROS = 86_400_000_000
# PostgreSQL keeps these for infinity, and so does the table.
DAYS_MIN, DAYS_MAX = -(2**31), 2**31 - 1
MICROS_MIN, MICROS_MAX = -(2**63), 2**63 - 1
_LAST_DAY, _LAST_MICROS = divmod(MICROS_MAX, DAY_MICROS)
_MICROS_SHIFT = EPOCH_DAYS * DAY_MICROS
# Any year that needs more digits is no date of PostgreSQL.
_YEAR_DIGITS_MAX = 7
_ZERO, _NINE, _MINUS, _PLUS, _POINT, _COLON, _SPACE = (ord(mark) for mark in "09-+.: ")
_LOWER_I, _UPPER_B = (ord(mark) for mark in "iB")


@kernel
def shift_timestamps(micros: Positions) -> int:
    """From PostgreSQL's epoch to Iceberg's, in place; returns how many leave the range."""
    unfit = 0
    for row in range(micros.size):
        value = micros[row]
        if value != MICROS_MIN and value != MICROS_MAX:
            if value >= MICROS_MAX - _MICROS_SHIFT:
                unfit += 1
            else:
                micros[row] = value + _MICROS_SHIFT
    return unfit


@part
def _two_digits(data: Bytes, at: int, end: int) -> int:
    """The number that two digits make, or one so negative that no sum hides it."""
    if at + 2 > end:
        return -1_000_000
    tens, ones = int(data[at]) - _ZERO, int(data[at + 1]) - _ZERO
    return tens * 10 + ones if 0 <= tens <= 9 and 0 <= ones <= 9 else -1_000_000


@part
def _parse_day(data: Bytes, at: int, end: int, before: bool) -> tuple[int, int]:
    """The days since 1970 of a date before or after Christ, and the position after it or -1."""
    year = digits = 0
    while at < end and _ZERO <= data[at] <= _NINE:
        year = year * 10 + (int(data[at]) - _ZERO)
        digits += 1
        at += 1
        if digits > _YEAR_DIGITS_MAX:
            return 0, -1
    if digits < 4 or end - at < 6 or data[at] != _MINUS or data[at + 3] != _MINUS:
        return 0, -1
    month, day = _two_digits(data, at + 1, end), _two_digits(data, at + 4, end)
    if month < 1 or month > 12 or day < 1 or day > 31:
        return 0, -1
    if before:
        year = 1 - year
    # Years that begin in March end with the leap day; 146,097 days make 400 years.
    year -= month <= 2
    era = year // 400
    of_era = year - era * 400
    of_year = (153 * (month + (9 if month <= 2 else -3)) + 2) // 5 + day - 1
    days = era * 146_097 + of_era * 365 + of_era // 4 - of_era // 100 + of_year - 719_468
    return days, at + 6


@part
def _parse_clock(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The microseconds of a time of day, and the position after it or -1."""
    hours, minutes = _two_digits(data, at, end), _two_digits(data, at + 3, end)
    seconds = _two_digits(data, at + 6, end)
    if hours < 0 or minutes < 0 or seconds < 0 or hours > 24 or minutes > 59 or seconds > 60:
        return 0, -1
    if data[at + 2] != _COLON or data[at + 5] != _COLON:
        return 0, -1
    micros = ((hours * 60 + minutes) * 60 + seconds) * 1_000_000
    at += 8
    if at < end and data[at] == _POINT:
        at += 1
        weight = 100_000
        while at < end and _ZERO <= data[at] <= _NINE:
            if weight == 0:
                return 0, -1
            micros += (int(data[at]) - _ZERO) * weight
            weight //= 10
            at += 1
    return micros, at


@part
def _parse_zone(data: Bytes, at: int, end: int) -> tuple[int, int]:
    """The microseconds east in +hh, +hh:mm or +hh:mm:ss, and the position after it or -1."""
    if at >= end or (data[at] != _PLUS and data[at] != _MINUS):
        return 0, at
    negative = data[at] == _MINUS
    total, unit, at = 0, 3600, at + 1
    while unit > 0:
        number = _two_digits(data, at, end)
        if number < 0:
            return 0, -1
        total += number * unit
        unit //= 60
        at += 2
        if at >= end or data[at] != _COLON:
            break
        at += 1
    return (-total if negative else total) * 1_000_000, at


@part
def _infinity(data: Bytes, at: int, end: int) -> int:
    """1 for infinity, -1 for -infinity, else 0."""
    if end - at == 8 and data[at] == _LOWER_I:
        return 1
    return -1 if end - at == 9 and data[at] == _MINUS and data[at + 1] == _LOWER_I else 0


@part
def _end_of_moment(data: Bytes, at: int, end: int) -> int:
    """Where the text ends without the era before Christ."""
    return end - 3 if end - at > 3 and data[end - 2] == _UPPER_B else end


@kernel
def parse_dates(content: Bytes, places: Places, form: int, values: Lengths) -> int:
    """ISO dates as days since 1970; returns how many are not."""
    starts, lengths, forms = places
    data = pointer(content)
    damaged = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] != form:
            continue
        at, end = starts[row], starts[row] + lengths[row]
        endless = _infinity(data, at, end)
        if endless:
            values[row] = DAYS_MAX if endless > 0 else DAYS_MIN
            continue
        stop = _end_of_moment(data, at, end)
        days, at = _parse_day(data, at, stop, stop != end)
        values[row] = days
        damaged += at != stop
    return damaged


@kernel
def parse_times(content: Bytes, places: Places, form: int, values: Positions) -> int:
    """Times of day in microseconds; returns how many are not."""
    starts, lengths, forms = places
    data = pointer(content)
    damaged = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] == form:
            end = starts[row] + lengths[row]
            values[row], at = _parse_clock(data, starts[row], end)
            damaged += at != end
    return damaged


@kernel
def parse_timestamps(
    content: Bytes, places: Places, form: int, values: Positions
) -> tuple[int, int]:
    """ISO timestamps, with or without a zone, as microseconds since 1970."""
    starts, lengths, forms = places
    data = pointer(content)
    damaged = unfit = 0
    for row in range(forms.size):
        values[row] = 0
        if forms[row] != form:
            continue
        at, end = starts[row], starts[row] + lengths[row]
        endless = _infinity(data, at, end)
        if endless:
            values[row] = MICROS_MAX if endless > 0 else MICROS_MIN
            continue
        stop = _end_of_moment(data, at, end)
        days, at = _parse_day(data, at, stop, stop != end)
        if at < 0 or at >= stop or data[at] != _SPACE:
            damaged += 1
            continue
        micros, at = _parse_clock(data, at + 1, stop)
        if at >= 0:
            shift, at = _parse_zone(data, at, stop)
            micros -= shift
        if at != stop:
            damaged += 1
        elif days > _LAST_DAY or (days == _LAST_DAY and micros >= _LAST_MICROS):
            unfit += 1
        else:
            values[row] = days * DAY_MICROS + micros
    return damaged, unfit
