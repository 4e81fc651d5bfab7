"""Times of a real step's operators, measured by torch's profiler, beside those that a roofline predicts for them.

An operator is memory-bound if its operations per byte (arithmetic intensity) are below the machine's balance: its
measured rate of matrix products over its measured memory bandwidth.

Source: the roofline model (Williams, Waterman and Patterson 2009, doi:10.1145/1498765.1498785).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils._python_dispatch import TorchDispatchMode

from autotune.cost_model.measured_rates import Work
from autotune.engines.torch_engine import TorchEngine
from autotune.errors import EngineError
from autotune.mechanics import devices
from autotune.mechanics.flops import matmul_peak
from autotune.mechanics.precision import DTYPES
from autotune.plan import Precision
from autotune.profiling.fake_trace import parts_of, work_of
from autotune.profiling.operator_kinds import UPDATE, kind_of

COMPUTE, MEMORY = "compute-bound", "memory-bound"
_MARK = "autotune operator "
_COPIED_BYTES, _REPETITIONS = 128 * 2**20, 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Rates:
    """The measured rates of a machine.

    Attributes:
        operations: highest rate of a matrix product in floating-point operations per second, by precision.
        bandwidth: bytes read and written per second by a copy that is larger than usual caches.
    """

    operations: Mapping[Precision, float]
    bandwidth: float

    @classmethod
    def measured(cls, precisions: Sequence[Precision], device: str) -> Rates:
        """Measure the rates of a device, with this process's threads if it is a CPU."""
        names = dict.fromkeys((Precision.FP32, *(name for name in precisions if name in DTYPES)))
        return cls(
            operations={name: matmul_peak(DTYPES[name], device) for name in names}, bandwidth=_copy_bandwidth(device)
        )

    def seconds(self, work: Work) -> tuple[float, float]:
        """Return the least seconds that an operator needs to compute, and those that it needs to move its bytes."""
        rates = {name.dtype: rate for name, rate in self.operations.items()}
        return work.operations / rates.get(work.dtype, rates["float32"]), work.moved_bytes / self.bandwidth

    def to_json(self) -> dict[str, Any]:
        """Return the rates as a JSON object, with the balance in operations per byte."""
        return {
            "operations_per_s": {str(name): rate for name, rate in self.operations.items()},
            "bytes_per_s": self.bandwidth,
            "balance": {str(name): rate / self.bandwidth for name, rate in self.operations.items()},
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """The operators of one kind and one bound in a step.

    Attributes:
        kind: one of ``KINDS``. All operators of the optimizer's update are one kind.
        bound: ``compute-bound`` or ``memory-bound``.
        calls: number of calls in a step.
        measured_s: their measured seconds in a step.
        predicted_s: seconds that the roofline predicts: for each call, the larger of computing and moving.
    """

    kind: str
    bound: str
    calls: float
    measured_s: float
    predicted_s: float


@dataclass(frozen=True, slots=True)
class TimedCall:
    """One call of an operator that computes or moves something.

    Attributes:
        work: what it computes and moves.
        updates: whether it is part of an optimizer's update.
        seconds: its measured time on the device.
    """

    work: Work
    updates: bool
    seconds: float


def operator_times(engine: TorchEngine, rates: Rates, *, steps: int = 2) -> list[OperatorTime]:
    """Train real steps under the engine's plan, and return the mean times of a step's operators by kind and bound.

    Args:
        engine: the engine; its plan has been warmed up.
        rates: the rates of the engine's device.
        steps: number of steps to train.

    Raises:
        EngineError: if a step fails, or torch's profiler cannot time the device.
    """

    def train() -> None:
        window = engine.run(steps)
        if window.failure is not None:
            raise EngineError(f"a profiled step failed: {window.failure} {window.failure_detail}")

    sums: dict[tuple[str, str], list[float]] = {}
    for call in timed_calls(engine.device, train):
        computing, moving = rates.seconds(call.work)
        kind = UPDATE if call.updates else kind_of(call.work.operator)
        total = sums.setdefault((kind, COMPUTE if computing > moving else MEMORY), [0.0, 0.0, 0.0])
        total[:] = total[0] + 1, total[1] + call.seconds, total[2] + max(computing, moving)
    return [
        OperatorTime(
            kind=kind, bound=bound, calls=calls / steps, measured_s=measured / steps, predicted_s=predicted / steps
        )
        for (kind, bound), (calls, measured, predicted) in sorted(sums.items())
    ]


def timed_calls(device: torch.device, run: Callable[[], None]) -> list[TimedCall]:
    """Return the calls of operators while ``run`` runs, in order.

    Raises:
        EngineError: if torch's profiler cannot time the device.
    """
    own = getattr(ProfilerActivity, device.type.upper(), None)
    if own is None:
        raise EngineError(f"torch's profiler does not time operators on {device.type}")
    observed, on_device, found = _Observed(), devices.is_accelerator(device), []
    profiler = profile(activities={ProfilerActivity.CPU, own}, acc_events=True)
    with devices.quiet_profiler(), profiler, observed.updates(), observed:
        run()
    for event in profiler.events():
        call = observed.calls[int(event.name.removeprefix(_MARK))] if event.name.startswith(_MARK) else None
        if call is not None and event.device_type.name == "CPU":
            seconds = (event.device_time_total if on_device else event.cpu_time_total) / 1e6
            found.append(TimedCall(*call, seconds))
    return found


class _Observed(TorchDispatchMode):
    """A mode that marks every operator for the profiler.

    Attributes:
        calls: each operator's work, in order, and whether it is part of an update; ``None`` for one that computes
            nothing, such as a view.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._updating = False
        self.calls: list[tuple[Work, bool] | None] = []

    @contextmanager
    def updates(self) -> Iterator[None]:
        """Note which operators are those of optimizers while the body runs."""

        def switch(updating: bool) -> Any:
            return lambda *_: setattr(self, "_updating", updating)

        with ExitStack() as hooks:
            hooks.callback(register_optimizer_step_pre_hook(switch(True)).remove)
            hooks.callback(register_optimizer_step_post_hook(switch(False)).remove)
            yield

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, number = kwargs or {}, len(self.calls)
        self.calls.append(None)
        with record_function(f"{_MARK}{number}"):
            result = func(*args, **kwargs)
        if not _is_view(func, args, kwargs, result):
            self.calls[number] = work_of(func, args, kwargs, result), self._updating
        return result


def _is_view(func: Any, args: Any, kwargs: Any, result: Any) -> bool:
    """Return whether an operator only returns what it was given, or no tensor."""
    if func._schema.is_mutable:
        return False
    given = {part.untyped_storage()._cdata for part in parts_of((args, kwargs))}
    return all(part.untyped_storage()._cdata in given for part in parts_of(result))


def _copy_bandwidth(device: str) -> float:
    """Return the highest measured rate of a copy in bytes read and written per second."""
    source = torch.zeros(_COPIED_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    seconds = [devices.seconds_of(lambda: target.copy_(source), device) for _ in range(1 + _REPETITIONS)]
    return 2 * _COPIED_BYTES / min(seconds[1:])
