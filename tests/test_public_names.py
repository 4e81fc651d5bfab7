"""Tests of the list of public names."""

import pkgutil

import pytest

import autotune


def test_every_public_name_exists_and_the_list_is_sorted() -> None:
    assert sorted(autotune.__all__) == autotune.__all__
    for name in autotune.__all__:
        assert getattr(autotune, name) is not None


def test_public_list_is_complete() -> None:
    modules = {module.name for module in pkgutil.iter_modules(autotune.__path__)}
    helpers = {"annotations", "Any", "TYPE_CHECKING", "importlib", "register_with_gymnasium"}
    public = {name for name in vars(autotune) if not name.startswith("_")}
    assert public - modules - helpers <= set(autotune.__all__)


def test_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        autotune.nothing_of_that_name  # noqa: B018
