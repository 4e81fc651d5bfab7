"""Export of a plan as a complete training script with a plain loop.

Plans and references are inserted as ``repr`` of plain data, never as source code.
"""

from __future__ import annotations

import json
import pprint
import re
import textwrap
from dataclasses import replace
from pathlib import Path

from autotune import knobs
from autotune.catalog import is_catalog_reference
from autotune.cost_model.learning_rate import batch_factor
from autotune.errors import InputError, PlanError
from autotune.job import Job
from autotune.launching import plain
from autotune.mesh import Mesh
from autotune.plan import Launch, Plan
from autotune.report.export_targets import Export, clip_norm
from autotune.report.launchers import own_launch

FILE = "train_tuned.py"

_SCRIPT = '''"""Train a job under a tuned plan."""

{imported}
PLAN = Plan.from_json(
{document}
)


def main() -> None:
    """Train to the job's last sample and print its metric."""
    job = load_job({reference!r})
    torch.manual_seed(0)
{placed}
    model = job.model().to(device)
{spread}
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
{looped}
{updated}
        optimizer.zero_grad()
{ended}    model.eval()
{evaluated}


if __name__ == "__main__":
    main()
'''


def to_python(plan: Plan, job: Job, reference: str, ranks: int = 1) -> Export:
    """Return a script that trains the job under the plan, in one process or on ranks through ``fully_shard``.

    Args:
        plan: a plan of the job.
        job: the job.
        reference: reference of the job.
        ranks: number of ranks.

    Raises:
        InputError: if the reference is empty.
        PlanError: if a batch has fewer samples than ranks, or if the plan is for another number of ranks, or needs a
            scaled loss on several.
    """
    if not reference:
        raise InputError("a job was given without its reference", where="export", allowed="what load_job takes")
    mesh = None if ranks == 1 else _mesh_of(plan, job, ranks)
    # The repr of a number of another library names its type; JSON makes it a plain number.
    document = json.loads(json.dumps(plan.to_json()))
    script = _SCRIPT.format(
        imported="\n".join(_imports(plan, job, mesh)),
        reference=reference,
        document=textwrap.indent(pprint.pformat(document, width=110, sort_dicts=False), " " * 4),
        placed=_block(1, ["device = torch.device(devices.device_kind())"] if mesh is None else _JOINED),
        spread=_block(1, [] if mesh is None else _spread(plan, mesh)),
        prepared=_block(1, _prepared(plan, job)),
        taken=_block(2, _taken(plan, job, mesh)),
        looped=_block(2, _looped(plan, mesh)),
        updated=_block(2, _updated(plan, job, mesh)),
        ended=_block(2, ["scheduled.advance()", ""]) if job.scheduler is not None else "",
        evaluated=_block(1, _EVALUATED if mesh is None else _evaluated_on_ranks(plan)),
    )
    command = f"python {FILE}" if mesh is None else f"torchrun --nproc-per-node {ranks} {FILE}"
    notes = (_place(reference), *_notes(plan, job, mesh))
    return Export(files={FILE: _without_empty(script)}, command=command, notes=notes)


_JOINED = [
    "kind = devices.device_kind()",
    'device = devices.rank_device(kind, int(os.environ["LOCAL_RANK"]))',
    "distributed.init_process_group(devices.collective_backend(kind))",
    "rank, ranks = distributed.get_rank(), distributed.get_world_size()",
]
_EVALUATED = [
    "with torch.no_grad(), controls.suspended(model):",
    '    print(json.dumps({"samples": samples, "metric": job.evaluate(model)}))',
]


def _evaluated_on_ranks(plan: Plan) -> list[str]:
    """Return the lines that tell the metric of the weights as they are."""
    lines = [
        "gather_rest(model)",
        "with torch.no_grad(), controls.suspended(model):",
        "    metric = job.evaluate(model)",
    ]
    if knobs.communication(plan.launch.knobs).gathers_in_16_bit:
        lines = ["with forms.exact_weights():", *(f"    {line}" for line in lines)]
    printed = '    print(json.dumps({"samples": samples, "metric": metric}))'
    return [*lines, "if rank == 0:", printed, "distributed.destroy_process_group()"]


