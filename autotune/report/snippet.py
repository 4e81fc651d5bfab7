"""Export of a plan as a complete training script with a plain loop.

Plans and references are inserted as ``repr`` of plain data, never as source code.
"""

from __future__ import annotations

import json
import pprint
import textwrap
from dataclasses import replace

from autotune import knobs
from autotune.cost_model.learning_rate import batch_factor
from autotune.errors import InputError
from autotune.job import Job
from autotune.plan import Launch, Plan
from autotune.report.export_targets import Export, clip_norm
from autotune.report.launchers import own_launch

FILE = "train_tuned.py"

_SCRIPT = '''"""Train a job under a tuned plan."""

import itertools
import json

import torch

from autotune import Plan, load_job
{imported}from autotune.mechanics import controls, devices, stepping
{cutting}from autotune.mechanics.trees import map_tensors

PLAN = Plan.from_json(
{document}
)


def main() -> None:
    """Train to the job's last sample and print its metric."""
    job = load_job({reference!r})
    torch.manual_seed(0)
    device = torch.device(devices.device_kind())
    model = job.model().to(device)
    # Precision and recomputation, unit by unit; controls.remove(model) takes them back.
    controls.apply(model, PLAN)
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
{prepared}
    # A pass over the data that ends is followed by another one.
    passes = itertools.chain.from_iterable(job.batches(seed) for seed in itertools.count())
    batches = (map_tensors(lambda part: part.to(device), batch) for batch in passes)
    samples = 0
    while samples < job.total_samples:
{taken}
        # Weighted by their share of the loss, the micro-batches give the gradient of the whole step for any k.
        for piece, weight in stepping.shares(pieces, job.count).here:
{updated}
        optimizer.zero_grad()
{ended}    model.eval()
    with torch.no_grad(), controls.suspended(model):
        print(json.dumps({{"samples": samples, "metric": job.evaluate(model)}}))


if __name__ == "__main__":
    main()
'''


def to_python(plan: Plan, job: Job, reference: str) -> Export:
    """Return a script that trains the job under the plan, in one process.

    Args:
        plan: a plan of the job.
        job: the job.
        reference: reference of the job.

    Raises:
        InputError: if the reference is empty.
    """
    if not reference:
        raise InputError("a job was given without its reference", where="export", allowed="what load_job takes")
    # The repr of a number of another library names its type; JSON makes it a plain number.
    document = json.loads(json.dumps(plan.to_json()))
    script = _SCRIPT.format(
        reference=reference,
        imported="" if job.scheduler is None else "from autotune.engines.learning_rates import LearningRates\n",
        cutting="from autotune.mechanics.cutting import Cutting\n" if _cuts_by_cost(job) else "",
        document=textwrap.indent(pprint.pformat(document, width=110, sort_dicts=False), " " * 4),
        prepared=_block(1, _prepared(plan, job)),
        taken=_block(2, _taken(plan, job)),
        updated=_block(2, _updated(plan, job)),
        ended=_block(2, ["scheduled.advance()", ""]) if job.scheduler is not None else "",
    )
    # The arithmetic of fp32 and some knobs are settings of the process, so the script cannot get them from the job.
    alone, asked = (replace(one.on_one_rank, fp32=None) for one in (job.launch, plan.launch))
    settings = knobs.of_process(plan.launch.knobs)
    own = Launch(fp32=plan.launch.fp32, knobs=settings) if asked == alone else plan.launch
    held = own_launch(plan.changed(launch=own))
    return Export(files={FILE: script}, command=f"python {FILE}", notes=(f"not included: {held}",) if held else ())


def _prepared(plan: Plan, job: Job) -> list[str]:
    """Return the lines that create the optimizer and the other objects that a step needs."""
    lines = ["optimizer = job.optimizer(parameters)"]
    if job.scheduler is not None:
        lines.append("scheduled = LearningRates(job, optimizer, job.total_samples)")
    if plan.needs_loss_scaling:
        lines.append("scaler = torch.amp.GradScaler(parameters[0].device.type)")
    if _factors(plan, job):
        lines.append('rates = [group["lr"] for group in optimizer.param_groups]')
    return lines


def _cuts_by_cost(job: Job) -> bool:
    return job.batching == "fixed" and job.split != "samples"


def _taken(plan: Plan, job: Job) -> list[str]:
    """Return the lines that take a step's micro-batches and set its learning rate."""
    cut = "Cutting.of(job).pieces" if _cuts_by_cost(job) else "stepping.split"
    fixed = f"pieces = {cut}(next(batches), PLAN.accumulation_steps)"
    adaptive = "pieces = list(itertools.islice(batches, PLAN.accumulation_steps))"
    lines = [
        adaptive if job.batching == "adaptive" else fixed,
        "samples += sum(stepping.num_samples(piece) for piece in pieces)",
    ]
    if factors := _factors(plan, job):
        lines.append("for group, rate in zip(optimizer.param_groups, rates):")
        lines.append(f'    group["lr"] = {" * ".join(["rate", *factors])}')
    return lines


def _updated(plan: Plan, job: Job) -> list[str]:
    """Return the lines that run one micro-batch and, after the last one, update the weights."""
    norm = clip_norm(job)
    clip = [f"torch.nn.utils.clip_grad_norm_(parameters, {norm!r})"] if norm else []
    loss = "    loss = job.loss(model, piece) * weight"
    if not plan.needs_loss_scaling:
        return [loss, "    loss.backward()", *clip, "optimizer.step()"]
    unscale = ["scaler.unscale_(optimizer)"] if clip else []
    return [loss, "    scaler.scale(loss).backward()", *unscale, *clip, "scaler.step(optimizer)", "scaler.update()"]


def _factors(plan: Plan, job: Job) -> list[str]:
    """Return the factors of a step's learning rate."""
    scheduled = [] if job.schedule is None else ["job.schedule.factor(samples / job.total_samples)"]
    larger = batch_factor(job.lr_rule, plan.accumulation_steps, 1) if job.batching == "adaptive" else 1.0
    return [*scheduled, *([] if larger == 1.0 else [repr(larger)])]


def _block(depth: int, lines: list[str]) -> str:
    return textwrap.indent("\n".join(lines), " " * 4 * depth)
