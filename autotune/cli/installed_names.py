"""Help texts that list the methods, rules, policies and export formats of installed packages."""

from __future__ import annotations

import typer.core

from autotune.agents.entry_points import EXPORT_GROUP, POLICY_GROUP, RULE_GROUP, SEARCH_GROUP, installed_names

_GROUPS = {
    "method": (SEARCH_GROUP, POLICY_GROUP),
    "arms": (RULE_GROUP, SEARCH_GROUP, POLICY_GROUP),
    "to": (EXPORT_GROUP,),
}


class NamingCommand(typer.core.TyperCommand):
    """A command whose help is completed only when it is shown, because finding installed packages takes time."""

    def format_help(self, ctx, formatter) -> None:  # type: ignore[no-untyped-def]  # Typer may bring its own click
        """Write the help."""
        for parameter in self.params:
            names = [name for group in _GROUPS.get(parameter.name or "", ()) for name in installed_names(group)]
            if names and isinstance(parameter, typer.core.TyperOption):
                parameter.help = f"{parameter.help} Of installed packages: {', '.join(dict.fromkeys(names))}."
        super().format_help(ctx, formatter)
