"""From a checked command line to the configs of its trials: Hydra composes them.

A sweep of Hydra is a product; a campaign is a union of products. So a sweep file (conf/sweep/*.yaml) is a list of
blocks, each a product. Without a sweep file, the command line is the only block.
"""

import itertools
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import hydra
from hydra.core.override_parser.types import ChoiceSweep, Override, Quote, QuotedString
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console

from sp_bench import methods
from sp_bench.config import documents
from sp_bench.config.parsing import ConfigError, dotted, parse, shown
from sp_bench.config.trial import TrialConfig
from sp_bench.planning import overrides
from sp_bench.planning.plan import cell_id
from sp_bench.planning.search import LONGEST, STARTS_FROM, Search
from sp_bench.planning.settings import CampaignConfig

LENGTH, MAX = "seq_len", "max"
Point = Mapping[str, Any]  # a key of the command line -> its value


class Sweep(NamedTuple):
    """The trials and searches of a command line, and the campaign's settings."""

    configs: list[TrialConfig]
    searches: list[Search]  # the points with seq_len=max
    settings: CampaignConfig


def read(request: overrides.Request) -> Sweep:
    """
    Raises:
        ConfigError: a field that no trial or campaign can have, an option that the chosen file lacks, a wrong block
            of a sweep file, or a sweep of more than max_points points.
    """
    _, settings, trials = _compose(request)
    listed = [_trial(trial) for trial in trials if trial[LENGTH] != MAX]
    searched = [_trial({**trial, LENGTH: _any_length(trial)}) for trial in trials if trial[LENGTH] == MAX]
    if any(config.workload.name == "collective" for config in searched):
        raise ConfigError(f"{LENGTH}={MAX}: workload=collective has no seq_len")
    if any(config.workload.packing == "file" for config in searched):
        raise ConfigError(
            f"{LENGTH}={MAX}: a list of documents fills packs of one length; use workload.packing=lognormal"
        )
    if settings.search.longest is None and any(config.hardware.device == "cpu" for config in searched):
        raise ConfigError(
            f"{LENGTH}={MAX} with hardware=cpu would end only where the host's memory does: give search.longest, such "
            "as search.longest=65536"
        )
    once = {cell_id(config): config for config in searched}  # blocks may overlap
    searches = list(map(Search, once.values()))
    for search in searches:
        if search.shortest > (longest := settings.search.longest or LONGEST):
            packed = ", or a smaller workload.document_len" if search.config.workload.packing != "none" else ""
            raise ConfigError(
                f"{LENGTH}={MAX} tries {longest:,} tokens at most, and a search of such trials {search.shortest:,} or "
                f"more; use a larger search.longest{packed}"
            )
    return Sweep(listed, searches, settings)


def configs(request: overrides.Request) -> tuple[list[TrialConfig], CampaignConfig]:
    """Like `read`, but refuses searches.

    Raises:
        ConfigError: as `read`, and for a search.
    """
    listed, searched, settings = read(request)
    if searched:
        raise ConfigError(f"{LENGTH}={MAX} is a search, which only run, resume and plan take: give a length")
    return listed, settings


def as_yaml(request: overrides.Request) -> str:
    """The one configuration of a command line without sweeps, as YAML. Raises ConfigError as `configs` does."""
    composed, _, [trial] = _compose(request)
    _trial(trial)
    return OmegaConf.to_yaml(OmegaConf.create(dict(composed) | trial))


def _compose(request: overrides.Request) -> tuple[Mapping[str, Any], CampaignConfig, list[dict[str, Any]]]:
    """(conf/config.yaml under the campaign's overrides, its settings, each point's fields of a trial).

    A file of one group holds plain values and says nothing of another. So the files that points choose are read, and
    not composed, which takes Hydra 0.1 s each.
    """
    overrides.check_defaults()
    try:
        with hydra.initialize_config_dir(str(overrides.conf_folder()), version_base="1.3"):
            composed = _composed(request.campaign)
            settings = parse(CampaignConfig, {field.name: composed[field.name] for field in fields(CampaignConfig)})
            blocks = composed.get("sweep", {}).get("blocks", [])
            default = {field.name: composed[field.name] for field in fields(TrialConfig)}
            for group in overrides.GROUPS:  # a user's own file may have the name of a default
                default[group] = overrides.choice_from_outside(group, default[group]["name"]) or default[group]
            # (group, file) -> what the file says
            chosen = {(group, default[group]["name"]): default[group] for group in overrides.GROUPS}
            trials = []
            for point in _composing(expand(merge_blocks(blocks, request.cells), settings.max_points)):
                files = {group: point[group] for group in overrides.GROUPS if group in point}
                for group, file in files.items():
                    if (group, file) not in chosen:
                        found = overrides.choice_from_outside(group, file)
                        chosen[group, file] = found or dict(overrides.conf_file(f"{group}/{file}"))
                options = {key: value for key, value in point.items() if key not in files}
                trials.append(with_options(default | {each[0]: chosen[each] for each in files.items()}, options))
    except (HydraException, OmegaConfBaseException) as error:
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise ConfigError(shown(reason)) from error
    return composed, settings, with_only(trials, request.only, settings.max_points)


