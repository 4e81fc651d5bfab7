"""Measure what free knobs win on a job, side by side with the job as it is.

Each knob is first trained alone for a few steps, which gives the peak and tells whether losses and weights are those of
the job as it is. Then steps of the two alternate in this process, so that a machine that is slow for some seconds is
slow for both. Of many knobs, some look faster by chance: those that do are measured once more, together.
"""

from __future__ import annotations

import contextlib
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch

from autotune import knobs
from autotune.engines.job_checks import build_model, build_optimizer
from autotune.engines.torch_engine import EngineOptions, TorchEngine
from autotune.errors import EngineError, InputError
from autotune.io.progress import Reporter, Silent
from autotune.job import Job
from autotune.launching import launched, with_knobs
from autotune.measurement import Measurement
from autotune.mechanics.devices import device_kind, profiled, release
from autotune.plan import Launch
from autotune.records.run_documents import LaunchChoices, LaunchTrial
from autotune.stats import median_interval

# Steps that a knob trains alone: the first one creates the optimizer's state, and the second is metered.
_STEPS = 5
_ALONE = EngineOptions(statistics_every=None)
_TIMED = EngineOptions(statistics_every=None, meter_memory=False, discard_steps=0)
# Steps at the start of an alternation that are not timed.
_DISCARDED = 2
DEFAULT_PAIRS = 12
# With fewer, an interval of their median says little.
LEAST_PAIRS = 6
# The knob of the arithmetic of fp32, which has a launch choice of its own.
_TF32 = "tf32"
# An optimizer that saves memory, and may need other steps to converge: it is measured, and never recommended.
_LEAN = "adamw8bit"
_OTHERS = (_TF32, _LEAN)
_WHERE = "knobs"


class _FailedError(Exception):
    """A window failed; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Trained:
    """What a job trained: its losses, its weights and its peak memory in bytes, ``None`` if it cannot be metered."""

    losses: tuple[float, ...]
    weights: tuple[torch.Tensor, ...]
    peak_bytes: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class KnobTrials:
    """How knobs are measured.

    Attributes:
        only: the knobs that are measured, as behind a job's name; empty for all that are worth a trial here.
        pairs: most pairs of timed steps of each knob and the job as it is.
        tolerant: whether knobs may be recommended that round differently.
        seed: random seed for weights and batches.
        reporter: shows progress.
    """

    only: tuple[str, ...] = ()
    pairs: int = DEFAULT_PAIRS
    tolerant: bool = False
    seed: int = 0
    reporter: Reporter = field(default_factory=Silent)

    def __post_init__(self) -> None:
        if not LEAST_PAIRS <= self.pairs <= 10_000:
            raise InputError(f"is {self.pairs}", where="--pairs", allowed=f"{LEAST_PAIRS} to 10000")
        for name in self.only:
            if "+" in name:
                raise InputError(f"{name:.80} is more than one knob", where="--only", allowed="knobs between commas")
            if name not in _OTHERS:
                knobs.parsed(name, where="--only", others=_OTHERS)

    def measure(self, job: Job) -> LaunchChoices:
        """Return what each knob wins on a job, and which of them are recommended.

        A knob is recommended if the interval of its time ratio lies below 1, and it is exact or ``tolerant`` is set: of
        each group the fastest. All of them are measured again together, and the recommendation holds only if
        the same is true of them.

        Raises:
            InputError: if the job cannot be used.
            EngineError: if the job as it is cannot be trained.
        """
        names = self.only or (*_OTHERS, *knobs.candidates())
        self.reporter.stage(f"{job.name}: measure free knobs: {len(names)}", len(names) + 2)
        try:
            base, again = self._train(job), self._train(job)
            attends = self._attends(job)
        except _FailedError as error:
            raise EngineError(f"the job as it is cannot be trained: {error}") from error
        self.reporter.advance(1)
        trials = []
        for number, name in enumerate(names):
            absent = name.startswith("attention=") and not attends
            reason = "the job computes no attention by scaled_dot_product_attention" if absent else None
            trials.append(LaunchTrial(choice=name, reason=reason) if absent else self._trial(job, name, base))
            self.reporter.advance(number + 2, name)
        chosen = recommended(trials, tolerant=self.tolerant)
        together = self._trial(job, chosen, base) if chosen else None
        holds = together is not None and together.is_faster and (together.exact or self.tolerant)
        return LaunchChoices(
            job=job.name,
            steps=_STEPS,
            pairs=self.pairs,
            tolerant=self.tolerant,
            repeat_difference=difference(base, again),
            trials=trials,
            recommended=chosen if holds else None,
            together=together,
        )

    def _trial(self, job: Job, text: str, base: _Trained) -> LaunchTrial:
        """Measure knobs; an error of any kind is the reason why they cannot be used here."""
        try:
            changed = _with_lean_optimizer(job) if text == _LEAN else with_knobs(job, text, where=_WHERE)
            own = self._train(changed)
            ratios = self._ratios(changed, job)
        except (_FailedError, InputError) as error:
            return LaunchTrial(choice=text, reason=_reason(error))
        peaks = own.peak_bytes, base.peak_bytes
        apart = difference(own, base)
        low, high = median_interval(ratios)
        return LaunchTrial(
            choice=text,
            exact=apart == 0 and all(_promises(one) for one in text.split("+")),
            time_ratio=statistics.median(ratios),
            time_ratio_ci95=[low, high],
            peak_ratio=peaks[0] / peaks[1] if peaks[0] is not None and peaks[1] else None,
            difference=apart,
        )

    def _train(self, job: Job) -> _Trained:
        """Train a job alone from its initial weights."""
        with self._engine(job, _ALONE) as engine:
            windows = [_stepped(engine) for _ in range(_STEPS)]
            weights = tuple(weight.detach().cpu().clone() for weight in engine.model.state_dict().values())
            losses = tuple(window.loss or 0.0 for window in windows)
            return _Trained(losses=losses, weights=weights, peak_bytes=windows[-1].peak_bytes)

    def _ratios(self, job: Job, base: Job) -> list[float]:
        """Return the ratio of the step times of two jobs, whose steps alternate, first one and then the other first."""
        ratios = []
        # After a change of the process's settings, such as its threads, the first step also pays for the change.
        settles = knobs.of_process(job.launch.knobs) != knobs.of_process(base.launch.knobs)
        with self._engine(job, _TIMED) as own, self._engine(base, _TIMED) as other:
            for pair in range(_DISCARDED + self.pairs):
                seconds = {}
                for engine in (own, other) if pair % 2 else (other, own):
                    if settles:
                        _stepped(engine)
                    seconds[engine] = _stepped(engine).step_s[0]
                ratios.append(seconds[own] / seconds[other])
                timed = ratios[_DISCARDED:]
                if len(timed) >= LEAST_PAIRS and median_interval(timed)[0] > 1:
                    # Slower beyond doubt: more pairs cannot change what is recommended.
                    break
        return timed

    def _attends(self, job: Job) -> bool:
        """Return whether a step of a job calls torch's attention."""
        with self._engine(job, _TIMED) as engine, profiled() as seen:
            _stepped(engine)
        return any("scaled_dot_product" in event.key for event in seen.key_averages())

    @contextlib.contextmanager
    def _engine(self, job: Job, options: EngineOptions) -> Iterator[TorchEngine]:
        engine = TorchEngine(job, seed=self.seed, options=options)
        try:
            yield engine
        finally:
            engine.close()
            release(device_kind())


