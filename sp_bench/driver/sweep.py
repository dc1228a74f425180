"""From checked overrides to the points of a sweep: merged with the blocks of conf/sweep, counted, then expanded.

Hydra's sweeps are products; a campaign is a union of them, so a sweep file is a list of blocks, each a product.
"""

import itertools
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from functools import cache
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString

from sp_bench.config.parsing import ConfigError, shown
from sp_bench.config.trial import TrialConfig
from sp_bench.driver.conf_files import GROUPS, conf_file, conf_path
from sp_bench.driver.overrides import CAMPAIGN_KEYS, CELL_KEYS, count_values, nearest, parse_overrides, values
from sp_bench.driver.settings import CampaignConfig

ABSURD = 10**30  # points of a sweep that are not counted to the last one
FILE_KEYS = ("sweep", *(field.name for field in fields(CampaignConfig)))
HEADER = "# @package _global_"  # without it, Hydra puts all that the file says where nothing reads it


def check_file(name: str) -> None:
    """A file of conf/sweep says what it sweeps over, in the place where it is read.

    Raises:
        ConfigError: it does not begin with the header, has no blocks, or has a key that nothing reads.
    """
    file = f"conf/sweep/{name}.yaml"
    shape = f"begin it with the line '{HEADER}', and list what it sweeps over below 'sweep: blocks:'"
    content = conf_file(f"sweep/{name}")
    lines = filter(None, map(str.split, conf_path(f"sweep/{name}").read_text(encoding="utf-8").splitlines()))
    if next(lines, None) != HEADER.split():
        raise ConfigError(f"{file} is not a sweep: {shape}")
    for key in content:
        if key in CELL_KEYS:
            raise ConfigError(f"{file}: {key} is a field of a trial; it goes into the blocks below 'sweep: blocks:'")
        if key not in FILE_KEYS:
            raise ConfigError(
                f"{file}: {shown(key)} is not a key of a sweep; {nearest(key, FILE_KEYS)}keys: {', '.join(FILE_KEYS)}"
            )
    sweep = content.get("sweep")
    if not isinstance(sweep, Mapping) or not sweep.get("blocks"):
        raise ConfigError(f"{file} has no blocks: {shape}")
    if not isinstance(sweep["blocks"], list):
        raise ConfigError(f"{file}: blocks must be a list, each block after a dash")
    if others := [str(key) for key in sweep if key != "blocks"]:
        raise ConfigError(f"{file}: sweep.{shown(others[0])} is not a key; sweep has blocks only")


def override_line(key: str, value: Any) -> str:
    """One entry of a sweep block as an override: a list is a choice of its items, text is Hydra's grammar."""
    if value == []:
        raise ConfigError(f"{shown(key)}: an empty list sweeps nothing; give values, or leave {shown(key)} out")
    if isinstance(value, list):
        return f"{key}={','.join(_literal(item) for item in value)}"
    return f"{key}={value if isinstance(value, str) else _literal(value)}"


def _literal(value: Any) -> str:
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w.-]*", value):
        return QuotedString(value, Quote.single).with_quotes()
    return str(value)


def merge_blocks(blocks: Sequence[Mapping[str, Any]], cells: Sequence[str]) -> list[list[Override]]:
    """The overrides of each block of a sweep file under those of the command line.

    A key of the command line replaces that key in every block, and a group (method=ring) also the block's options of
    that group (method.layout). No blocks: the command line alone.
    """
    above = {override.key_or_group: override for override in parse_overrides(cells)}
    merged = []
    for index, block in enumerate(blocks or [{}]):
        if not isinstance(block, Mapping):
            raise ConfigError(f"sweep.blocks[{index}] must map keys to values, not {shown(repr(block))}")
        kept = {key: value for key, value in block.items() if key not in above and str(key).split(".")[0] not in above}
        try:
            below = parse_overrides([override_line(str(key), value) for key, value in kept.items()])
        except ConfigError as error:
            raise ConfigError(f"sweep.blocks[{index}]: {error}") from error
        if campaign := [o.key_or_group for o in below if o.key_or_group in CAMPAIGN_KEYS]:
            raise ConfigError(f"sweep.blocks[{index}]: {', '.join(campaign)} holds for the whole sweep; set it outside")
        merged.append([*below, *above.values()])
    return merged


def expand(blocks: Sequence[Sequence[Override]], max_points: int) -> list[list[str]]:
    """The union of the blocks' products, each point as override lines.

    Raises:
        ConfigError: more than `max_points` points (nothing has been expanded then), or none.
    """
    count = sum(math.prod(map(count_values, block)) for block in blocks)
    if count > max_points:
        told = f"{count:,}" if count < ABSURD else f"over {ABSURD:,}"
        insist = f"; insist with max_points={count}" if count < ABSURD else ""
        raise ConfigError(f"the sweep has {told} points, more than max_points={max_points}{insist}")
    for override in itertools.chain.from_iterable(blocks):
        if not count_values(override):
            raise ConfigError(f"{shown(override.input_line)}: no value to sweep over")
    points = []
    for block in blocks:
        axes = [[f"{override.key_or_group}={value}" for value in values(override)] for override in block]
        points += [list(point) for point in itertools.product(*axes)]
    return points


def split_point(point: Iterable[str]) -> tuple[dict[str, str], list[str]]:
    """(the line that chooses a file for a group of the trial, by group; the lines that set an option of the trial)."""
    by_key = {line.partition("=")[0]: line for line in point}
    cell = {key: line for key, line in by_key.items() if key in CELL_KEYS}
    files = {key: line for key, line in cell.items() if key in GROUPS}
    return files, [line for key, line in cell.items() if key not in files]


_parser = cache(OverridesParser.create)


@cache
def _option(line: str) -> tuple[list[str], Any]:
    """(path of the key, value). Most are whole numbers, which need none of the milliseconds of Hydra's grammar."""
    key, _, value = line.partition("=")
    if re.fullmatch(r"-?(0|[1-9][0-9]{0,17})", value):
        return key.split("."), int(value)
    override = _parser().parse_override(line)
    return override.key_or_group.split("."), override.value()


def with_options(composed: Mapping[str, Any], options: Iterable[str]) -> dict[str, Any]:
    """A composed config with options set, as Hydra would set them: none is added that its file does not have.

    Hydra composes each combination of files once; a point differs from its neighbour by options only.

    Raises:
        ConfigError: the chosen file has no such option.
    """
    changed = {key: dict(value) if isinstance(value, Mapping) else value for key, value in composed.items()}
    for line in options:
        (*parents, name), value = _option(line)
        node = changed
        for parent in parents:
            node = node[parent]
        if name not in node:
            group = ".".join(parents)
            known = ", ".join(f"{group}.{key}" for key in node if key != "name")
            raise ConfigError(f"{group}.{name}: {group}={node['name']} has no such option; it has {known or 'none'}")
        node[name] = value
    return changed


def trial_mapping(composed: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a trial in a composed config."""
    return {field.name: composed[field.name] for field in fields(TrialConfig)}


def campaign_mapping(composed: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a campaign in a composed config."""
    return {field.name: composed[field.name] for field in fields(CampaignConfig)}
