"""The words of a run, for `_campaign.yaml` of its campaign. Runs of one campaign append to that file one after another."""

import time
from pathlib import Path

from sp_bench.driver.claims import COMMAND, Claims
from sp_bench.rows import campaign_file

TRIES, WAIT_S = 50, 0.1  # an append takes milliseconds


def record(claims: Claims, folder: Path, words: str, commit: str | None) -> str:
    """Append the words of a run to the campaign's file. Returns why they are not there; empty: they are.

    Raises:
        OSError: the folder of claims cannot be used.
    """
    for _ in range(TRIES):
        if (claim := claims.take(COMMAND, lambda: False)) is not None:
            break
        time.sleep(WAIT_S)
    else:
        return f"{folder / campaign_file.NAME}: another run holds it; the words of this run are not in it"
    try:
        campaign_file.append(folder, words, commit)
    except (campaign_file.Unreadable, OSError) as error:
        return f"{folder / campaign_file.NAME}: {error}; the words of this run are not in it"
    finally:
        claims.release(claim)
    return ""
