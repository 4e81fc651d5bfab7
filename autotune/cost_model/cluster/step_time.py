"""Seconds of one optimizer step of a layout, split by what takes them."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace

from autotune.cost_model.cluster.constants import Constants
from autotune.cost_model.cluster.layout import Layout
from autotune.cost_model.cluster.links import gather_seconds, rate, reduce_seconds
from autotune.cost_model.cluster.machines import Machine
from autotune.cost_model.cluster.products import Seconds, block_seconds, head_seconds
from autotune.cost_model.cluster.transformer import Transformer

# Rate of copies between a device and its host, in bytes per second: PCIe 4.0 with 16 lanes, as measured by copies.
_HOST_RATE = 25e9
# Bytes that an update moves per parameter: gradient, weight and two moments are read, all but the gradient written,
# plus the norm of the gradients.
_UPDATE_BYTES = 36.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSeconds:
    """Seconds of a step by what takes them; their sum is the step.

    Attributes:
        products: matrix products, the output projection included.
        attention: attention kernels.
        memory: operations bound by memory bandwidth, the loss included.
        recompute: activations that are computed again.
        tensor_parallel: collectives of tensor and context parallelism.
        sharding: gathers of weights and reductions of gradients that computing does not hide.
        bubble: idle time of pipeline stages.
        waiting: time in which ranks wait for the slowest one.
        update: the optimizer's update.
        fixed: what every step takes.
    """

    products: float
    attention: float
    memory: float
    recompute: float
    tensor_parallel: float
    sharding: float
    bubble: float
    waiting: float
    update: float
    fixed: float

    @property
    def total(self) -> float:
        """Return the seconds of the step."""
        return float(sum(getattr(self, one.name) for one in fields(self)))

    @property
    def binds(self) -> str:
        """Return the name of the largest part."""
        return max((one.name for one in fields(self)), key=lambda name: float(getattr(self, name)))


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds of one micro-batch in one block: forward, backward, what is run again; and of the output projection.

    They depend on what one rank computes, not on how many ranks there are.
    """

    forward: Seconds
    backward: Seconds
    again: Seconds
    head: float

    @classmethod
    def of(cls, model: Transformer, layout: Layout, machine: Machine, constants: Constants) -> Passes:
        """Return the seconds under a layout; arguments as for :func:`predict_seconds`."""
        layout = _on(machine, layout)
        blocks = block_seconds(model, layout, machine, constants)
        return cls(*blocks, head_seconds(model, layout, machine, constants))

    @property
    def block(self) -> float:
        """Return the seconds of all passes through one block."""
        return self.forward.total + self.backward.total + self.again.total


def predict_seconds(
    model: Transformer, layout: Layout, machine: Machine, constants: Constants, passes: Passes | None = None
) -> StepSeconds:
    """Return the predicted seconds of an optimizer step.

    Args:
        model: the transformer.
        layout: the layout.
        machine: the device and its links.
        constants: the model's constants.
        passes: what one micro-batch takes in one block, if that is known already.

    Source: pipelines idle for (stages - 1)/(micro-batches x chunks) of the computing (Narayanan et al. 2021,
    arXiv:2104.04473, section 2.2). The largest of n normal numbers lies about sqrt(2 ln n) standard deviations above
    their mean.
    """
    layout = _on(machine, layout)
    known = passes or Passes.of(model, layout, machine, constants)
    forward, backward, again, head = known.forward, known.backward, known.again, known.head
    layers = model.layers / layout.pp
    exchanged = _tensor_parallel(model, layout, machine, constants) * layers
    computing = [layers * one.total for one in (forward, backward, again)]
    sent = _passed_on(model, layout, machine, constants)
    # With several chunks, one computes while the messages and gradients of another are under way.
    spare = 0.0 if layout.virtual_stages == 1 else max(0.0, computing[1] * (1 - 1 / layout.virtual_stages) - sent)
    sent = sent if layout.virtual_stages == 1 else _visible(sent, sum(computing), constants)
    gathered, once = _sharding(model, layout, machine, constants, (forward, backward, again), spare)
    # Copies to the host run beside all that a stage does, visible communication included.
    offloaded = _offloaded(model, layout, layers, sum(computing) + exchanged + gathered + sent)
    added = _accumulated(model, layout, machine, constants)
    stage = sum(computing) + exchanged + gathered + sent + offloaded + added
    k = layout.micro_batches
    # The last stage computes the output projection as well and sets the pace.
    bubble = (layout.pp - 1) / layout.virtual_stages * (stage + head / layout.pp)
    busy = k * (stage + head) + bubble + once
    scale = _host_bound(forward, backward, layers)
    return StepSeconds(
        products=k * (layers * (forward.products + backward.products) * scale + head),
        attention=k * layers * (forward.attention + backward.attention) * scale,
        memory=k * layers * (forward.memory + backward.memory) * scale + k * added,
        recompute=k * computing[2],
        tensor_parallel=k * exchanged,
        sharding=k * (gathered + sent + offloaded) + once,
        bubble=bubble,
        waiting=constants.jitter * math.sqrt(2 * math.log(layout.devices)) * busy,
        update=_update(model, layout, machine, constants),
        fixed=constants.step_s,
    )


def _on(machine: Machine, layout: Layout) -> Layout:
    """Return what a device makes of a layout: products of 16 bits where it has none of 8."""
    return replace(layout, float8=False) if layout.float8 and not machine.float8 else layout


