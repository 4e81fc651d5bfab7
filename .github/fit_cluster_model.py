"""autotune/cost_model/cluster/fitted.json: the cost model's constants, fitted to the published runs of the package.

python .github/fit_cluster_model.py    # write the file anew, after the model or the published runs changed
"""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autotune.bench.published_fit import fit_constants
from autotune.bench.published_rows import read_published
from autotune.cost_model.cluster.constants import meanings

FILE = Path(__file__).parent.parent / "autotune" / "cost_model" / "cluster" / "fitted.json"
_DIGITS = 5


def document() -> dict[str, Any]:
    """Return the content of the file."""
    rows = read_published().rows
    values = asdict(fit_constants(rows))
    return {
        "version": 1,
        "fitted_to": {"rows": len(rows), "sources": sorted({row.source for row in rows})},
        "constants": {name: float(f"{values[name]:.{_DIGITS}g}") for name, one in meanings().items() if one.spread},
    }


if __name__ == "__main__":
    FILE.write_text(json.dumps(document(), indent=2) + "\n")
