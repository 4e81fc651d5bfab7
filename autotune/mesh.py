"""The layout of ranks that train one model: replicas, shards of each replica, and parts of layers."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.errors import InputError

MESH_FORM = (
    "dp=2,shard=4 and the like: replicas, shards of each, and with tp=2 the ranks that share each layer; their product "
    "is the number of ranks"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The layout of ranks.

    Attributes:
        dp: number of replicas, between which gradients are averaged.
        shard: number of parts into which each replica's weights, gradients and optimizer state are divided.
        tp: number of ranks that compute the same samples, each with a part of the layers (tensor parallelism).
    """

    dp: int = 1
    shard: int = 1
    tp: int = 1

    @classmethod
    def parse(cls, text: str, *, where: str = "--mesh") -> Mesh:
        """Read a mesh such as ``dp=2,shard=4``.

        Args:
            text: the dimensions; one that is missing is 1.
            where: where the text was given, for the error.

        Raises:
            InputError: if the text is not a mesh.
        """
        sizes: dict[str, int] = {}
        for part in text.split(","):
            name, _, value = (word.strip() for word in part.partition("="))
            known = name in ("dp", "shard", "tp") and name not in sizes
            if not (known and value.isascii() and value.isdigit() and int(value) >= 1):
                raise InputError(f"mesh is {text!r:.80}", where=where, allowed=MESH_FORM)
            sizes[name] = int(value)
        return cls(**sizes)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.shares * self.tp

    @property
    def shares(self) -> int:
        """Return the number of shares into which samples are divided between ranks."""
        return self.dp * self.shard

    @classmethod
    def all_of(cls, ranks: int, *, tp: bool = False) -> list[Mesh]:
        """Return every mesh of a number of ranks, from replicas alone to shards alone.

        Args:
            ranks: number of ranks.
            tp: whether some ranks may share layers, too.
        """
        parts = [one for one in range(1, ranks + 1) if ranks % one == 0]
        return [
            cls(dp=ranks // (shard * layers), shard=shard, tp=layers)
            for layers in (parts if tp else [1])
            for shard in parts
            if ranks % (shard * layers) == 0
        ]

    def __str__(self) -> str:
        """Return the mesh as :meth:`parse` reads it."""
        sizes = {"dp": self.dp, "shard": self.shard, "tp": self.tp}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "shard=1"


def is_mesh(value: object) -> bool:
    """Return whether a value is the text of a mesh."""
    try:
        return isinstance(value, str) and bool(Mesh.parse(value))
    except InputError:
        return False