def _mesh_of(plan: Plan, job: Job, ranks: int) -> Mesh:
    """Return the layout of the ranks: the plan's, or shards alone."""
    if ranks > job.batch_size:
        problem = f"batch_size is {job.batch_size}, and --ranks is {ranks}"
        raise PlanError(problem, where="export", allowed="at least one sample for each rank")
    mesh = plan.launch.layout or Mesh(shard=ranks)
    if mesh.ranks != ranks:
        problem = f"the plan's mesh {mesh} is for {mesh.ranks} ranks, and --ranks is {ranks}"
        raise PlanError(problem, where="export", allowed=f"--ranks {mesh.ranks}")
    knobs.require_receivers(plan.launch.knobs, mesh)
    if mesh.tp > 1:
        problem = f"a script cannot divide layers between ranks, as the plan's mesh {mesh} does"
        raise PlanError(problem, where="export", allowed="a plan without tp, --to torchtitan or --to accelerate")
    if plan.needs_loss_scaling:
        problem = "ranks would have to agree on which fp16 gradients overflowed"
        raise PlanError(problem, where="export", allowed="a plan in fp32 or bf16, or --to accelerate")
    return mesh


def _imports(plan: Plan, job: Job, mesh: Mesh | None) -> list[str]:
    """Return the lines that import what the script uses, in order."""
    torches = ["import torch", *([] if mesh is None else ["from torch import distributed"])]
    lines = ["import itertools", "import json", *([] if mesh is None else ["import os"]), "", *torches]
    lines += ["", "from autotune import Plan, load_job"]
    if job.scheduler is not None:
        lines.append("from autotune.engines.learning_rates import LearningRates")
    lines.append("from autotune.mechanics import controls, devices, cutting")
    if mesh is None:
        if _cuts_by_cost(job):
            lines.append("from autotune.mechanics.cutting import Cutting")
        return [*lines, "from autotune.mechanics.trees import map_tensors", ""]
    cut = "deal_to_ranks" if job.batching == "adaptive" else "cut_for_ranks"
    return [
        *lines,
        *(["from autotune.knobs import Communication"] if knobs.of_ranks(plan.launch.knobs) else []),
        "from autotune.mechanics.agreed_use import contained_units",
        "from autotune.mechanics.cutting import Cutting",
        "from autotune.mechanics.fully_sharded import gather_rest, keep_gathered, spread",
        f"from autotune.mechanics.rank_shares import {cut}, shares_of",
        "from autotune.mechanics.shared_norm import share_statistics",
        "from autotune.mechanics.trees import map_tensors",
        "from autotune.mesh import Mesh",
        "",
    ]


def _spread(plan: Plan, mesh: Mesh) -> list[str]:
    """Return the lines that spread the model over the ranks."""
    sent = knobs.communication(plan.launch.knobs)
    forms = "forms = " if sent.gradient_rank or sent.gathers_in_16_bit else ""
    form = f", sent={sent}" if knobs.of_ranks(plan.launch.knobs) else ""
    lines = [
        "# Units whose weights nothing else uses gather them by themselves: fully_shard() on each, then on the model.",
        "batch = map_tensors(lambda part: part.to(device), next(iter(job.batches(0))))",
        "own = contained_units(model, list(PLAN.precision), lambda: job.loss(model, batch), rank)",
        f"{forms}spread(model, own, Mesh.parse({str(mesh)!r}), device.type{form})",
    ]
    if mesh.shard > 1:
        lines.append("keep_gathered(model, {name: one.keeps_gathered for name, one in PLAN.storage.items()})")
    return [*lines, "share_statistics(model)", "# Ranks draw dropout of their own.", "torch.manual_seed(rank)"]


