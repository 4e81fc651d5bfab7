"""What a digest of a job's code depends on: all settings that a step may read, and nothing that varies by process."""

import itertools
import subprocess
import sys
from pathlib import Path

import pytest

from autotune.profiling.code_digest import code_digest

HEAD = "import dataclasses, enum, functools, torch\n"
# Sources of a loss that repeats its work ``?`` times, which each finds elsewhere.
REPEATED = {
    "dictionary": 'CFG = {"n": ?}\ndef loss(x): return x * CFG["n"]',
    "list": "N = [?]\ndef loss(x): return x * N[0]",
    "object": "class C: pass\nCFG = C()\nCFG.n = ?\ndef loss(x): return x * CFG.n",
    "nested object": "class C: pass\nCFG = C()\nCFG.c = C()\nCFG.c.n = ?\ndef loss(x): return x * CFG.c.n",
    "dataclass": "@dataclasses.dataclass\nclass C:\n    n: int = 0\nCFG = C(?)\ndef loss(x): return x * CFG.n",
    "dataclass's default": "@dataclasses.dataclass\nclass C:\n    n: int = ?\nC1 = C()\ndef loss(x): return x * C1.n",
    "class attribute": "class C:\n    N = ?\n    def __call__(self, x): return x * self.N\nloss = C()",
    "attribute": "class C:\n    def __init__(self): self.n = ?\n    def __call__(self, x): return self.n\nloss = C()",
    "bound method": "class C:\n    def __init__(self): self.n = ?\n    def run(self, x): return self.n\nloss = C().run",
    "partial": "def run(x, n): return x * n\nloss = functools.partial(run, n=?)",
    "partial by place": "def run(n, x): return x * n\nloss = functools.partial(run, ?)",
    "functions in a dictionary": 'def run(x): return x * ?\nALL = {"a": run}\ndef loss(x): return ALL["a"](x)',
    "functions in a list": "def run(x): return x * ?\nALL = [run]\ndef loss(x): return ALL[0](x)",
    "functions in a tuple": "ALL = (lambda x: x * ?,)\ndef loss(x): return ALL[0](x)",
    "enumeration": "class E(enum.Enum):\n    N = ?\ndef loss(x): return x * E.N.value",
    "tensor": "N = torch.tensor(?)\ndef loss(x): return x * N",
    "default": "def loss(x, n=?): return x * n",
    "default by name": "def loss(x, *, n=?): return x * n",
    "closure": "def outer(n): return lambda x: x * n\nloss = outer(?)",
    "single dispatch": "@functools.singledispatch\ndef n(x): return 0\n@n.register\ndef _(x: int): return ?\n"
    "def loss(x): return x * n(3)",
    "cached property": "class C:\n    @functools.cached_property\n    def n(self): return ?\n"
    "    def __call__(self, x): return x * self.n\nloss = C()",
    "setter": "class C:\n    @property\n    def n(self): return self._n\n    @n.setter\n    def n(self, n): self._n = ?"
    "\n    def __call__(self, x): return x * self.n\nloss = C()",
    "cached function": "@functools.lru_cache\ndef n(): return ?\ndef loss(x): return x * n()",
}


def loss_of(source: str, folder: Path) -> object:
    """Return the loss that a file defines."""
    file = folder / "own_loss.py"
    file.write_text(HEAD + source)
    module = type(sys)("own_loss")
    module.__file__ = str(file)
    sys.modules["own_loss"] = module
    exec(compile(file.read_text(), str(file), "exec"), module.__dict__)
    return module.loss


@pytest.fixture(autouse=True)
def forgotten() -> object:
    yield
    sys.modules.pop("own_loss", None)
    sys.modules.pop("own_helpers", None)


@pytest.mark.parametrize("kind", REPEATED)
def test_a_setting_that_code_reads_is_part_of_the_digest(kind: str, tmp_path: Path) -> None:
    digests = [code_digest([loss_of(REPEATED[kind].replace("?", n), tmp_path)]) for n in ("1", "20", "1")]
    assert digests[0] != digests[1]
    assert digests[0] == digests[2]


def test_settings_and_functions_of_other_modules_are_part_of_the_digest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    attribute = "import own_helpers\ndef loss(x): return x * own_helpers.N"
    inside = "def loss(x):\n    from own_helpers import run\n    return run(x)"
    for source, helpers in itertools.product((attribute, inside), ("N = @\ndef run(x): return x * @\n",)):
        found = []
        for n in ("1", "20"):
            sys.modules.pop("own_helpers", None)
            (tmp_path / "own_helpers.py").write_text(helpers.replace("@", n * 3))
            found.append(code_digest([loss_of(source, tmp_path)]))
        assert found[0] != found[1]


def test_what_code_changes_while_it_runs_is_not(tmp_path: Path) -> None:
    for source in (
        "N = [0]\ndef loss(x):\n    N[0] += 1\n    return x",
        "SEEN = []\ndef loss(x):\n    SEEN.append(1)\n    return x",
        "class C:\n    n = 0\n    def __call__(self, x):\n        self.n += 1\n        return x\nloss = C()",
        "class C: n = 0\ndef loss(x):\n    C.n += 1\n    return x",
    ):
        loss = loss_of(source, tmp_path)
        before = code_digest([loss])
        loss(1)
        assert code_digest([loss]) == before


def test_the_digest_is_the_same_in_every_process(tmp_path: Path) -> None:
    many = "\n".join(f"def f{n}(x): return x + {n}" for n in range(6000))
    source = (
        f'{many}\nS = {{"a", "b", "c", "dd"}}\nT = ("x", frozenset({{"a", "b", "c"}}))\n'
        "O = object()\nG = torch.Generator()\n"
        f"def loss(x): return ({', '.join(f'f{n}' for n in range(6000))}, S, T, O, G, str(O))\n"
    )
    (tmp_path / "own_job.py").write_text(HEAD + source)
    script = (
        "import own_job; from autotune.profiling.code_digest import code_digest; print(code_digest([own_job.loss]))"
    )
    found = {
        subprocess.run([sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, check=True).stdout
        for _ in range(2)
    }
    assert len(found) == 1
