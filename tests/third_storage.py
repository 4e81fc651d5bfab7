"""Use a storage that was added to a copy of the package: in one process, on real and on simulated jobs."""

import json
import sys

import numpy as np
import tiny_job
import torch

from autotune import EngineOptions, Plan, Storage, TorchEngine
from autotune.agents.planner import greedy_plan
from autotune.agents.scratch_network import Layout
from autotune.cli.terminal_panel import told_plan
from autotune.cost_model.cost_arrays import CostArrays
from autotune.cost_model.memory_model import peak_bytes
from autotune.cost_model.plan_pool import PoolSettings, make_pool
from autotune.cost_model.profile import Profile
from autotune.cost_model.solver import Goal, solve
from autotune.profiling.profiler import ProfilerOptions, profile
from autotune.profiling.unseen_costs import with_bounds
from autotune.report.explanation import unit_costs
from autotune.report.plan_export import export
from autotune.report.plan_section import plan_figure
from autotune.simulator.random_jobs import Shape, draw_profile

NEW = Storage(sys.argv[1])


def trained(storage: Storage) -> list[torch.Tensor]:
    """Return the weights after some steps."""
    engine = TorchEngine(tiny_job.make(), options=EngineOptions(discard_steps=0))
    engine.apply(engine.space.baseline().changed(storage=dict.fromkeys(engine.space.recomputable, storage)))
    engine.run(3)
    weights = [weight.detach().clone() for weight in engine.model.parameters()]
    engine.close()
    return weights


def measured(plan: Plan) -> int | None:
    """Return the measured peak of a plan."""
    engine = TorchEngine(tiny_job.make(), options=EngineOptions(discard_steps=1))
    engine.apply(plan)
    window = engine.run(3)
    engine.close()
    return window.peak_bytes


def simulated(found: Profile) -> bool:
    """Return whether the planners find plans of a simulated job that fit, and its plans survive encoding."""
    space, arrays = found.space, CostArrays([found])
    lean, base = (peak_bytes(found, plan) for plan in (space.leanest(), space.baseline()))
    budget = int(1.1 * lean + 0.3 * max(base - lean, 0))
    best, greedy = solve(found, budget, Goal()), greedy_plan(found, budget, Goal())
    plan = space.sample(np.random.default_rng(0))
    return (
        best.peak_bytes <= budget
        and peak_bytes(found, greedy) <= budget
        and arrays.decode(0, *arrays.encode(0, plan)) == plan
        and bool(make_pool(arrays, PoolSettings(size=16, worlds=2, budgets=4, rounds=1)).there.any())
        and Layout.of(space).sizes == space.sizes
    )


found = profile(tiny_job.make(accumulation_choices=(1, 2)), device_name="here", options=ProfilerOptions.lean())
space = found.space
mixed = space.baseline().changed(storage=dict(zip(space.recomputable, space.storages, strict=True)))
plans = [space.baseline().changed(storage=dict.fromkeys(space.recomputable, NEW)), mixed, space.leanest()]
budget = int(peak_bytes(found, space.leanest()) / 0.9)
kept = [segment.costs[f"fp32/{NEW}"].saved_bytes for segment in found.tables[0].segments if segment.unit == "blocks.1"]
sys.stdout.write(
    json.dumps(
        {
            "storages": list(space.storages),
            "exact": all(map(torch.equal, trained(Storage.SAVE), trained(NEW))),
            "peaks": [[peak_bytes(found, plan), measured(plan)] for plan in plans],
            "kept": kept,
            "solved": [solve(found, budget, Goal()).peak_bytes, budget],
            "simulated": [simulated(draw_profile(np.random.default_rng(seed), Shape())) for seed in range(5)],
            "bounded": sorted(
                with_bounds({f"fp32/{Storage.SAVE}": found.tables[0].segments[1].costs["fp32/save"]}, [])
            ),
            "told": [
                str(mixed),
                told_plan(mixed, frozenset(space.recomputable)),
                unit_costs(found, mixed)["blocks.0"],
                plan_figure("mine", mixed).described,
                *export(mixed, tiny_job.make(), "deepspeed").notes,
            ],
        }
    )
)
