"""What numpy's own way costs too much for arrays of a step: some 10 to 1,000 elements, some 1,000 times a second."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def every(flags: npt.NDArray[np.bool_]) -> bool:
    """`flags.all()`, which goes through a Python function and sets a reduction up; this looks for a zero octet."""
    return 0 not in flags.tobytes()


def some(flags: npt.NDArray[np.bool_]) -> bool:
    """`flags.any()`."""
    return 1 in flags.tobytes()
