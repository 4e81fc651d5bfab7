"""Entry point that torchrun starts: one rank of the quick runs of ``test_live_ranks.py``, since each start is slow."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import apart_rank
import live_rank
import spread_rank
import torch.distributed as dist


def main() -> None:
    """Train one run after another."""
    folder, ways = Path(sys.argv[1]), json.loads(sys.argv[2])
    dist.init_process_group("gloo")
    live_rank.run_all(folder, ways)
    spread_rank.run_all(folder / "spread", ["resharded"])
    apart_rank.run_all(["parallel", "uneven", "attach_alone"])
    (folder / f"ended-{dist.get_rank()}").touch()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
