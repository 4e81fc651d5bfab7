"""The colours of all pages and pictures by role, in light and dark mode, and the looks that use them."""

from __future__ import annotations

from autotune.choices import REDUCED_PRECISIONS

# Role, colour in light mode, colour in dark mode. Roles a0 to a7 are for the arms of a comparison.
_COLOURS = (
    ("page", "#ffffff", "#0d1117"),
    ("card", "#f6f8fa", "#161b22"),
    ("ink", "#1f2328", "#e6edf3"),
    ("faint", "#57606a", "#9ea7b3"),
    ("rule", "#d0d7de", "#30363d"),
    ("grid", "#e4e8ec", "#21262d"),
    ("one", "#0072b2", "#58b4ee"),
    ("two", "#b84a00", "#ff9b57"),
    ("warn", "#b35900", "#e3b341"),
    ("bad", "#cf222e", "#ff7b72"),
    ("good", "#116329", "#56d364"),
    ("kept", "#0072b2", "#388bd6"),
    ("again", "#e8a33d", "#d9932f"),
    ("fixed", "#c4cad1", "#484f58"),
    ("a0", "#57606a", "#9ea7b3"),
    ("a1", "#b84a00", "#ff9b57"),
    ("a2", "#0072b2", "#58b4ee"),
    ("a3", "#00795a", "#3fc79a"),
    ("a4", "#a0337a", "#e48cc6"),
    ("a5", "#8a6d00", "#e3c341"),
    ("a6", "#5b3fa0", "#b39cf5"),
    ("a7", "#c2184b", "#ff7b93"),
)
LIGHT = {role: light for role, light, _ in _COLOURS}
DARK = {role: dark for role, _, dark in _COLOURS}
_ARMS = [f"a{number}" for number in range(8)]
# The colour role of each look of a layer; the looks of arms are named like their roles.
LOOKS = {"one": "one", "two": "two", "limit": "ink", "front": "ink", "trial": "faint", "spread": "faint"}
LOOKS |= {"star": "again"} | dict(zip(_ARMS, _ARMS, strict=True))
# Lengths of dashes and gaps in pixels, by look.
DASHES = {"two": (2, 2), "limit": (7, 4)}
# The colour role of each kind of cell in a strip.
CELLS = {"kept": "kept", "again": "again", "other": "a6", "fixed": "fixed"}
CELLS |= {"of-fp32": "a0", "of-inherit": "fixed"}
CELLS |= {f"of-{precision}": f"a{3 + number % 5}" for number, precision in enumerate(REDUCED_PRECISIONS)}


def arm_look(number: int) -> str:
    """Return the look of an arm.

    Args:
        number: number of the arm, from 0 for the baseline.
    """
    return _ARMS[number % len(_ARMS)]
