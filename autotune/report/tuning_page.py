"""The page of a tuning: the plan that was found, why, and what it took to find it."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from autotune.budget import format_bytes
from autotune.cost_model.carbon import parse_time
from autotune.measurement import Measurement
from autotune.plan import Plan, Storage
from autotune.report.campaign_page import NO_ENERGY, CampaignPage, Prediction, prediction_of
from autotune.report.campaign_plots import cost_plot, search_plot
from autotune.report.costs import energy_of
from autotune.report.pareto import Cost, measured_finals, measured_trial
from autotune.report.plan_section import plan_figure, plan_view
from autotune.report.plot import Plot
from autotune.report.rendering import Table, render
from autotune.report.svg import Figure, figure_of
from autotune.report.terminal_tables import tuned_line
from autotune.report.wording import count, milliseconds, size

_ROWS = 200


@dataclass(frozen=True, kw_only=True)
class TuningPage(CampaignPage):
    """The page of a tuning."""

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        return tuned_line(self.run.document)

    @property
    def text(self) -> str:
        """Return the page."""
        run, measured = self.run, self.run.document["measured"]
        budget, peak = run.budget_bytes, measured["peak_bytes"]
        fits = budget is None or (peak is not None and peak <= budget)
        more = f", the first {_ROWS} of them here" if len(run.trials) > _ROWS else ""
        return render(
            "tuning.html.j2",
            **self._shared(),
            heading=f"{run.job}: tuned with {self._method}",
            meta=f"{run.environment.device}, {self._budget()}. {run.folder.name}",
            good=fits and measured["cost"] < 1,
            cards=self._cards(),
            view=plan_view(run, self._method, self._plan),
            finalists=self._finalists(),
            pictures=self._pictures(),
            prediction=self._predictions(),
            costs=self._stages(),
            energy=self._energy_told(),
            measured=f"{count(len(run.trials), 'window')}{more}",
            trials=self._trials(),
        )

    @property
    def costs(self) -> Plot | None:
        """Return time against memory; ``None`` where neither was measured."""
        named = [(name, cost) for name, _, cost in self._named()]
        trials = [measured_trial(trial) for trial in self.run.trials if not trial["final"]]
        return cost_plot(self.run, named, [cost for cost in trials if cost is not None], self.front) if named else None

    @property
    def figures(self) -> list[Figure]:
        """Return every figure of the page."""
        return [*self._pictures(), plan_figure(self._method, self._plan)]

    @property
    def _method(self) -> str:
        return str(self.run.config.asked.method)

    @property
    def _plan(self) -> Plan:
        return Plan.from_json(self.run.document["plan"])

    def _pictures(self) -> list[Figure]:
        return [figure_of(plot) for plot in (self.costs, search_plot(self.run.trials)) if plot is not None]

    def _cards(self) -> list[tuple[str, str]]:
        document, measured, budget = self.run.document, self.run.document["measured"], self.run.budget_bytes
        peak = measured["peak_bytes"]
        return [
            ("time, of the baseline's", f"{measured['cost']:.2f}"),
            ("its peak", "unknown" if peak is None else format_bytes(peak)),
            ("peak, of the baseline's", "unknown" if peak is None else f"{peak / measured['baseline_peak_bytes']:.0%}"),
            ("peak, of the budget", "no budget" if budget is None or peak is None else f"{peak / budget:.0%}"),
            ("tuning", f"{document['tuning_s']:.0f} s"),
            ("real steps", f"{document['tuning_steps']:,}"),
        ]

    def _named(self) -> list[tuple[str, Plan, Cost]]:
        """Return the baseline, the chosen plan and the other finalists, as measured in the finals."""
        finals = measured_finals(self.run)
        baseline = next((plan for plan in finals if _is_baseline(plan)), None)
        chosen = self._plan.bare
        others = [plan for plan in finals if plan not in (baseline, chosen)]
        named = [("baseline", baseline), ("tuned", None if chosen == baseline else chosen)]
        named += [(f"finalist {number}", plan) for number, plan in enumerate(others, 2)]
        return [(name, plan, finals[plan]) for name, plan in named if plan in finals]

    def _finalists(self) -> Table:
        named, budget = self._named(), self.run.budget_bytes
        base = next((cost for name, _, cost in named if name == "baseline"), None)
        rows = [
            [
                name,
                f"{cost.seconds_per_sample * 1e3:.3g} ms",
                f"{cost.spread[0] * 1e3:.3g} to {cost.spread[1] * 1e3:.3g} ms",
                "" if base is None else f"{cost.seconds_per_sample / base.seconds_per_sample:.2f}",
                format_bytes(cost.peak_bytes),
                "" if budget is None else "yes" if cost.peak_bytes <= budget else "no",
                str(plan),
            ]
            for name, plan, cost in named
        ]
        columns = ("", "per sample", "lowest to highest step", "of baseline", "peak", "within budget", "plan")
        return Table(label="Baseline and finalists", columns=columns, rows=rows, numbers=(1, 2, 3, 4))

    def _predictions(self) -> Prediction:
        plans: dict[Plan, tuple[str, Plan, Cost | None]] = {one[1]: one for one in self._named()}
        for trial in self.run.trials:
            plan = Plan.from_json(trial["plan"])
            plans.setdefault(plan, (f"trial {trial['number']}", plan, measured_trial(trial)))
        return prediction_of(self.run, list(plans.values())[:_ROWS])

    def _stages(self) -> Table:
        """Return time and real steps of each stage of the tuning."""
        trials, document = self.run.trials, self.run.document
        search = [trial for trial in trials if not trial["final"]]
        begun = (trials[0]["tuning_s"], trials[0]["tuning_steps"]) if trials else (0.0, 0)
        # The first window ends the references; where nothing was searched for, it belongs to the finals.
        until = (search[-1]["tuning_s"], search[-1]["tuning_steps"]) if search else begun
        whole = (document["tuning_s"], document["tuning_steps"])
        names = ("references, profile, first window", "search", "finals")
        rows = [
            [name, f"{after[0] - before[0]:.1f} s", f"{after[1] - before[1]:,}"]
            for name, (before, after) in zip(names, pairwise([(0.0, 0), begun, until, whole]), strict=True)
        ]
        rows.append(["all", f"{whole[0]:.1f} s", f"{whole[1]:,}"])
        return Table(label="What it cost", columns=("stage", "time", "real steps"), rows=rows, numbers=(1, 2))

    def _energy_told(self) -> str:
        energy_j, source = energy_of([trial["measurement"] for trial in self.run.trials])
        if energy_j is None:
            return NO_ENERGY
        told = f"Energy of a window's timed steps: {energy_j:,.1f} J, mean ({source})."
        if self.intensity is None:
            return told
        begun = parse_time(self.run.environment.time, where=f"{self.run.folder / 'environment.json'}, time")
        grams = self.intensity.grams(energy_j, begun, begun)
        carbon = "the series does not cover the time of this run" if grams is None else f"{grams:.3g} g"
        return f"{told} Carbon at {self.intensity}: {carbon}."

    def _trials(self) -> Table:
        rows = []
        for trial in self.run.trials[:_ROWS]:
            window = Measurement.from_json(trial["measurement"])
            rows.append(
                [
                    f"{trial['number']}",
                    "final" if trial["final"] else "search",
                    milliseconds(window.seconds_per_step),
                    size(window.peak_bytes),
                    f"{trial['cost']:.3f}",
                    window.failure or "",
                    str(Plan.from_json(trial["plan"])),
                ]
            )
        columns = ("window", "stage", "step", "peak", "cost", "failure", "plan")
        return Table(label="Everything that was measured", columns=columns, rows=rows, numbers=(2, 3, 4))


def _is_baseline(plan: Plan) -> bool:
    low = any(choice.is_16_bit for choice in plan.precision.values())
    return plan.accumulation_steps == 1 and not low and Storage.RECOMPUTE not in plan.storage.values()
