"""The look of reports: colours for light and dark, the page, and what is drawn in it."""

from __future__ import annotations

import re

PAGE = """
:root { color-scheme: light dark; --page: #ffffff; --card: #f6f8fa; --ink: #1f2328; --faint: #57606a; --rule: #d0d7de;
  --one: #0072b2; --two: #b84a00; --warn: #b35900; --bad: #cf222e; --good: #116329; --kept: #0072b2; --again: #e8a33d;
  --fixed: #c4cad1; --grid: #e4e8ec;
  --a0: #57606a; --a1: #b84a00; --a2: #0072b2; --a3: #00795a; --a4: #a0337a; --a5: #8a6d00; --a6: #5b3fa0;
  --a7: #c2184b; }
@media (prefers-color-scheme: dark) { :root { --page: #0d1117; --card: #161b22; --ink: #e6edf3; --faint: #9ea7b3;
  --rule: #30363d; --one: #58b4ee; --two: #ff9b57; --warn: #e3b341; --bad: #ff7b72; --good: #56d364; --kept: #388bd6;
  --again: #d9932f; --fixed: #484f58; --grid: #21262d;
  --a0: #9ea7b3; --a1: #ff9b57; --a2: #58b4ee; --a3: #3fc79a; --a4: #e48cc6; --a5: #e3c341; --a6: #b39cf5;
  --a7: #ff7b93; } }
* { box-sizing: border-box; }
body { margin: 0; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; }
main { max-width: 1480px; margin: 0 auto; padding: 1.5rem 1rem 4rem; }
h1 { font-size: 1.6rem; line-height: 1.2; margin: 0 0 .3rem; overflow-wrap: anywhere; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
p, li { max-width: 75ch; }
.meta, figcaption, .note { color: var(--faint); font-size: .9rem; }
.meta, .note { overflow-wrap: anywhere; }
.verdict { font-size: 1.1rem; border-left: .3rem solid var(--good); padding: .3rem 0 .3rem .9rem; margin: 1.2rem 0; }
.verdict.warn { border-color: var(--warn); }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: .6rem; margin: 1rem 0;
  padding: 0; }
.cards div { background: var(--card); border: 1px solid var(--rule); border-radius: .4rem; padding: .5rem .7rem; }
.cards dt { color: var(--faint); font-size: .85rem; }
.cards dd { margin: 0; font-size: 1.15rem; font-weight: 600; font-variant-numeric: tabular-nums; }
.figures { display: grid; gap: 1.2rem; }
@media (min-width: 1080px) { .figures { grid-template-columns: 1fr 1fr; } }
figure { margin: 0; min-width: 0; max-width: 52rem; }
h3 { font-size: 1rem; margin: 0 0 .3rem; } .scroll + h3 { margin-top: 1.2rem; }
figcaption { margin-top: .3rem; max-width: 75ch; }
svg { display: block; width: 100%; height: auto; }
svg.wide { display: none; }
@media (min-width: 640px) { svg.wide { display: block; } svg.narrow { display: none; } }
.key { display: flex; flex-wrap: wrap; gap: .2rem 1.1rem; list-style: none; margin: 0 0 .4rem; padding: 0;
  font-size: .9rem; }
.key li { display: flex; align-items: center; gap: .4rem; }
.key svg { width: 26px; height: 12px; flex: none; }
.scroll { overflow-x: auto; border: 1px solid var(--rule); border-radius: .4rem; }
.scroll:focus-visible, summary:focus-visible { outline: 3px solid var(--one); outline-offset: 2px; }
table { border-collapse: collapse; width: 100%; font-size: .92rem; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: .35rem .6rem; border-bottom: 1px solid var(--rule); vertical-align: top; }
thead th { background: var(--card); white-space: nowrap; }
tbody tr:last-child > * { border-bottom: 0; }
tbody th { font-weight: 600; white-space: nowrap; position: sticky; left: 0; background: var(--page); }
td.number, th.number { text-align: right; white-space: nowrap; }
tbody td { white-space: nowrap; }
tbody td.text { min-width: 16rem; white-space: normal; overflow-wrap: anywhere; }
.scroll.tall { max-height: 24rem; overflow-y: auto; margin-top: .8rem; }
.units { list-style: none; margin: 0; padding: 0; }
.units li { max-width: none; display: grid; gap: .1rem .8rem; padding: .4rem .7rem;
  border-left: .35rem solid var(--rule); border-bottom: 1px solid var(--rule);
  grid-template-columns: 1fr auto;
  align-items: baseline; }
.units li:last-child { border-bottom: 0; }
.units .kept { border-left-color: var(--kept); } .units .again { border-left-color: var(--again); }
.units .fixed { border-left-color: var(--fixed); } .units .unit { font-weight: 600; overflow-wrap: anywhere; }
.units .why, .units .other { grid-column: 1 / -1; font-size: .9rem; } .units .other { color: var(--faint); }
.chips { display: flex; gap: .3rem; flex-wrap: wrap; justify-content: end; }
.chip { border: 1px solid var(--rule); border-radius: .8rem; padding: 0 .55rem; font-size: .85rem;
  background: var(--card); }
@media (min-width: 900px) { .units li { grid-template-columns: 13rem 11rem 1fr; } .chips { justify-content: start; }
  .units .why, .units .other { grid-column: 3; } }
summary { cursor: pointer; padding: .3rem 0; }
code, pre { font: .9rem/1.5 ui-monospace, SFMono-Regular, Menlo, Consolas, monospace; }
pre { background: var(--card); border: 1px solid var(--rule); border-radius: .4rem; padding: .6rem .8rem;
  white-space: pre-wrap; overflow-wrap: anywhere; }
@media print { .scroll { overflow: visible; } }
"""
# Rules of what is drawn; the same in a file of its own.
FIGURES = """
svg text { font: 12px system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; fill: var(--faint); }
svg .name { fill: var(--ink); }
svg .grid { stroke: var(--grid); } svg .axis { stroke: var(--rule); }
svg .line { fill: none; stroke-width: 2; }
svg .line.one { stroke: var(--one); } svg .line.two { stroke: var(--two); stroke-dasharray: 2 2; }
svg .line.limit { stroke: var(--ink); stroke-width: 1.5; stroke-dasharray: 7 4; }
svg .dot.one { fill: var(--one); } svg .dot.two { fill: var(--two); } svg .dot.limit { fill: var(--ink); }
svg .switch { fill: var(--good); } svg .refused { stroke: var(--warn); stroke-width: 1.6; fill: none; }
svg .trip { stroke: var(--bad); stroke-width: 2; }
svg .line.front { stroke: var(--ink); stroke-width: 1.5; }
svg .trial { fill: var(--faint); fill-opacity: .45; } svg .star { fill: var(--again); stroke: var(--ink); }
svg .spread { stroke: var(--faint); stroke-width: 2; } svg .arm { stroke: var(--page); stroke-width: 1; }
svg .course { fill: none; stroke-width: 2; stroke-linejoin: round; }
svg .arm.a0 { fill: var(--a0); } svg .course.a0 { stroke: var(--a0); }
svg .arm.a1 { fill: var(--a1); } svg .course.a1 { stroke: var(--a1); }
svg .arm.a2 { fill: var(--a2); } svg .course.a2 { stroke: var(--a2); }
svg .arm.a3 { fill: var(--a3); } svg .course.a3 { stroke: var(--a3); }
svg .arm.a4 { fill: var(--a4); } svg .course.a4 { stroke: var(--a4); }
svg .arm.a5 { fill: var(--a5); } svg .course.a5 { stroke: var(--a5); }
svg .arm.a6 { fill: var(--a6); } svg .course.a6 { stroke: var(--a6); }
svg .arm.a7 { fill: var(--a7); } svg .course.a7 { stroke: var(--a7); }
svg .of-fp32 { fill: var(--a0); } svg .of-bf16 { fill: var(--a3); } svg .of-fp16 { fill: var(--a4); }
svg .of-inherit { fill: var(--fixed); }
svg .kept { fill: var(--kept); } svg .again { fill: var(--again); } svg .fixed { fill: var(--fixed); }
"""


def _in_light(rules: str) -> str:
    """Return rules with the light colours in place of their names, which few other programs than browsers know."""
    light = dict(re.findall(r"--([a-z0-9]+): (#[0-9a-f]{6})", PAGE[: PAGE.index("@media")]))
    return re.sub(r"var\(--([a-z0-9]+)\)", lambda name: light[name[1]], rules)


FIGURE_STYLE = _in_light(FIGURES)
