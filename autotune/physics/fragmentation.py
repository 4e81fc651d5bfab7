"""What of a device's memory blocks can take: an allocator reserves whole segments, and parts of them stay unused.

On NVIDIA's GPUs torch takes segments of 2 MiB for small blocks, 20 MiB for those of 1 to 10 MiB, and multiples of 2 MiB
beyond (``c10/cuda/CUDACachingAllocator.cpp``). How much of them is left over hangs on the order of a step's blocks, so
it is measured while a job is profiled.
"""

from __future__ import annotations

# Other plans leave other gaps than those that were seen.
_RESERVE = 1.5
# However a step was seen to scatter its blocks: beyond, the allocator gives its cache back and begins anew.
_LARGEST_SHARE = 0.3


def allocated_within(reserved_bytes: int, fragments_bytes: int) -> int:
    """Return how many bytes of blocks fit into what may be reserved.

    Args:
        reserved_bytes: what the process may reserve.
        fragments_bytes: the most that a profiled step reserved beyond what it allocated at its peak.
    """
    return reserved_bytes - int(min(_RESERVE * fragments_bytes, _LARGEST_SHARE * reserved_bytes))
