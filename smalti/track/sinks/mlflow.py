"""Copies a run to an MLflow server: curves, parameters, tags, status, and files of later commands.

A run folder is one MLflow run, over all attempts. The server is queried for the steps that it has; a line sent twice is
stored once (the server identifies it by step and time). Uses the client of ``mlflow-skinny``; the server's version may
differ. MLflow deletes no value: of steps repeated after a crash it keeps the first.
"""

import http.client
import re
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from smalti.base import env
from smalti.base.errors import UserError, missing_extra
from smalti.base.units import format_bytes
from smalti.config.track import MlflowConfig, TrackConfig
from smalti.track.provenance import redact
from smalti.track.sinks.feed import Row, brief
from smalti.track.sinks.run_info import RunInfo

_METRICS_A_REQUEST = 1000
_PARAMS_A_REQUEST = 100
_PARAM_CHARS = 6000
_TAG_CHARS = 5000
"""Limits of the REST API, https://mlflow.org/docs/latest/rest-api.html#request-limits (tags: of older servers)."""

_ANSWER_S = 10.0
_LOGIN = re.compile(r"(?<=://)[^/\s]+@")
"""A login in an address. The client sends it as a header; urllib would take it for a part of the host."""

_STATUS = {"running": "RUNNING", "done": "FINISHED", "failed": "FAILED", "stopped": "KILLED", "interrupted": "KILLED"}


class Mlflow:
    """The MLflow run of a run folder."""

    name = "mlflow"

    def __init__(self, track: TrackConfig, info: RunInfo) -> None:
        """Raises UserError where no server is named."""
        self._config = track.mlflow
        self._info = info
        self.uri = _uri(track.mlflow, info)
        self._client: Any = None
        self._run_id = ""
        self.place: Mapping[str, str] = {}

    def check(self) -> None:
        """Raise UserError without mlflow-skinny, and where no server answers at the address."""
        if find_spec("mlflow") is None:
            raise missing_extra("mlflow-skinny", "mlflow", "track.sinks=[mlflow]")
        if self.uri.startswith(("http://", "https://")):
            try:
                with urllib.request.urlopen(f"{_LOGIN.sub('', self.uri).rstrip('/')}/health", timeout=_ANSWER_S):
                    pass
            except urllib.error.HTTPError:  # it requires a login, or has no /health: the client will report it
                pass
            except (OSError, ValueError, http.client.HTTPException) as error:
                reason = getattr(error, "reason", error)
                raise unreachable(self.uri, reason if isinstance(reason, Exception) else error) from error

    def open(self) -> Mapping[str, int]:
        """Reopen the run that the record (or MLFLOW_RUN_ID) names, or create one."""
        self._client = _client(self.uri)
        known = self._known()
        run = self._client.get_run(known) if known else self._create()
        if run.info.lifecycle_stage == "deleted":
            raise UserError(
                f"the MLflow run {run.info.run_id} of {self._info.folder} is deleted",
                hint=f"restore it there, or remove {self._info.folder}/trackers/mlflow.json to create another",
            )
        self._run_id = run.info.run_id
        self._client.update_run(self._run_id, status="RUNNING")
        self._describe(dict(run.data.params))
        self.place = {"uri": redact(self.uri), "run_id": self._run_id, "page": self._page(run.info.experiment_id)}
        self._keep(is_open=True)
        return {metric.key: int(metric.step) for metric in run.data.to_proto().metrics}

    def send(self, rows: Sequence[Row]) -> None:
        """Log the rows, a thousand values a request."""
        from mlflow.entities import Metric

        values = [
            Metric(name, value, round(row.time_s * 1000), row.step)
            for row in rows
            for name, value in row.values.items()
        ]
        for start in range(0, len(values), _METRICS_A_REQUEST):
            self._client.log_batch(self._run_id, metrics=values[start : start + _METRICS_A_REQUEST], synchronous=True)

    def close(self, state: str, end_s: float | None) -> None:
        """Set the status, and the end time to that of the last line."""
        end_ms = None if end_s is None else round(end_s * 1000)
        self._client.set_terminated(self._run_id, _STATUS[state], end_time=end_ms)
        self._keep(is_open=False)

    def publish(self, path: Path, at: str, numbers: Mapping[str, float], step: int | None) -> str:
        """Upload a file or folder to ``at``; returns a line that reports it.

        One that is larger than ``track.mlflow.upload_max_bytes`` is not uploaded; the line and a tag report it.
        """
        from mlflow.entities import Metric

        _, run = self.recorded_run()
        if numbers:
            time_ms = round(path.stat().st_mtime * 1000)
            values = [Metric(name, value, time_ms, step or 0) for name, value in numbers.items()]
            self._client.log_batch(self._run_id, metrics=values, synchronous=True)
        size = sum(file.stat().st_size for file in path.rglob("*")) if path.is_dir() else path.stat().st_size
        page = self._page(run.info.experiment_id, "/artifacts")
        if size > self._config.upload_max_bytes:
            notice = f"{at} ({format_bytes(size)}) is larger than track.mlflow.upload_max_bytes"
            self._client.set_tag(self._run_id, f"smalti.not_uploaded.{at.replace('/', '.')}", notice)
            return f"mlflow: {notice} = {self._config.upload_max_bytes}, and is not uploaded"
        if path.is_dir():
            self._client.log_artifacts(self._run_id, str(path), at)
        else:
            self._client.log_artifact(self._run_id, str(path), at.rpartition("/")[0] or None)
        return f"mlflow: {at} is uploaded ({format_bytes(size)}): {page}"

    def recorded_run(self) -> tuple[Any, Any]:
        """Return the client and the MLflow run that the run folder's record names, for commands after the run."""
        self._client = _client(self.uri)
        run = self._client.get_run(self._info.record(self.name)["run_id"])
        self._run_id = run.info.run_id
        return self._client, run

    def _known(self) -> str | None:
        record = self._info.record(self.name)
        recorded = record.get("run_id") if record.get("uri") == redact(self.uri) else None
        return env.tracker_settings().get("MLFLOW_RUN_ID") or recorded

    def _create(self) -> Any:
        name = self._config.experiment or env.tracker_settings().get("MLFLOW_EXPERIMENT_NAME") or "smalti"
        experiment = self._client.get_experiment_by_name(name)
        if experiment is not None and experiment.lifecycle_stage == "deleted":
            raise UserError(
                f"the MLflow experiment '{name}' is deleted",
                hint="restore it there, or name another: track.mlflow.experiment=NAME",
            )
        experiment_id = experiment.experiment_id if experiment is not None else self._client.create_experiment(name)
        return self._client.create_run(
            experiment_id, run_name=self._info.name, start_time=round(self._info.made_s * 1000)
        )

    def _describe(self, there: Mapping[str, str]) -> None:
        """Log the parameters that the run lacks (existing ones cannot change), and all tags."""
        from mlflow.entities import Param, RunTag

        params = [
            Param(key, _cut(_text(value), _PARAM_CHARS))
            for key, value in ((_name(key), value) for key, value in self._info.params.items())
            if key not in there
        ]
        for start in range(0, len(params), _PARAMS_A_REQUEST):
            self._client.log_batch(self._run_id, params=params[start : start + _PARAMS_A_REQUEST], synchronous=True)
        tags = dict(self._info.tags) | {"mlflow.source.name": "smalti train"}
        if "smalti.commit" in tags:
            tags["mlflow.source.git.commit"] = tags["smalti.commit"]
        entries = [RunTag(key, _cut(value, _TAG_CHARS)) for key, value in tags.items()]
        self._client.log_batch(self._run_id, tags=entries, synchronous=True)
        if not there:
            self._client.log_text(self._run_id, self._info.config_text, "config.yaml")

    def _page(self, experiment_id: str, tab: str = "") -> str:
        # Without the query MLflow 3 shows a run as one of prompts and traces; older versions ignore it.
        address = f"{redact(self.uri).rstrip('/')}/#/experiments/{experiment_id}/runs/{self._run_id}"
        return f"{address}{tab}?workflowType=machine_learning"

    def _keep(self, *, is_open: bool) -> None:
        self._info.keep(self.name, {**self.place, "open": is_open})


