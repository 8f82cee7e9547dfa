"""Members of enums that are keys of dicts."""

from __future__ import annotations

from enum import Enum, IntEnum


class Split(Enum):
    TRAIN = 1
    TEST = 2


class Other:
    class Split(Enum):
        TRAIN = 1
        TEST = 2


class Level(IntEnum):
    LOW = 1
    HIGH = 2
