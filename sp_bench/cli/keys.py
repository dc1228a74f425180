"""Lists the keys of a sweep at the end of the help of its verbs."""

from collections.abc import Iterator
from typing import Any

from typer.core import TyperCommand


class WithKeys(TyperCommand):
    """A command whose help ends with its keys, from their declarations."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        super().format_help(ctx, formatter)
        print("\n".join(_keys()))


def _keys() -> Iterator[str]:
    from dataclasses import fields

    from sp_bench.config.options import OPTIONS
    from sp_bench.config.parsing import SCALARS
    from sp_bench.planning.settings import CampaignConfig, DeadlinesConfig

    settings = [
        field.name for field in fields(CampaignConfig) if field.name not in ("deadlines", "plan_only", "resume")
    ]
    groups = dict.fromkeys(option.group for option in OPTIONS if option.group)
    yield "Groups, each a folder of conf; a name that is not there is answered with all that are:"
    yield f"  {', '.join(groups)}; and sweep, for a file with a whole sweep"
    yield "What is measured; values with commas are swept:"
    for option in OPTIONS:
        if option.name != "name" and option.type in SCALARS:
            yield f"  {option.path:34} {option.doc}{f' ({option.unit})' if option.unit else ''}"
    yield "A part of the trials: only.FIELD=VALUES keeps those that have one of the values, such as only.sp_size=2,4"
    yield "How the campaign runs, one value each (conf/config.yaml says what they mean):"
    yield f"  {', '.join([*settings, *(f'deadlines.{field.name}' for field in fields(DeadlinesConfig))])}"