def _uri(config: MlflowConfig, info: RunInfo) -> str:
    uri = config.uri or env.tracker_settings().get("MLFLOW_TRACKING_URI")
    recorded = info.record(Mlflow.name).get("uri")
    if uri is None and recorded is not None and "***" not in recorded:
        return str(recorded)
    if uri is None:
        raise UserError(
            "track.sinks has mlflow, but no server is named",
            allowed="track.mlflow.uri=http://HOST:PORT, or the variable MLFLOW_TRACKING_URI",
            hint="mlflow server --port 5000    and then    export MLFLOW_TRACKING_URI=http://127.0.0.1:5000",
        )
    if not uri.startswith(("http://", "https://", "databricks")):
        raise UserError(
            f"MLflow's address '{redact(uri)}' is not that of a server",
            allowed="http://HOST:PORT, https://HOST:PORT, databricks, databricks://PROFILE",
            hint="to serve a local database: mlflow server --backend-store-uri sqlite:///mlflow.db",
        )
    return uri


def _client(uri: str) -> Any:
    env.quiet_trackers()
    from mlflow.tracking import MlflowClient

    return MlflowClient(tracking_uri=uri)


def unreachable(uri: str, error: Exception) -> UserError:
    """Return the error for a server that does not answer at the first contact."""
    return UserError(
        f"MLflow at {redact(uri)} cannot be used: {brief(error)}",
        allowed="a server that answers at the start (later outages do no harm)",
        hint="start it, fix track.mlflow.uri or MLFLOW_TRACKING_URI, or train without it: track.sinks=[]",
    )


def _name(key: str) -> str:
    """Return a key in the characters that MLflow accepts."""
    return re.sub(r"[^A-Za-z0-9_. /-]", "_", key)[:250]


def _text(value: Any) -> str:
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 3] + "..."


TRACKER = Mlflow