def recommended(trials: Sequence[LaunchTrial], *, tolerant: bool) -> str:
    """Return the fastest knob of each group that is faster than the job as it is; empty if there is none.

    Args:
        trials: trials of single knobs.
        tolerant: whether a knob may round differently.
    """
    best: dict[str, LaunchTrial] = {}
    for trial in trials:
        knob = knobs.KNOBS.get(trial.choice.partition("=")[0])
        lean = trial.choice == _LEAN or (knob is not None and knob.saves_memory)
        if not lean and trial.is_faster and (trial.exact or tolerant):
            group = trial.choice if knob is None else knob.group
            best[group] = min(trial, best.get(group, trial), key=_time_ratio)
    return "+".join(trial.choice for trial in trials if trial in best.values())


def difference(first: _Trained, second: _Trained) -> float:
    """Return the largest relative difference of two trainings' losses and weights; 0 if they are bit-identical.

    A tensor's difference is that of its elements in proportion to the largest element of the two.
    """
    pairs = [
        (torch.tensor(first.losses), torch.tensor(second.losses)),
        *zip(first.weights, second.weights, strict=True),
    ]
    return max(_apart(own.double(), other.double()) for own, other in pairs)


def _apart(own: torch.Tensor, other: torch.Tensor) -> float:
    if torch.equal(own, other) or not own.numel():
        return 0.0
    return float((own - other).abs().max() / torch.maximum(own.abs().max(), other.abs().max()))


def _stepped(engine: TorchEngine) -> Measurement:
    """Run one step and return its window; the step was made."""
    window = engine.run(1)
    if window.failure is not None:
        raise _FailedError(f"{window.failure}: {window.failure_detail}")
    return window


def _with_lean_optimizer(job: Job) -> Job:
    """Return a job with 8-bit states of its AdamW.

    Raises:
        InputError: if it has another optimizer, or a library is missing.
    """
    optimizer = type(build_optimizer(job, build_model(job))).__name__
    if optimizer != "AdamW" or job.launch.optimizer is not None:
        raise InputError(f"it replaces the job's own AdamW, and the job has {optimizer}", where=_WHERE)
    return launched(job, Launch(optimizer=_LEAN))


def _reason(error: Exception) -> str:
    """Return an error in words, with what is allowed."""
    if not isinstance(error, InputError) or not error.allowed:
        return error.problem if isinstance(error, InputError) else str(error)
    return f"{error.problem}; allowed: {error.allowed}"


def _promises(choice: str) -> bool:
    """Return whether a knob promises bit-identical training."""
    return choice not in _OTHERS and knobs.KNOBS[choice.partition("=")[0]].exact


def _time_ratio(trial: LaunchTrial) -> float:
    assert trial.time_ratio is not None
    return trial.time_ratio
