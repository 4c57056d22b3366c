"""The bytes of a black box: one small file that a process writes and anybody reads, at any moment.

    header    who writes: pid, start time, role, rank, run; and where the areas are
    counters  single words changed in place: step, odometer, last entered and left collective, queue
    names     the texts that words elsewhere name by number; only ever added to
    phases    a log of the phases entered; it never wraps, and says how many entries found no room
    rings     the latest events of up to four threads, one ring each

Every value is an aligned 64-bit word of the machine's own byte order, stored and loaded as a whole, so that C
code can write a counter too. A record (name, phase, event) is valid when its *commit* word, written last,
holds its number counted from one; the writer zeroes that word first, so that a record which was cut short is
seen as such. Invariant: nothing but this file knows an offset.
"""

from __future__ import annotations

import enum

MAGIC = int.from_bytes(b"FLBOX\x00\x00\x01", "big")  # the last byte is the version
WORD = 8
NO_RANK = 2**64 - 1


class Header(enum.IntEnum):
    """Words of the header. The texts after them fill `ROLE_BYTES` and `RUN_BYTES`."""

    MAGIC = 0
    SIZE = 1
    PID = 2  # 0: the process was not started yet, or died before its first line
    START_TICKS = 3  # field 22 of /proc/PID/stat: with the pid, the identity of a process
    RANK = 4
    MADE_WALL_NS = 5  # CLOCK_REALTIME and CLOCK_MONOTONIC of one moment: one turns into the other
    MADE_MONOTONIC_NS = 6
    NAMES_DROPPED = 7
    PHASES_DROPPED = 8


ROLE_OFFSET, ROLE_BYTES = 128, 32
RUN_OFFSET, RUN_BYTES = 160, 64
COUNTERS_OFFSET = 256


class Counter(enum.IntEnum):
    """Words changed in place. `ENTERED` and `LEFT` hold a name's number in the upper 16 bits."""

    STEP = 0  # engine steps that ended
    PHASE = 1  # number of the phase that the odometer belongs to; 0 while it is being changed
    DONE = 2
    TOTAL = 3  # 0: not known
    UNIT = 4  # a name's number
    ENTERED = 5
    LEFT = 6
    RUNNING = 7  # sequences
    WAITING = 8
    PAGES_USED = 9
    OPERATOR = 10  # the operator in a recorded step: a name's number, and the layer from one on; 0: in none


NUM_COUNTERS = 32
NUMBER_BITS = 48  # of a collective's number, under its name

NAMES_OFFSET = COUNTERS_OFFSET + NUM_COUNTERS * WORD
NUM_NAMES, NAME_BYTES = 512, 64  # commit word, then UTF-8 filled up with zeros
PHASES_OFFSET = NAMES_OFFSET + NUM_NAMES * NAME_BYTES
NUM_PHASES, PHASE_BYTES = 1024, 128
PHASE_WORDS = 6  # commit, time_ns, name, and done, total, unit of the phase before; then the detail
RINGS_OFFSET = PHASES_OFFSET + NUM_PHASES * PHASE_BYTES
NUM_RINGS, RING_EVENTS, EVENT_BYTES = 4, 512, 64
RING_HEADER_BYTES = 64  # the name's number; the thread's id
RING_BYTES = RING_HEADER_BYTES + RING_EVENTS * EVENT_BYTES
FILE_BYTES = RINGS_OFFSET + NUM_RINGS * RING_BYTES


def counter_word(counter: Counter) -> int:
    """Index of a counter in the file's words."""
    return COUNTERS_OFFSET // WORD + counter


def name_offset(index: int) -> int:
    """Where the name of this index (number - 1) begins, in bytes."""
    return NAMES_OFFSET + index * NAME_BYTES


def phase_offset(index: int) -> int:
    """Where the phase entry of this index begins, in bytes."""
    return PHASES_OFFSET + index * PHASE_BYTES


def ring_offset(ring: int) -> int:
    """Where a ring's header begins, in bytes; its events follow."""
    return RINGS_OFFSET + ring * RING_BYTES


def pack_text(text: str, num_bytes: int) -> bytes:
    """UTF-8, cut at a character's end to fit, filled up with zeros."""
    cut = text.encode("utf-8", "replace")[:num_bytes].decode("utf-8", "ignore").encode()
    return cut.ljust(num_bytes, b"\0")


def unpack_text(data: bytes) -> str:
    """The text of `pack_text`; bytes that are none become replacement characters."""
    return data.rstrip(b"\0").decode("utf-8", "replace")
