"""Make the page of a tuning: what was found, why, and what finding it took."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from autotune.budget import format_bytes
from autotune.cost_model.carbon import Intensity, parse_time
from autotune.measurement import Measurement
from autotune.plan import Plan
from autotune.records.run_documents import TuneConfig
from autotune.report.attached_run import count
from autotune.report.campaign_run import CampaignRun
from autotune.report.campaign_sections import (
    environment_section,
    prediction_table,
    repeat_section,
    trade_figure,
    trade_of,
)
from autotune.report.costs import energy_of
from autotune.report.curves import Line, curves
from autotune.report.html import Html, cards, element, join, page, section, table
from autotune.report.pareto import Cost, Front, measured_finals, measured_trial
from autotune.report.plan_section import plan_figure, plan_section
from autotune.report.scatter import Trade
from autotune.report.svg import Figure
from autotune.report.terminal_tables import tuned_line

_ROWS = 200


@dataclass(frozen=True, slots=True, kw_only=True)
class TuningPage:
    """A tuning and what its page needs beside it.

    Attributes:
        run: the tuning.
        front: what the profile predicts to be best; ``None`` without a profile.
        intensity: the grid's carbon intensity; ``None`` if it was not given.
    """

    run: CampaignRun
    front: Front | None
    intensity: Intensity | None = None

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        return tuned_line(self.run.document)

    @property
    def text(self) -> str:
        """Return the page."""
        run = self.run
        return page(
            f"autotune: {run.job}",
            self._head(),
            section("The plan", plan_section(run, self._method, self._plan)),
            section("Baseline and finalists", self._finalists()),
            section("Pictures", element("div", *(figure.html for figure in self._pictures()), class_="figures")),
            section("Predicted against measured", self._predictions()),
            section("What it cost", self._costs()),
            section("Everything that was measured", self._trials()),
            section("Environment and data", environment_section(run)),
            section("Repeat it", repeat_section(run)),
        )

    @property
    def trade(self) -> Trade | None:
        """Return time against memory; ``None`` where neither was measured."""
        named = [(name, cost) for name, _, cost in self._named()]
        costs = [measured_trial(trial) for trial in self.run.trials if not trial["final"]]
        return trade_of(self.run, named, [cost for cost in costs if cost is not None], self.front) if named else None

    @property
    def figures(self) -> list[Figure]:
        """Return every figure of the page."""
        return [*self._pictures(), plan_figure(self._method, self._plan)]

    @property
    def _method(self) -> str:
        assert isinstance(self.run.config, TuneConfig)
        return self.run.config.method

    @property
    def _plan(self) -> Plan:
        return Plan.from_json(self.run.document["plan"])

    def _head(self) -> Html:
        run, measured = self.run, self.run.document["measured"]
        budget, peak = run.budget_bytes, measured["peak_bytes"]
        fits = budget is None or (peak is not None and peak <= budget)
        good = fits and measured["cost"] < 1
        shown = [
            ("time, of the baseline's", f"{measured['cost']:.2f}"),
            ("its peak", "unknown" if peak is None else format_bytes(peak)),
            ("peak, of the baseline's", "unknown" if peak is None else f"{peak / measured['baseline_peak_bytes']:.0%}"),
            ("peak, of the budget", "no budget" if budget is None or peak is None else f"{peak / budget:.0%}"),
            ("tuning", f"{run.document['tuning_s']:.0f} s"),
            ("real steps", f"{run.document['tuning_steps']:,}"),
        ]
        told = "no budget" if budget is None else f"budget {format_bytes(budget)}"
        device = run.environment.device
        return join(
            [
                element("h1", f"{run.job}: tuned with {self._method}"),
                element("p", f"{device}, {told}. {run.folder.name}", class_="meta"),
                element("p", self.verdict, class_="verdict" if good else "verdict warn"),
                cards(shown),
            ]
        )

    def _named(self) -> list[tuple[str, Plan, Cost]]:
        """Return the baseline, the chosen plan and the other finalists, as measured in the finals."""
        finals = measured_finals(self.run)
        baseline = next((plan for plan in finals if _is_baseline(plan)), None)
        named = [] if baseline is None else [("baseline", baseline, finals[baseline])]
        others = 0
        for plan, cost in finals.items():
            if plan == self._plan.bare and plan != baseline:
                named.append(("tuned", plan, cost))
            elif plan != baseline:
                others += 1
                named.append((f"finalist {others + 1}", plan, cost))
        order = {"baseline": 0, "tuned": 1}
        return sorted(named, key=lambda item: order.get(item[0], 2))

    def _finalists(self) -> Html:
        named = self._named()
        if not named:
            return element("p", "No final window was recorded.")
        base = next((cost for name, _, cost in named if name == "baseline"), None)
        budget = self.run.budget_bytes
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
        said = (
            "Measured again after the search, interleaved with the baseline: the window that won a search is never its "
            "score. One seed on one machine: a comparison on fresh seeds is what shows a difference."
        )
        return join([element("p", said), table("Baseline and finalists", columns, rows, numbers=(1, 2, 3, 4))])

    def _pictures(self) -> list[Figure]:
        named = [(name, cost) for name, _, cost in self._named()]
        trade = self.trade
        return [*([] if trade is None else [trade_figure(self.run, named, trade, self.front)]), *self._search()]

    def _search(self) -> list[Figure]:
        """Return how the best plan so far became better with steps spent, if there was a search."""
        points: list[tuple[float, float]] = []
        for trial in self.run.trials:
            window = Measurement.from_json(trial["measurement"])
            fits = window.failure is None and window.within_budget and window.throughput is not None
            if not trial["final"] and fits and (not points or trial["cost"] < points[-1][1]):
                points += [(trial["tuning_steps"], points[-1][1])] if points else []
                points.append((trial["tuning_steps"], trial["cost"]))
        spent = [trial["tuning_steps"] for trial in self.run.trials if not trial["final"]]
        if len(spent) < 2 or not points:
            return []
        points.append((max(spent), points[-1][1]))
        figure = curves(
            "The search",
            f"Cost of the best plan so far against real steps spent: {points[-1][1]:.2f} of the baseline's at last. "
            "The finals, which decide, are not in it.",
            [Line(number=2, name="best plan so far", points=points)],
            target=None,
            edge=None,
            x_name="real steps",
            y_name="cost, of the baseline's",
        )
        return [figure]

    def _predictions(self) -> Html:
        plans: dict[Plan, tuple[str, Plan, Cost | None]] = {
            plan: (name, plan, cost) for name, plan, cost in self._named()
        }
        for trial in self.run.trials:
            plan = Plan.from_json(trial["plan"])
            plans.setdefault(plan, (f"trial {trial['number']}", plan, measured_trial(trial)))
        return prediction_table(self.run, list(plans.values())[:_ROWS])

    def _costs(self) -> Html:
        run = self.run
        search = [trial for trial in run.trials if not trial["final"]]
        begun = (run.trials[0]["tuning_s"], run.trials[0]["tuning_steps"]) if run.trials else (0.0, 0)
        until = (search[-1]["tuning_s"], search[-1]["tuning_steps"]) if search else begun
        whole = (run.document["tuning_s"], run.document["tuning_steps"])
        # The first window ends the references; where nothing was searched for, it belongs to the finals.
        stages = [(0.0, 0), begun, until, whole] if search else [(0.0, 0), begun, begun, whole]
        names = ("references, profile, first window", "search", "finals")
        rows = [
            [name, f"{after[0] - before[0]:.1f} s", f"{after[1] - before[1]:,}"]
            for name, (before, after) in zip(names, pairwise(stages), strict=True)
        ]
        rows.append(["all", f"{whole[0]:.1f} s", f"{whole[1]:,}"])
        energy, source = energy_of([trial["measurement"] for trial in run.trials])
        told = "Energy: absent. No meter could be read on this machine, and nothing is estimated in its place."
        if energy is not None:
            told = f"Energy of a window's timed steps: {energy:,.1f} J, mean ({source})."
            told += self._carbon_told(energy)
        listed = table("What it cost", ("stage", "time", "real steps"), rows, numbers=(1, 2))
        return join([listed, element("p", told, class_="note")])

    def _carbon_told(self, energy_j: float) -> str:
        if self.intensity is None:
            return ""
        begun = parse_time(self.run.environment.time, where=f"{self.run.folder / 'environment.json'}, time")
        grams = self.intensity.grams(energy_j, begun, begun)
        told = "the series says nothing of the time of this run" if grams is None else f"{grams:.3g} g"
        return f" Carbon at {self.intensity}: {told}."

    def _trials(self) -> Html:
        rows = []
        for trial in self.run.trials[:_ROWS]:
            window = Measurement.from_json(trial["measurement"])
            rows.append(
                [
                    f"{trial['number']}",
                    "final" if trial["final"] else "search",
                    "" if window.seconds_per_step is None else f"{window.seconds_per_step * 1e3:,.1f} ms",
                    "" if window.peak_bytes is None else format_bytes(window.peak_bytes),
                    f"{trial['cost']:.3f}",
                    window.failure or "",
                    str(Plan.from_json(trial["plan"])),
                ]
            )
        columns = ("window", "stage", "step", "peak", "cost", "failure", "plan")
        more = f", the first {_ROWS} of them here" if len(self.run.trials) > _ROWS else ""
        listed = table("Everything that was measured", columns, rows, numbers=(2, 3, 4))
        return element("details", element("summary", f"{count(len(self.run.trials), 'window')}{more}"), listed)


def _is_baseline(plan: Plan) -> bool:
    return (
        plan.accumulation_steps == 1
        and not any(choice.is_16_bit for choice in plan.precision.values())
        and not any(str(choice) == "recompute" for choice in plan.storage.values())
    )
