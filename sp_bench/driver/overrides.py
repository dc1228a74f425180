"""The command line of a run, every name in it checked before Hydra sees it.

So a misspelt name gets a clear line and the nearest one, and no override reaches Hydra that could read other files or
the environment, add keys, or create folders.
"""

import math
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, is_dataclass
from decimal import Decimal
from typing import Any, get_type_hints

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import (
    ChoiceSweep,
    Glob,
    IntervalSweep,
    Override,
    Quote,
    QuotedString,
    RangeSweep,
)
from hydra.errors import HydraException

from sp_bench.config.parsing import ConfigError, nearest, shown
from sp_bench.config.trial import TrialConfig
from sp_bench.driver.conf_files import GROUPS, check_file, choices
from sp_bench.driver.settings import CampaignConfig

MAX_LINE = 20_000  # characters of one override: 2,000 values of a sweep fit, and Hydra reads them in seconds
MAX_BRACKETS = 20  # sort(shuffle(range(...))) has three; Hydra's grammar takes seconds for thousands
_KEY_VALUE = re.compile(r"(?P<key>[A-Za-z_][\w.]*)=(?P<value>.*)", re.DOTALL)


@dataclass(frozen=True)
class Request:
    """The command line of `run` or `plan`, every name in it checked."""

    campaign: list[str]  # overrides that hold for the whole campaign, and the sweep's name
    cells: list[str]  # overrides of the cells, sweeps unexpanded
    show_config: bool

    @property
    def sweep(self) -> str | None:
        """The file of conf/sweep that was asked for."""
        return next((line.partition("=")[2] for line in self.campaign if line.startswith("sweep=")), None)


def _leaves(schema: type, prefix: str = "") -> list[str]:
    """Dotted names of the fields that an override may set; a group's `name` is chosen by the group itself."""
    names = []
    for name, kind in get_type_hints(schema).items():
        if is_dataclass(kind) and isinstance(kind, type):
            names += [leaf for leaf in _leaves(kind, f"{prefix}{name}.") if leaf != f"{prefix}{name}.name"]
        else:
            names.append(prefix + name)
    return names


CAMPAIGN_KEYS = (*_leaves(CampaignConfig), "sweep")
CELL_KEYS = (*GROUPS[:-1], *_leaves(TrialConfig))


def read_arguments(arguments: Sequence[str]) -> Request:
    """Check what follows `sp-bench run`.

    Raises:
        ConfigError: a flag, key, group choice or value that is not ours to take.
    """
    overrides, show_config = [], False
    remaining = iter(arguments)
    for argument in remaining:
        if argument in ("-m", "--multirun"):
            continue  # every run is a sweep, of one point if need be
        if argument in ("-c", "--cfg"):
            if next(remaining, None) != "job":
                raise ConfigError(f"{argument} shows the composed config; use {argument} job")
            show_config = True
        elif argument.startswith("-"):
            raise ConfigError(
                f"{shown(argument)} is not a flag of run and plan; flags: -m, --multirun, --cfg job, --help"
            )
        else:
            overrides.append(argument)
    parsed = parse_overrides(overrides)
    _refuse_repeated(parsed)
    campaign = [override for override in parsed if override.key_or_group in CAMPAIGN_KEYS]
    for override in campaign:
        if override.is_sweep_override():
            raise ConfigError(f"{_line(override)}: one {override.key_or_group} a run; sweep over fields of a trial")
    for override in parsed if show_config else ():
        if override.key_or_group == "sweep" or override.is_sweep_override():
            raise ConfigError(f"{_line(override)}: --cfg job shows one configuration and takes no sweeps")
    cells = [override for override in parsed if override.key_or_group in CELL_KEYS]
    return Request(_lines(campaign), _lines(cells), show_config)


def _refuse_repeated(overrides: Sequence[Override]) -> None:
    lines: dict[str, list[str]] = {}
    for override in overrides:
        lines.setdefault(override.key_or_group, []).append(str(override.input_line))
    for key, given in lines.items():
        if len(given) == 1:
            continue
        together = ",".join(line.partition("=")[2] for line in given)
        items = dict.fromkeys(together.split(","))
        plain = not set("([{'\"") & set(together)  # no list holds range(...)
        can_sweep = key in CELL_KEYS and len(items) > 1 and plain
        use = f"use {key}={','.join(items)}" if can_sweep else "give it once"
        raise ConfigError(f"{shown(' '.join(given))}: {key} is given {len(given)} times; {shown(use)}")


def replaced(lines: Iterable[str], above: Sequence[str]) -> list[str]:
    """`above`, and before it those of `lines` whose key it does not set."""
    keys = {line.partition("=")[0] for line in above}
    return [*(line for line in lines if line.partition("=")[0] not in keys), *above]


def _line(override: Override) -> str:
    return shown(override.input_line)


def _lines(overrides: Iterable[Override]) -> list[str]:
    return [str(override.input_line) for override in overrides]


