"""What real PyTorch said of tests/data/programs/lengths.py, a training run with batches of several lengths.

PyTorch 2.13 (CUDA 13.0) with transformers 5 over stub CUDA libraries, as an A100: max_memory_allocated of each step
(reset after it) and memory_reserved after it.
"""

from __future__ import annotations

from typing import Final

LENGTHS: Final = (70, 33, 128, 20, 111, 64, 128, 50)
ALLOCATED: Final = (53245952, 53244928, 97709056, 53244416, 89007616, 66288128, 97709056, 60300800)
RESERVED: Final = (75497472, 77594624, 117440512, 117440512, 117440512, 117440512, 117440512, 117440512)
