"""The layout of ranks that train one model: replicas, and shards of each replica."""

from __future__ import annotations

from dataclasses import dataclass

from autotune.errors import InputError

MESH_FORM = "dp=2,shard=4 and the like: replicas, and shards of each; their product is the number of ranks"


@dataclass(frozen=True, slots=True, kw_only=True)
class Mesh:
    """The layout of ranks.

    Attributes:
        dp: number of replicas, between which gradients are averaged.
        shard: number of ranks between which each replica's weights, gradients and optimizer state are divided.
    """

    dp: int = 1
    shard: int = 1

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
            known = name in ("dp", "shard") and name not in sizes
            if not (known and value.isascii() and value.isdigit() and int(value) >= 1):
                raise InputError(f"mesh is {text!r:.80}", where=where, allowed=MESH_FORM)
            sizes[name] = int(value)
        return cls(**sizes)

    @property
    def ranks(self) -> int:
        """Return the number of ranks."""
        return self.dp * self.shard

    @classmethod
    def all_of(cls, ranks: int) -> list[Mesh]:
        """Return every mesh of a number of ranks, from replicas alone to shards alone."""
        return [cls(dp=ranks // shard, shard=shard) for shard in range(1, ranks + 1) if ranks % shard == 0]

    def __str__(self) -> str:
        """Return the mesh as :meth:`parse` reads it."""
        sizes = {"dp": self.dp, "shard": self.shard}
        return ",".join(f"{name}={size}" for name, size in sizes.items() if size > 1) or "shard=1"


def is_mesh(value: object) -> bool:
    """Return whether a value is the text of a mesh."""
    try:
        return isinstance(value, str) and bool(Mesh.parse(value))
    except InputError:
        return False