def _composed(campaign: Sequence[str]) -> dict[str, Any]:
    """conf/config.yaml under these overrides. Hydra does not find a sweep file of the user's own, so its keys become
    overrides, below those that were given."""
    name = next((line.partition("=")[2] for line in campaign if line.startswith("sweep=")), None)
    if name is None or not overrides.own_file(f"sweep/{name}"):
        return _plain(hydra.compose("config", list(campaign)))
    content = overrides.conf_file(f"sweep/{name}")
    keys = dotted({key: value for key, value in content.items() if key != "sweep"})
    given = [line for line in campaign if not line.startswith("sweep=")]
    lines = overrides.replaced([override_line(key, value) for key, value in keys.items()], given)
    return _plain(hydra.compose("config", lines)) | {"sweep": content["sweep"]}


def _trial(composed: Mapping[str, Any]) -> TrialConfig:
    workload = dict(composed["workload"])
    lens = workload.get("document_lens")
    if isinstance(lens, str) and lens.startswith(
        "@"
    ):  # a trial has the lengths: its identity and its ranks need no file
        workload["document_lens"] = ",".join(map(str, documents.from_file(Path(lens[1:]))))
    method = methods.with_own_options(composed["method"])
    return parse(TrialConfig, {**composed, "workload": workload, "method": method})


def _any_length(composed: Mapping[str, Any]) -> int:
    """A length that the trials of a search may have: a pack has two documents or more."""
    document_len = composed["workload"].get("document_len")
    if not isinstance(document_len, int):  # no pack, or a value that the trial refuses
        return STARTS_FROM
    return max(STARTS_FROM, documents.shortest_pack(document_len))


def _plain(config: DictConfig) -> dict[str, Any]:
    """A composed config as plain values."""
    plain: Any = OmegaConf.to_container(config)
    return {str(key): value for key, value in plain.items()}


def merge_blocks(blocks: Sequence[Mapping[str, Any]], cells: Sequence[str]) -> list[list[Override]]:
    """The overrides of each block of a sweep file, with those of the command line on top.

    A key of the command line replaces that key in every block. A group (method=ring) also replaces the block's options
    of that group (method.layout), but for `hardware`: which GPU it is says nothing of its allocator.
    """
    above = {override.key_or_group: override for override in overrides.parse_overrides(cells)}
    merged = []
    for index, block in enumerate(blocks or [{}]):
        if not isinstance(block, Mapping):
            raise ConfigError(f"sweep.blocks[{index}] must map keys to values, not {shown(repr(block))}")
        groups = above.keys() - {"hardware"}
        kept = {key: value for key, value in block.items() if key not in above and str(key).split(".")[0] not in groups}
        try:
            below = overrides.parse_overrides([override_line(str(key), value) for key, value in kept.items()])
        except ConfigError as error:
            raise ConfigError(f"sweep.blocks[{index}]: {error}") from error
        if campaign := [o.key_or_group for o in below if o.key_or_group in overrides.CAMPAIGN_KEYS]:
            raise ConfigError(f"sweep.blocks[{index}]: {', '.join(campaign)} holds for the whole sweep; set it outside")
        merged.append([*below, *above.values()])
    return merged


def override_line(key: str, value: Any) -> str:
    """One entry of a block as an override. A list is a choice of its items; text is read by Hydra's grammar."""
    if value == []:
        raise ConfigError(f"{shown(key)}: an empty list sweeps nothing; give values, or leave {shown(key)} out")
    if isinstance(value, list):
        return f"{key}={','.join(_literal(item) for item in value)}"
    return f"{key}={value if isinstance(value, str) else _literal(value)}"


