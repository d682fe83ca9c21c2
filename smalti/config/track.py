"""The ``track:`` section: where metrics are written."""

import re
from typing import Literal, Self

from pydantic import field_validator, model_validator

from smalti.config.schema import Config, NotAllowed, Real, Whole, placement

SinkName = Literal["tensorboard", "mlflow", "wandb"]
"""The trackers that a run can be copied to, each a module of ``track/sinks/``."""


class MlflowConfig(Config):
    """The MLflow server that the run is copied to if ``track.sinks`` has ``mlflow``."""

    uri: str | None = placement(None)
    """Address of the server, ``http://HOST:PORT``; absent: the environment variable MLFLOW_TRACKING_URI."""
    experiment: str | None = placement(None)
    """Name of the experiment, created if missing; absent: MLFLOW_EXPERIMENT_NAME, else ``smalti``."""
    upload_max_bytes: Whole = placement(1_000_000_000, ge=0)
    """Largest file or folder to upload (an export, eval results), in bytes; a larger one is only mentioned; 0: no
    uploads."""

    @model_validator(mode="after")
    def _no_login_in_a_file(self) -> Self:
        if self.uri is not None and re.search(r"://[^/@\s]+@", self.uri):
            raise NotAllowed(
                "uri contains a login, and a config is written to the run folder",
                allowed="an address without a login",
                hint="set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN",
            )
        return self


class WandbConfig(Config):
    """The Weights & Biases project that the run is copied to if ``track.sinks`` has ``wandb``."""

    project: str | None = placement(None)
    """Name of the project; absent: WANDB_PROJECT, else ``smalti``."""
    entity: str | None = placement(None)
    """User or team that owns the project; absent: WANDB_ENTITY, else the owner of the API key."""
    mode: Literal["offline", "online"] | None = placement(None)
    """``offline``: write a folder in the run for ``wandb sync`` to upload; absent: WANDB_MODE, else ``offline``."""


class TrackConfig(Config):
    """Where metrics are written besides the run folder's JSONL files."""

    console: bool = placement(True)
    """Show progress: a live line on a terminal, plain lines elsewhere."""
    console_every_s: Whole = placement(10, ge=0)
    """Seconds between plain lines when stderr is not a terminal."""
    sinks: tuple[SinkName, ...] = placement(())
    """Trackers that the run is copied to in the background; may change at any attempt."""
    mlflow: MlflowConfig = MlflowConfig()
    """Options of MLflow, used if ``sinks`` has ``mlflow``."""
    wandb: WandbConfig = WandbConfig()
    """Options of Weights & Biases, used if ``sinks`` has ``wandb``."""
    system_every_s: Real = placement(10.0, ge=0)
    """Seconds between two samples of the machine (CPU, memory, disk, network, GPUs); 0: no samples."""

    @field_validator("sinks")
    @classmethod
    def _each_once(cls, sinks: tuple[SinkName, ...]) -> tuple[SinkName, ...]:
        if len(set(sinks)) < len(sinks):
            raise ValueError(f"sinks = {list(sinks)} names one of them twice")
        return sinks
