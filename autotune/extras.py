"""Optional libraries: which are installed, and the command that installs each."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping

from autotune.errors import InputError

_DISTRIBUTION = "autotune-rl"
# The extra of each optional library, by the name of its module.
EXTRAS: Mapping[str, str] = {
    "deepspeed": "deepspeed",
    "transformers": "transformers",
    "lightning": "lightning",
    "accelerate": "accelerate",
    "ray": "ray",
    "zeus": "energy",
    "psycopg": "postgres",
    "pytorch_optimizer": "optimizers",
    "bitsandbytes": "optimizers",
    "tensorboard": "tensorboard",
    "wandb": "wandb",
}


def is_installed(module: str) -> bool:
    """Return whether a library is installed, without importing it."""
    return importlib.util.find_spec(module) is not None


def install_command(module: str) -> str:
    """Return the command that installs a library, with the other libraries of its extra."""
    if module == "deepspeed":
        # Its build asks for torch, which a build of its own does not see.
        return "pip install 'torch>=2.11,<2.14' wheel ninja && pip install --no-build-isolation 'deepspeed>=0.19'"
    # A library that every installation has can be missing where only some were copied.
    found = _requirements(EXTRAS[module]) if module in EXTRAS else [module]
    return f"pip install {' '.join(found)}"


def require(module: str, *, where: str) -> None:
    """Refuse to go on without a library.

    Raises:
        InputError: naming the command that installs it.
    """
    if not is_installed(module):
        raise missing(module, where=where)


def missing(module: str, *, where: str) -> InputError:
    """Return the error of a library that is missing or cannot be imported."""
    return InputError(f"{module} is not installed", where=where, allowed=install_command(module))


def _requirements(extra: str) -> list[str]:
    """Return the quoted requirements of an extra, as the installed package declares them."""
    from importlib.metadata import PackageNotFoundError, requires

    try:
        declared = [text.partition(";") for text in requires(_DISTRIBUTION) or ()]
    except PackageNotFoundError:
        declared = []
    # The marker of an extra reads: extra == "ray".
    found = [f"'{name.strip()}'" for name, _, marker in declared if marker.replace("'", '"').endswith(f'"{extra}"')]
    return found or [f"'{_DISTRIBUTION}[{extra}]'"]