def _literal(value: Any) -> str:
    """A value of YAML as Hydra's grammar writes it."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str) and not re.fullmatch(r"[A-Za-z_][\w.-]*", value):
        return QuotedString(value, Quote.single).with_quotes()
    return str(value)


def expand(blocks: Sequence[Sequence[Override]], max_points: int) -> list[Point]:
    """The points of the sweep: the union of the blocks' products.

    Raises:
        ConfigError: more than `max_points` points, which are counted before any is made; or an empty range.
    """
    count = sum(math.prod(map(overrides.count_values, block)) for block in blocks)
    if count > max_points:
        raise ConfigError(
            f"the sweep has {count:,} points, more than max_points={max_points}; insist with max_points={count}"
        )
    points: list[Point] = []
    for block in blocks:
        for override in block:
            if not overrides.count_values(override):
                raise ConfigError(f"{shown(override.input_line)}: no value to sweep over")
        keys = [override.key_or_group for override in block]
        points += [dict(zip(keys, point, strict=True)) for point in itertools.product(*map(overrides.values, block))]
    return points


def with_only(trials: list[dict[str, Any]], lines: Sequence[str], max_values: int) -> list[dict[str, Any]]:
    """The composed trials that have, for each line, one of its values. lines: of `only.`, as overrides. An option that
    a trial's file lacks is null.

    Raises:
        ConfigError: a listed value, or all values of a range, that no trial has; no trial that has one of each line;
            more than max_values values; or an option that no trial's method has.
    """
    kept = trials
    for override in overrides.parse_overrides(lines, overrides.ONLY):
        line, key = shown(f"{overrides.ONLY}{override.input_line}"), override.key_or_group
        if (count := overrides.count_values(override)) > max_values:
            raise ConfigError(f"{line} has {count:,} values, more than max_points={max_values}")
        if count == 0:
            raise ConfigError(f"{line} has no value; a glob chooses names of a group, such as {overrides.ONLY}method")
        group, _, option = key.rpartition(".")
        if key not in overrides.CELL_KEYS and not any(option in trial[group] for trial in trials):
            raise ConfigError(f"{line}: no {group} of these {len(trials):,} trials has an option {option}")
        there = [_value(trial, key) for trial in trials]
        wanted = overrides.values(override)
        unknown = [value for value in wanted if not any(_same(value, each) for each in there)]
        if len(unknown) == count or (unknown and isinstance(override.value(), ChoiceSweep)):
            missing, found = (", ".join(dict.fromkeys(map(_literal, each))) for each in (unknown, there))
            raise ConfigError(
                f"{line}: of these {len(trials):,} trials {key} is {shown(found)}, never {shown(missing)}"
            )
        kept = [trial for trial in kept if any(_same(_value(trial, key), each) for each in wanted)]
    if not kept:
        words = " ".join(f"{overrides.ONLY}{line}" for line in lines)
        raise ConfigError(f"{shown(words)} leaves nothing: none of these {len(trials):,} trials has one of each")
    return kept


def _same(one: Any, other: Any) -> bool:
    """80 is 80.0, but true is not 1."""
    return one == other and isinstance(one, bool) == isinstance(other, bool)


def _value(trial: Mapping[str, Any], key: str) -> Any:
    """The value of a command-line key in a composed trial; of a group, the name."""
    if key in overrides.GROUPS:
        return trial[key]["name"]
    group, _, name = key.rpartition(".")
    return trial[group].get(name) if group else trial[key]


def with_options(composed: Mapping[str, Any], options: Point) -> dict[str, Any]:
    """A copy of a composed trial with options set, as Hydra would set them: only those that the chosen file has.

    Raises:
        ConfigError: the chosen file has no such option.
    """
    changed = {key: dict(value) if isinstance(value, Mapping) else value for key, value in composed.items()}
    for key, value in options.items():
        group, _, name = key.rpartition(".")
        node = changed[group] if group else changed
        if name not in node and not (group == "method" and methods.import_error(str(node["name"]))):
            known = ", ".join(f"{group}.{option}" for option in node if option != "name")
            others = [other for other in overrides.choices(group) if name in overrides.conf_file(f"{group}/{other}")]
            having = f"; options of that name: {group}={','.join(others)}" if others else ""
            raise ConfigError(f"{key}: {group}={node['name']} has no such option; it has {known or 'none'}{having}")
        node[name] = value
    return changed


def _composing(points: Sequence[Any]) -> Iterator[Any]:
    """The points, with a count on stderr while Hydra composes them."""
    stderr = Console(stderr=True)
    if not stderr.is_terminal:
        yield from points
        return
    with stderr.status("") as status:
        for index, point in enumerate(points, 1):
            status.update(f"composing {index}/{len(points)}")
            yield point
