"""Runs of one campaign append their words to its `_campaign.yaml` one after another."""

import time
from collections.abc import Iterator
from pathlib import Path

from sp_bench.config.parsing import ConfigError
from sp_bench.driver.claims import COMMAND, Claims
from sp_bench.rows import campaign_file

TRIES, WAIT_S = 50, 0.1  # an append takes milliseconds


def record(claims: Claims, folder: Path, words: str, commit: str | None) -> Iterator[str]:
    """Append the words of a run to the campaign's file. Yields why they are not there; nothing where they are.

    Raises:
        OSError: the folder of claims cannot be used.
    """
    file, lost = folder / campaign_file.NAME, "the words of this run are not in it"
    for _ in range(TRIES):
        if claim := claims.take(COMMAND, lambda: False):
            break
        time.sleep(WAIT_S)
    else:
        yield f"{file}: another run holds it; {lost}"
        return
    try:
        campaign_file.append(folder, words, commit)
    except ConfigError as error:
        yield f"{error}; {lost}"
    except OSError as error:
        yield f"{file}: {error}; {lost}"
    finally:
        claims.release(claim)
