"""Train a job by the techniques of other programs, in the loop that measures our own plans.

Run as a module, this file is the process of one arm. No plan is applied to a model under a
peer's technique: only the technique and k decide its memory and time.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import torch
import torch._functorch.config as partitioner
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from autotune.choices import STORAGES
from autotune.cost_model.paper_equations import kept_layers
from autotune.engines import worker_main
from autotune.engines.registry import ENGINES, EngineEntry
from autotune.engines.torch_engine import TorchEngine
from autotune.engines.worker_processes import leave, opened
from autotune.errors import InputError
from autotune.job import Job
from autotune.measurement import Measurement
from autotune.mechanics import controls, devices
from autotune.plan import Plan, PlanSpace

Blocks: TypeAlias = Sequence[nn.Module]

# The arm's engine among those of worker processes; no option names it.
ENGINE = "peer"
# The peer whose arm at the smallest k is the baseline; the first one of all.
PLAIN = "accumulation"
# Compiled versions of one function after which torch would stop compiling: blocks may differ by their attributes.
_VERSIONS = 256
# Shares of the activations that torch.compile may keep: all (its default), some, and only inputs of compiled code.
_KEPT_FRACS = (1.0, 0.5, 0.2, 0.0)
_aten = torch.ops.aten
# What torchtitan's selective checkpointing keeps, of which every second matrix product is computed again; convolutions
# are added, which its models do not have.
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.convolution.default}
_ATTENTION = {
    getattr(_aten, name).default
    for name in dir(_aten)
    if name.startswith("_scaled_dot_product") and not name.endswith("backward")
}


@dataclass(frozen=True, slots=True)
class Peer:
    """A technique of other programs for holding activations.

    Attributes:
        install: applies it to a model, in place; called with the model, its blocks and one of the options.
        options: the technique's settings, each of which is tried; ``None`` for a technique without settings.
        fp32: whether it is tried without autocast.
        bf16: whether it is tried under bf16 autocast, if the job's plans may use bf16.
    """

    install: Callable[[nn.Module, Blocks, Any], None]
    options: tuple[float | None, ...] = (None,)
    fp32: bool = True
    bf16: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Technique:
    """A peer with its settings.

    Attributes:
        peer: its name in :data:`PEERS`.
        option: one of the peer's options.
        bf16: whether the loss is computed under bf16 autocast.
    """

    peer: str
    option: float | None = None
    bf16: bool = False

    @property
    def setting(self) -> str:
        """Return the peer's name and its option, such as ``compile-blocks-0.2``."""
        return self.peer if self.option is None else f"{self.peer}-{self.option:g}"

    def name(self, accumulation_steps: int) -> str:
        """Return the name of the technique's arm at one k, such as ``peer:compile-blocks-0.2-bf16-k4``."""
        bf16 = "-bf16" if self.bf16 and PEERS[self.peer].fp32 else ""
        return f"peer:{self.setting}{bf16}-k{accumulation_steps}"


def techniques(names: Collection[str], *, bf16: bool) -> list[Technique]:
    """Return techniques by the names of their peers, with all settings, or by the names of single settings.

    Args:
        names: names in :data:`PEERS`, or of settings such as ``compile-blocks-0.2``.
        bf16: whether plans of the job may use bf16.

    Raises:
        InputError: if a name is unknown.
    """
    everything = [
        Technique(peer=name, option=option, bf16=autocast)
        for name, peer in PEERS.items()
        for option in peer.options
        for autocast, tried in ((False, peer.fp32), (True, bf16 and peer.bf16))
        if tried
    ]
    known = {*PEERS, *(one.setting for one in everything)}
    for name in names:
        if name not in known:
            raise InputError(f"peer {name!r} is unknown", where="--peers", allowed=sorted(known))
    return [one for one in everything if not {one.peer, one.setting}.isdisjoint(names)]


def comparable(job: Job) -> Job:
    """Return a job whose steps all consume one batch, which k splits, and whose plans may choose every storage."""
    fitting = tuple(k for k in job.accumulation_choices if k <= job.batch_size)
    return replace(
        job,
        batching="fixed",
        accumulation_choices=fitting,
        storages=[str(one) for one in STORAGES if not one.keeps_gathered],
    )


def block_names(space: PlanSpace) -> tuple[str, ...]:
    """Return the repeated blocks of a job's model; all its units if it has none."""
    return space.recomputable or tuple(unit.name for unit in space.units)


