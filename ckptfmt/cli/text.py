"""Text for people: names made harmless, sizes and durations, cutting to a width.

Names and values come from files that a stranger may have written: whatever is shown has no control
character in it, so that a leaf's name can neither move the cursor nor colour the terminal.
"""

from __future__ import annotations

from ckptfmt.errors import UsageError

ELLIPSIS = "…"
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
_DURATION_UNITS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def escape(text: str) -> str:
    """The text with everything that is not printable (controls, ANSI, bidi marks) as an escape."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else _escape_char(c) for c in text)


def _escape_char(char: str) -> str:
    code = ord(char)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def value_text(value: object, width: int | None = None) -> str:
    """A plain value as Python writes it, NumPy's scalars as plain numbers.

    Args:
        width: Break dicts and lists into lines of so many columns.
    """
    if value is None or type(value) in (bool, int, float, str, bytes):
        return repr(value)
    import numpy as np  # here: whoever has other values has it loaded

    with np.printoptions(legacy="1.25"):  # of which repr(np.uint8(1)) is 1
        if width is None or not isinstance(value, (dict, list, tuple, set)):
            return repr(value)
        import pprint

        return pprint.pformat(value, width=width, sort_dicts=False, compact=True)


def cell_width(text: str) -> int:
    """Columns of a terminal that a printable text takes."""
    if text.isascii():
        return len(text)
    # Imported here: only names beyond ASCII need its tables.
    import unicodedata

    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def truncate_middle(text: str, width: int) -> str:
    """At most `width` columns; the end of a name says more than its middle, so both ends stay."""
    if cell_width(text) <= width:
        return text
    if width <= 1:
        return ELLIPSIS[:width]
    tail = _take(text[::-1], width // 2)[::-1]
    head = _take(text, width - 1 - cell_width(tail))
    return head + ELLIPSIS + tail


def truncate_end(text: str, width: int) -> str:
    """At most `width` columns, cut at the end."""
    if cell_width(text) <= width:
        return text
    return _take(text, max(0, width - 1)) + ELLIPSIS[: max(0, width)]


def _take(text: str, width: int) -> str:
    used = 0
    for position, char in enumerate(text):
        used += cell_width(char)
        if used > width:
            return text[:position]
    return text


def pad(text: str, width: int, *, right: bool = False) -> str:
    """Filled with blanks to `width` columns."""
    blanks = " " * max(0, width - cell_width(text))
    return blanks + text if right else text + blanks


def format_nbytes(nbytes: int) -> str:
    """IEC units, one decimal: `4.0 MiB`."""
    if abs(nbytes) < 1024:
        return f"{nbytes} B"
    value = float(nbytes)
    unit = 0
    # 1023.96 would be rounded to "1024.0": the next unit begins a little early.
    while abs(value) >= 1023.95 and unit < len(_UNITS) - 1:
        value /= 1024
        unit += 1
    return f"{value:.1f} {_UNITS[unit]}"


def format_count(count: int, noun: str) -> str:
    """`1 tensor`, `5,000 tensors`."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def format_shape(shape: tuple[int, ...]) -> str:
    """`[30522, 384]`; a 0-d tensor is `[]`."""
    return "[" + ", ".join(str(n) for n in shape) + "]"


def format_age(seconds: float) -> str:
    """42 s, 12 min, 3.4 h, 12.3 d; nothing is in the future."""
    if seconds < 120:
        return f"{max(0.0, seconds):.0f} s"
    if seconds < 7200:
        return f"{seconds / 60:.0f} min"
    return f"{seconds / 3600:.1f} h" if seconds < 172800 else f"{seconds / 86400:.1f} d"


def parse_duration(text: str) -> float:
    """Seconds of `600`, `90s`, `10m`, `1.5h` or `1d`."""
    unit = _DURATION_UNITS.get(text[-1:].lower())
    number = text[:-1] if unit is not None else text
    try:
        seconds = float(number) * (unit or 1.0)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds < 1e9:
        raise UsageError(
            "not a duration",
            reason="duration",
            found=repr(text),
            do="write seconds or a number with s, m, h or d: 600, 10m, 1.5h",
        )
    return seconds