def _host_bound(forward: Seconds, backward: Seconds, layers: float) -> float:
    """Return the factor by which the host's launches stretch the device's work; 1 where the device is slower."""
    device = sum(one.products + one.attention + one.memory for one in (forward, backward)) * layers
    return (forward.total + backward.total) * layers / device


def _tensor_parallel(model: Transformer, layout: Layout, machine: Machine, constants: Constants) -> float:
    """Return the seconds of the collectives that one micro-batch needs in one block."""
    seconds = 0.0
    passes = 2 + (layout.checkpointed if layout.checkpointing == "full" else 0.0)
    if layout.tp > 1:
        size = 2.0 * layout.tokens * model.hidden
        # Each pass ends both of a block's halves with a sum over the ranks.
        each = 2 * reduce_seconds(size, layout.tp, 1, machine, constants)
        seconds += passes * each * (constants.async_exposed if layout.async_tp else 1.0)
    if layout.cp > 1:
        # Keys and values of the whole sequence reach every rank, and their gradients return.
        size = 2.0 * 2 * layout.micro_batch * layout.sequence * max(model.head_dim, model.kv_width // layout.tp)
        moved = gather_seconds(size, layout.cp, layout.tp, machine, constants)
        seconds += (passes + 1) * moved * constants.exposed_share
    return seconds


def _sharding(
    model: Transformer,
    layout: Layout,
    machine: Machine,
    constants: Constants,
    passes: tuple[Seconds, Seconds, Seconds],
    spare: float,
) -> tuple[float, float]:
    """Return the visible seconds of sharded or replicated states: for each micro-batch, and once a step.

    In pipelines, ``spare`` seconds of other chunks' passes hide what happens once; without pipelines, the last
    micro-batch's backward pass does.
    """
    layers = model.layers / layout.pp
    size = model.layer_parameters / layout.tp
    ends = (model.embedding_parameters + model.head_parameters) / layout.tp
    whole = layers * size + ends / min(layout.pp, 2)
    stride, group = layout.tp, layout.sharding
    among = layout.tp * layout.sharding
    copies = reduce_seconds(whole / group * layout.reduce_bytes, layout.replicas, among, machine, constants)
    copies *= layout.trainable
    if layout.zero_stage < 3:
        total = reduce_seconds(whole * layout.reduce_bytes, group, stride, machine, constants) * layout.trainable
        hidden = layers * passes[1].total if layout.pp == 1 else spare
        return 0.0, _visible(total + copies, hidden, constants)
    gather = gather_seconds(size * 2, group, stride, machine, constants)
    scatter = gather_seconds(size * layout.reduce_bytes, group, stride, machine, constants) * layout.trainable
    ahead, back = passes[0].total, passes[1].total + passes[2].total
    edges = gather_seconds(ends * 2, group, stride, machine, constants) * 2
    edges += gather_seconds(ends * layout.reduce_bytes, group, stride, machine, constants)
    if layout.keeps_gathered:
        return 0.0, _visible(layers * (gather + scatter) + edges / 2 + copies, spare, constants)
    each = _visible(gather + scatter, back, constants)
    # What replicas exchange hides behind the same backward pass, which can hide every second only once.
    last = _visible(gather + scatter + copies / layers, back, constants)
    return layers * (_visible(gather, ahead, constants) + each) + edges, layers * (last - each)


def _visible(moving: float, computing: float, constants: Constants) -> float:
    """Return the time by which a collective makes computing longer that may hide it."""
    return max(0.0, moving - computing) + constants.exposed_share * min(moving, computing)


def _passed_on(model: Transformer, layout: Layout, machine: Machine, constants: Constants) -> float:
    """Return the seconds in which a pipeline stage passes a micro-batch on, forward and backward."""
    if layout.pp == 1:
        return 0.0
    stride = layout.tp * layout.cp * layout.shard * layout.replicas
    size = 2.0 * layout.tokens * model.hidden / layout.tp * layout.virtual_stages
    return 2 * size / rate(machine, layout.pp, stride, constants)


def _offloaded(model: Transformer, layout: Layout, layers: float, stage: float) -> float:
    """Return the seconds by which copies of checkpointed activations to the host and back exceed the stage's others."""
    if not layout.offload or layout.checkpointing != "full":
        return 0.0
    moved = 2 * 2.0 * layout.tokens * model.hidden * layers * layout.checkpointed
    return max(0.0, moved / _HOST_RATE - stage)


def _accumulated(model: Transformer, layout: Layout, machine: Machine, constants: Constants) -> float:
    """Return the seconds in which one micro-batch adds its gradients to those of the ones before.

    Sharded gradients are added after their reduction, which takes no time worth counting. Transformer Engine's products
    add to the sum themselves, as Megatron-LM asks them to (gradient_accumulation_fusion).
    """
    if layout.micro_batches == 1 or layout.tuned or (layout.gathers and not layout.keeps_gathered):
        return 0.0
    held = model.layers / layout.pp * model.layer_parameters / layout.tp * layout.trainable
    # Both are read in 16 bits, or in the bytes of reductions, and the sum is written.
    return held * (2 + 2 * layout.reduce_bytes) / (machine.bandwidth * constants.bandwidth_share)


def _update(model: Transformer, layout: Layout, machine: Machine, constants: Constants) -> float:
    """Return the seconds of the optimizer's update on the fullest rank."""
    held = model.layers / layout.pp * model.layer_parameters + model.embedding_parameters
    held += model.head_parameters if layout.pp == 1 else 0
    share = layout.sharding if layout.zero_stage >= 1 else 1
    moved = _UPDATE_BYTES * layout.trainable * held / layout.tp / share
    return moved / (machine.bandwidth * constants.bandwidth_share)
