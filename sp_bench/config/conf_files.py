"""Where the files of conf are, and what they say without a trial. No rank imports it."""

from functools import cache
from pathlib import Path

from sp_bench.config.yaml_text import read_yaml


@cache
def conf_folder() -> Path:
    """The folder `conf`: inside an installed wheel, or beside the package in a checkout."""
    package = Path(__file__).parents[1]
    return next(folder for folder in (package / "conf", package.parent / "conf") if folder.is_dir())


@cache
def num_layers(model: str) -> int | None:
    """Layers of a model of conf/model; None of a model without a file there."""
    path = conf_folder() / "model" / f"{Path(model).name}.yaml"
    return int(read_yaml(path.read_text("utf-8"), path.name)["num_layers"]) if path.is_file() else None
