"""Print the peak bytes of one training step, by the engine's meter and by the kernel's high-water mark.

Run in a fresh process per plan: ``python peak_of_a_plan.py JOB PLAN_JSON``, with ``MALLOC_MMAP_THRESHOLD_=16384`` in
the environment so that freed tensors leave the resident set at once.
"""

from __future__ import annotations

import ctypes
import dataclasses
import gc
import json
import sys
from pathlib import Path

import torch

from autotune import EngineOptions, Plan, TorchEngine, load_job
from autotune.mechanics.memory_meter import resident_tensors, tensor_bytes

WARM_UP_STEPS = 3


def status_bytes(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    raise SystemExit(f"/proc/self/status has no {key}")


def main(job_name: str, plan_text: str) -> None:
    torch.set_num_threads(1)
    engine = TorchEngine(load_job(job_name), options=EngineOptions(meter_memory=False, statistics_every=10**6))
    engine.apply(Plan.from_json(json.loads(plan_text)))
    engine.run(WARM_UP_STEPS)
    gc.collect()
    batches = engine._take_batches()
    static = tensor_bytes(resident_tensors(engine.model, engine.update.optimizer, batches))
    # Memory that the heap keeps from earlier steps would be reused without being counted.
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    before = status_bytes("VmRSS")
    measured = engine.run(1)
    by_kernel = static + status_bytes("VmHWM") - before
    assert measured.failure is None, measured.failure_detail
    # The meter runs afterwards, because the profiler's own memory must not disturb the kernel's count.
    engine.options = dataclasses.replace(engine.options, meter_memory=True)
    by_meter = engine.run(1).peak_bytes
    print(json.dumps({"static_bytes": static, "by_kernel_bytes": by_kernel, "by_meter_bytes": by_meter}))  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:])
