"""MLflow: a run a row, in the experiment of the campaign's name. MLFLOW_TRACKING_URI says where; unset: a database in
the campaign's _work."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlflow  # pyright: ignore[reportMissingImports]


def log(campaign: str, place: Path, title: str, options: Mapping[str, Any], measured: Mapping[str, float]) -> None:
    if "MLFLOW_TRACKING_URI" not in os.environ:
        mlflow.set_tracking_uri(f"sqlite:///{place.resolve() / 'mlflow.db'}")
    mlflow.set_experiment(f"sp_bench/{campaign}")
    with mlflow.start_run(run_name=title):
        mlflow.log_params(dict(options))
        mlflow.log_metrics(dict(measured))
        if options["status"] != "ok":
            mlflow.end_run("FAILED")
