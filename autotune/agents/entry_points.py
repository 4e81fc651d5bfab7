"""Registries of named entries that other packages can extend; an entry is loaded only when it is looked up.

A package adds entries through entry points::

    [project.entry-points."autotune.searches"]
    theirs = "their_package.search:TheirSearch"

A script adds one with a decorator: ``@METHODS.register("theirs")``.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from autotune.errors import AutotuneError, InputError, one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

# Names for --method, --arms and --to; they exclude list separators, file paths and suffixes with launch options.
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]*")

SEARCH_GROUP, POLICY_GROUP, RULE_GROUP = "autotune.searches", "autotune.policies", "autotune.rules"
EXPORT_GROUP = "autotune.exports"

Entry = TypeVar("Entry")
Given = TypeVar("Given")


class Registry(Generic[Entry]):
    """Named entries of one kind, registered in this process or by installed packages.

    Args:
        kind: name of an entry in error messages, such as ``rule``.
        group: the entry-point group for other packages.
        convert: converts a registered object to an entry; raises ``TypeError`` if it cannot.
    """

    def __init__(self, kind: str, group: str, convert: Callable[[Any], Entry]) -> None:
        self._kind = kind
        self._group = group
        self._convert = convert
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Given], Given]:
        """Return a decorator that registers an entry.

        Args:
            name: name of the entry, made of letters, digits, ``-`` and ``_``.

        Raises:
            InputError: if the name is invalid or already registered.
        """
        if not _NAME.fullmatch(name) or name in self._entries:
            raise InputError(f"{self._kind} {name!r} cannot be registered", allowed="a new name like my-name_2")

        def add(given: Given) -> Given:
            self._entries[name] = self._convert(given)
            return given

        return add

    @property
    def registered(self) -> Mapping[str, Entry]:
        """Return the entries registered in this process, by name, without loading other packages."""
        return MappingProxyType(self._entries)

    @property
    def names(self) -> tuple[str, ...]:
        """Return all names, those of installed packages last."""
        return tuple(dict.fromkeys((*self._entries, *installed_names(self._group))))

    def __contains__(self, name: str) -> bool:
        if name in self._entries:
            return True
        # Reading the installed entry points is slow, so it is skipped for file paths, which are not valid names.
        return _NAME.fullmatch(name) is not None and name in installed_names(self._group)

    def __getitem__(self, name: str) -> Entry:
        """Return the entry with a name, after loading it if it belongs to another package.

        Raises:
            InputError: if the name is unknown, two packages use it, or its package cannot be loaded.
        """
        if name in self._entries:
            return self._entries[name]
        found = [point for point in _installed(self._group) if point.name == name]
        if not found:
            raise InputError(f"{self._kind} is {name!r}", allowed=self.names, given=name)
        if len(found) > 1:
            packages = " and ".join(sorted(map(_package, found)))
            raise InputError(f"{packages} both register a {self._kind} {name!r}", allowed="one")
        with self.errors_named(name):
            return self._convert(found[0].load())

    @contextlib.contextmanager
    def errors_named(self, name: str) -> Iterator[None]:
        """Replace an exception from another package's entry with an ``InputError`` that names the package.

        Args:
            name: the entry's name. ``AutotuneError`` and errors of entries registered in this process pass unchanged.

        Raises:
            InputError: instead of the exception.
        """
        try:
            yield
        except AutotuneError:
            raise
        except Exception as error:
            found = [] if name in self._entries else [point for point in _installed(self._group) if point.name == name]
            if not found:
                raise
            raise InputError(
                f"{self._kind} {name!r} of package {_package(found[0])} failed ({one_line(error)})",
                allowed="a version of that package that works, or another name",
            ) from error


def installed_names(group: str) -> list[str]:
    """Return the names of installed entry points in a group, without loading them."""
    return [point.name for point in _installed(group)]


def _installed(group: str) -> list[EntryPoint]:
    from importlib.metadata import entry_points  # takes as long to import as the rest of the command line

    return [point for point in entry_points(group=group) if _NAME.fullmatch(point.name)]


def _package(point: EntryPoint) -> str:
    return "unknown" if point.dist is None else f"{point.dist.name} {point.dist.version}"