def parse_overrides(lines: Iterable[str]) -> list[Override]:
    """Hydra's own reading of `key=value` lines whose names have been checked.

    Raises:
        ConfigError: not key=value, an unknown key or group choice, or a value that Hydra's grammar refuses.
    """
    parser = OverridesParser.create()
    parsed = []
    for line in lines:
        _check_line(line)
        try:
            override = parser.parse_override(line)
        except (HydraException, ValueError, RecursionError) as error:  # of a number, or brackets, without end
            raise ConfigError(f"{shown(line)}: {shown(_unreadable(line, error))}") from error
        if isinstance(override.value(), list):
            items = line.partition("=")[2].strip("[] ").replace(" ", "")
            use = f"{override.key_or_group}={items}"
            raise ConfigError(f"{shown(line)}: values to sweep over have no brackets here; use {shown(use)}")
        if override.key_or_group in GROUPS:
            _check_choice(override)
        parsed.append(override)
    return parsed


def _unreadable(line: str, error: Exception) -> str:
    """Why Hydra's grammar takes no such value; its own words are those of a parser."""
    value = line.partition("=")[2]
    if re.search(r"^\s*,|,\s*,|,\s*$", value):
        return "a value is missing beside a comma; there are no spaces around commas, as in sp_size=2,4"
    if "=" in value:
        return "a value with = in it needs quotes; is this two words, each key=value?"
    _, of_a_function, reason = str(error).partition(" while evaluating ")
    if of_a_function:
        return reason.splitlines()[0]
    return "no such value; use a number, plain text, text in quotes, a list such as 2,4, or range(start,stop,step)"


def _check_line(line: str) -> None:
    text = shown(line)
    if len(line) > MAX_LINE:
        raise ConfigError(f"{text}: an override has at most {MAX_LINE:,}; use range(start,stop,step), or several runs")
    if line.startswith(("+", "~")):
        raise ConfigError(f"{text}: keys cannot be added or deleted; set one with key=value")
    if line.startswith("hydra/"):
        raise ConfigError(f"{text}: Hydra's own groups are fixed; trials run on this machine only, one after another")
    if line.startswith("hydra"):
        raise ConfigError(
            f"{text}: Hydra's own settings are fixed; results_root=... and campaign=... say where rows go"
        )
    match = _KEY_VALUE.fullmatch(line)
    if not match:
        raise ConfigError(f"{text}: expected key=value without spaces, such as method=ring or seq_len=2048,4096")
    if sum(map(match["value"].count, "([{")) > MAX_BRACKETS:
        raise ConfigError(f"{text}: more than {MAX_BRACKETS} brackets; no override needs so many")
    if "$" in match["value"] or "_target_" in line:
        raise ConfigError(f"{text}: values are plain; no interpolation ($) and no _target_")
    key, known = match["key"], (*CELL_KEYS, *CAMPAIGN_KEYS)
    if key.startswith("fabric.env"):
        raise ConfigError(f"{text}: a fabric is known by its name; give these variables a file in conf/fabric")
    if key in known:
        return
    if key.endswith(".name") and key.removesuffix(".name") in GROUPS:
        raise ConfigError(f"{text}: choose it with {key.removesuffix('.name')}={shown(match['value'])}")
    raise ConfigError(
        f"{shown(key)} is not a field; {nearest(key, known)}"
        "sp-bench run --cfg job shows the fields of a run, and with method=NAME the options of that method"
    )


def _check_choice(override: Override) -> None:
    group = override.key_or_group
    if isinstance(override.value(), RangeSweep | IntervalSweep):
        raise ConfigError(f"{_line(override)}: give names; {group} is one of {', '.join(choices(group))}")
    for choice in values(override):
        if choice not in choices(group):
            hint = nearest(choice, choices(group))
            raise ConfigError(f"{group}={shown(choice)}: {hint}{group} is one of {', '.join(choices(group))}")
        check_file(group, choice)


def count_values(override: Override) -> int:
    """How many values the override sweeps over, without expanding them."""
    value = override.value()
    if isinstance(value, IntervalSweep):
        raise ConfigError(f"{_line(override)}: an interval has no points; list values or use range(start,stop)")
    if isinstance(value, RangeSweep):
        return _range_length(value, _line(override))
    return len(value.list) if isinstance(value, ChoiceSweep) else len(list(values(override)))


def values(override: Override) -> Iterator[str]:
    """Each value of the override, as text of Hydra's grammar."""
    value: Any = override.value()
    if isinstance(value, Glob):
        return iter(value.filter(choices(override.key_or_group)))
    if override.is_sweep_override():
        return override.sweep_string_iterator()
    return iter([override.get_value_element_as_str()])


def _range_length(sweep: RangeSweep, line: str) -> int:
    start, stop, step = (Decimal(str(value)) for value in (sweep.start, sweep.stop, sweep.step))
    if not all(value.is_finite() for value in (start, stop, step)) or step == 0:
        raise ConfigError(f"{line}: a range has finite ends and a step other than 0")
    return max(0, math.ceil((stop - start) / step))


def quoted_list(lines: Iterable[str]) -> str:
    """Lines as one list literal of Hydra's grammar."""
    return f"[{','.join(QuotedString(line, Quote.single).with_quotes() for line in lines)}]"