class PeerEngine(TorchEngine):
    """An engine that trains a comparable job under plans, or by a peer's technique at the plan's k.

    Args:
        job: the job.
        technique: fields of a :class:`Technique`; ``None`` for plans.
        common: further arguments of :class:`TorchEngine`.
    """

    def __init__(self, job: Job, *, technique: Mapping[str, Any] | None = None, **common: Any) -> None:
        super().__init__(comparable(job), **common)
        self._technique = None if technique is None else Technique(**technique)
        if self._technique is not None:
            controls.remove(self.model)
            blocks = [self.model.get_submodule(name) for name in block_names(self.space)]
            PEERS[self._technique.peer].install(self.model, blocks, self._technique.option)
            if self._technique.bf16:
                self.job = replace(self.job, loss=partial(_autocast_loss, self.job.loss, self.device.type))

    def apply(self, plan: Plan) -> None:
        """Make the next steps run under a plan; of a peer's plan, only k is applied.

        Raises:
            PlanError: if the plan lies outside the space; the previous plan stays.
        """
        if self._technique is None:
            super().apply(plan)
        elif plan != self.plan:
            self.plan = self.space.check(plan)
            self._steps_under_plan = 0

    def run(self, steps: int) -> Measurement:
        """Run a window, and give what it used back to the system: other arms wait in memory beside this one."""
        found = super().run(steps)
        devices.release(self.device)
        with contextlib.suppress(AttributeError, OSError):
            # Without it, the C library keeps freed activations; not every one has this function.
            ctypes.CDLL(None).malloc_trim(0)
        return found


def _autocast_loss(loss: Any, device_type: str, model: nn.Module, batch: Any) -> torch.Tensor:
    with torch.autocast(device_type, dtype=torch.bfloat16):
        found: torch.Tensor = loss(model, batch)
    return found


def _nothing(_model: nn.Module, _blocks: Blocks, _option: None) -> None:
    """Leave the model as it is."""


def _checkpointed(blocks: Blocks, **settings: Any) -> None:
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, **settings)


def _every_nth(_model: nn.Module, blocks: Blocks, option: float) -> None:
    """Recompute every n-th block, as transformers' ``every_n_layers`` does."""
    _checkpointed(blocks[:: int(option)])


def _recompute_all(_model: nn.Module, blocks: Blocks, _option: None) -> None:
    _checkpointed(blocks)


def _sqrt(_model: nn.Module, blocks: Blocks, _option: None) -> None:
    """Recompute all but ceil(sqrt(L)) evenly spaced blocks, as eq. 19 of the paper does."""
    kept = kept_layers(len(blocks))
    _checkpointed([block for number, block in enumerate(blocks) if number not in kept])


def _selective_op(_model: nn.Module, blocks: Blocks, _option: None) -> None:
    """Keep attention and every second matrix product of each block, as torchtitan's selective checkpointing does."""
    _checkpointed(blocks, context_fn=lambda: create_selective_checkpoint_contexts(_policy()))


def _policy() -> Callable[..., CheckpointPolicy]:
    """Return the policy of one call of a block; forward pass and recomputation count their products separately."""
    counts = {False: 0, True: 0}

    def decide(context: Any, operation: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
        if operation in _PRODUCTS:
            counts[context.is_recompute] += 1
            kept = counts[context.is_recompute] % 2 == 1
        else:
            kept = operation in _ATTENTION
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    return decide


def _compiled(_model: nn.Module, modules: Blocks, option: float) -> None:
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _VERSIONS)
    partitioner.activation_memory_budget = option
    for module in modules:
        module.compile()


def _compiled_whole(model: nn.Module, _blocks: Blocks, option: float) -> None:
    _compiled(model, [model], option)


PEERS: Mapping[str, Peer] = {
    PLAIN: Peer(_nothing, bf16=False),
    "uniform-bf16": Peer(_nothing, fp32=False),
    "recompute-all": Peer(_recompute_all),
    "every-n": Peer(_every_nth, (2, 3)),
    "sqrt": Peer(_sqrt),
    "selective-op": Peer(_selective_op),
    "compile": Peer(_compiled_whole, _KEPT_FRACS),
    "compile-blocks": Peer(_compiled, _KEPT_FRACS),
}


def main() -> None:
    """Serve the caller until it is gone."""
    ENGINES[ENGINE] = EngineEntry("autotune.bench.peer_engine", "PeerEngine", ("technique",), has_ranks=True)
    wire, opening, number = opened()
    worker_main.serve(wire, opening, number)
    leave()


if __name__ == "__main__":
    main()
