"""Tests of the figures of benchmarks."""

import json
from pathlib import Path

from autotune.report.png_figures import _median_course, draw_search

ROOT = Path(__file__).parent.parent


def test_median_of_repetitions_begins_where_each_has_a_plan_that_was_measured_again() -> None:
    courses = [[(2, 0.5), (8, 0.1)], [(4, 0.3), (6, 0.2)], [(3, None), (5, 0.4)]]
    assert _median_course(courses) == [(5, 0.4), (6, 0.4), (8, 0.2), (8, 0.2)]
    assert _median_course([[(1, None)]]) == []


def test_recorded_search_is_drawn(tmp_path: Path) -> None:
    document = json.loads((ROOT / "runs" / "benchmarks" / "amd-epyc" / "search-charlm.json").read_text())
    assert draw_search(document, tmp_path / "search.png").read_bytes().startswith(b"\x89PNG")
