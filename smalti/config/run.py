"""One run: what every training has in common, and the whole config of ``smalti train``."""

import re
from typing import Self

from pydantic import field_validator, model_validator

from smalti.config.data import DataConfig
from smalti.config.model import ModelConfig
from smalti.config.schema import Config, Whole, placement
from smalti.config.track import TrackConfig
from smalti.config.train import TrainConfig


class JobConfig(Config):
    """What every kind of training needs, whatever its model and data are."""

    name: str
    """Name of the run, and of its folder."""
    seed: Whole = 17
    """Keys the order of the data and the initial weights."""
    folder: str | None = placement(None)
    """The run folder; absent: ``runs/<name>``."""
    init_from: str | None = None
    """A checkpoint or Hugging Face folder whose weights (only) the run starts from."""
    train: TrainConfig
    """The training."""
    track: TrackConfig = TrackConfig()
    """Where metrics go."""

    @property
    def run_folder(self) -> str:
        """Where the run's files lie."""
        return self.folder or f"runs/{self.name}"

    @field_validator("name")
    @classmethod
    def _name_is_a_folder_name(cls, name: str) -> str:
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}", name):
            raise ValueError(f"'{name}' cannot be a folder name; use letters, digits, '.', '_' and '-'")
        return name


class RunConfig(JobConfig):
    """The config of ``smalti train``. Together with the data it fixes every number of the run."""

    model: ModelConfig
    """The model."""
    data: DataConfig
    """The tokens."""

    @model_validator(mode="after")
    def _batch_of_whole_sequences(self) -> Self:
        seq_len, batch = self.data.seq_len, self.train.global_batch_tokens
        if batch % seq_len:
            raise ValueError(
                f"train.global_batch_tokens={batch} is not a multiple of data.seq_len={seq_len}; "
                f"the nearest are {batch // seq_len * seq_len} and {(batch // seq_len + 1) * seq_len}"
            )
        micro = self.train.microbatch_tokens
        if isinstance(micro, int) and micro % seq_len:
            raise ValueError(f"train.microbatch_tokens={micro} is not a multiple of data.seq_len={seq_len}")
        if seq_len > self.model.max_position_embeddings:
            raise ValueError(
                f"data.seq_len={seq_len} is longer than model.max_position_embeddings="
                f"{self.model.max_position_embeddings}"
            )
        return self
