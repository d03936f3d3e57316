"""What counts as a whole number where a user gives one."""

from __future__ import annotations

from typing import TypeGuard

import numpy as np


def is_whole(value: object) -> TypeGuard[int]:
    """Whether `value` is a whole number, numpy's included. A bool is none: who wrote one meant something else."""
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
