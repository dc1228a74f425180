"""The modules beside the tests, and the stage that the trials of one file share."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sp_bench.config.trial import TrialConfig

HERE = str(Path(__file__).parent)
if HERE not in sys.path:
    sys.path.insert(0, HERE)


@pytest.fixture(scope="module")
def stage(make_config: Callable[..., TrialConfig], tmp_path_factory: pytest.TempPathFactory) -> Iterator[object]:
    from stage import staged

    with staged(tmp_path_factory.mktemp("stage"), make_config) as made:
        yield made