def _looped(plan: Plan, mesh: Mesh | None) -> list[str]:
    """Return the line that begins the loop over micro-batches, and the lines by which replicas reduce once a step."""
    if mesh is None:
        return ["for piece, weight in cutting.shares(pieces, job.count).here:"]
    lines = ["here = shares_of(grid, rank, job.count)[0].here"]
    if mesh.dp == 1 or knobs.communication(plan.launch.knobs).gradient_rank:
        return [*lines, "for piece, weight in here:"]
    mark = "set_requires_gradient_sync" if mesh.shard == 1 else "set_requires_all_reduce"
    return [
        *lines,
        "for left, (piece, weight) in zip(reversed(range(len(here))), here):",
        f"    model.{mark}(left == 0)",
    ]


def _place(reference: str) -> str:
    """Return what the script needs where it runs: this package, and the job's own file or modules."""
    if is_catalog_reference(reference):
        return "the script needs autotune installed"
    name, folder = plain(reference), Path.cwd()
    if Path(name.partition(":")[0]).is_absolute():
        return f"the script needs autotune installed, and the job's file: {name}"
    started = f"start it in the folder {folder}, by its path from there"
    return f"the script needs autotune installed, and the job {name}: {started}"


def _notes(plan: Plan, job: Job, mesh: Mesh | None) -> tuple[str, ...]:
    """Return what the script does not include."""
    # The arithmetic of fp32 and some knobs are settings of the process, so the script cannot get them from the job.
    alone, asked = (replace(one.on_one_rank, fp32=None) for one in (job.launch, plan.launch))
    settings = knobs.of_process(plan.launch.knobs)
    own = Launch(fp32=plan.launch.fp32, knobs=settings) if asked == alone else plan.launch
    own = replace(own, pipeline=plan.launch.pipeline)
    if mesh is not None:
        own = replace(own, mesh=None, knobs=knobs.of_one_rank(own.knobs))
    held = own_launch(plan.changed(launch=own))
    return (f"not included: {held}",) if held else ()


def _without_empty(script: str) -> str:
    """Return a script without the empty lines that parts which it does not need have left within a function."""
    return re.sub(r"(?<=\n)\n(?=    \S)", "", script)


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


def _taken(plan: Plan, job: Job, mesh: Mesh | None) -> list[str]:
    """Return the lines that take a step's micro-batches and set its learning rate."""
    several, counted = "list(itertools.islice(batches, PLAN.accumulation_steps))", "cutting.num_samples"
    if job.batching == "adaptive":
        lines = [f"pieces = {several}", f"samples += sum({counted}(piece) for piece in pieces)"]
        if mesh is not None:
            lines.append("grid = deal_to_ranks(pieces, ranks, Cutting.of(job))")
    elif mesh is not None:
        grid = "grid = cut_for_ranks(batch, ranks, PLAN.accumulation_steps, Cutting.of(job))"
        lines = ["batch = next(batches)", f"samples += {counted}(batch)", grid]
    else:
        cut = "Cutting.of(job).pieces" if _cuts_by_cost(job) else "cutting.split"
        lines = [f"pieces = {cut}(next(batches), PLAN.accumulation_steps)"]
        lines.append(f"samples += sum({counted}(piece) for piece in pieces)")
    if factors := _factors(plan, job):
        lines.append("for group, rate in zip(optimizer.param_groups, rates):")
        lines.append(f'    group["lr"] = {" * ".join(["rate", *factors])}')
    return lines


def _updated(plan: Plan, job: Job, mesh: Mesh | None) -> list[str]:
    """Return the lines that run one micro-batch and, after the last one, update the weights."""
    norm = clip_norm(job)
    low_rank = mesh is not None and knobs.communication(plan.launch.knobs).gradient_rank
    average = (
        ["forms.average([parameter.grad for parameter in parameters])", "forms.average.keep()"] if low_rank else []
    )
    clip = [*average, *([f"torch.nn.utils.clip_grad_norm_(parameters, {norm!r})"] if norm else [])]
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
