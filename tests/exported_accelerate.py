"""Script that trains under an exported Accelerate configuration and records what happened."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import exported_job
import torch
from accelerate import Accelerator
from tiny_job import LENGTH, TEXT, mean_loss
from watching import Watcher


def main() -> None:
    """Train one pass over 96 texts."""
    folder = Path(sys.argv[1])
    note = json.loads((folder / "note.json").read_text())
    accelerator = Accelerator()
    torch.manual_seed(0)
    model = exported_job.plain()
    if note["apply"]:
        os.chdir(folder)
        exec("\n".join(note["apply"]), {"model": model})
    texts = torch.stack([TEXT[start : start + LENGTH + 1] for start in range(0, 96 * 7, 7)])
    loader = torch.utils.data.DataLoader(texts, batch_size=note["batch_size"])
    watcher = Watcher(model, exported_job.UNITS)
    model, optimizer, loader = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-2), loader)
    for batch in loader:
        with accelerator.accumulate(model):
            accelerator.backward(mean_loss(model, batch))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.7)
            optimizer.step()
            optimizer.zero_grad()
    found = {**watcher.seen(), "ranks": accelerator.num_processes, "mixed_precision": accelerator.mixed_precision}
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        (folder / "found.json").write_text(json.dumps(found))
    accelerator.end_training()


if __name__ == "__main__":
    main()
