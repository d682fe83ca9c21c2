"""Copies versions of the model registry to MLflow's, and their tags as aliases.

MLflow numbers the versions of a name itself; ours is found there by its run and digest.
"""

import json
from typing import Any

from smalti.base.machine import without_home
from smalti.track.registry.versions import Version
from smalti.track.sinks.mlflow import Mlflow

_TAG_CHARS = 5000


def register(tracker: Mlflow, version: Version, at: str) -> str:
    """Register the files at ``at`` of the version's MLflow run, which need not be uploaded yet; returns a line.

    A version that is there gets its tags again.
    """
    client, run = tracker.recorded_run()
    known = _find(client, run, version)
    if known is None:
        if not client.search_registered_models(filter_string=f"name='{version.name}'", max_results=1):
            _create(client, version.name)
        known = client.create_model_version(
            version.name, f"{run.info.artifact_uri}/{at}", run.info.run_id, tags=_facts(version)
        )
    else:
        for key, value in _facts(version).items():
            client.set_model_version_tag(version.name, known.version, key, value)
    for tag in version.tags:
        client.set_registered_model_alias(version.name, tag, known.version)
    return f"mlflow: {version.label} is version {known.version} of the registered model {version.name}"


def move_alias(tracker: Mlflow, version: Version, tag: str, *, remove: bool) -> str:
    """Set the alias of a tag that was put on a version, or delete it; returns a line that reports it."""
    client, run = tracker.recorded_run()
    known = _find(client, run, version)
    if known is None:
        return f"mlflow: {version.label} is not registered there, so '{tag}' is not an alias"
    if remove:
        client.delete_registered_model_alias(version.name, tag)
        return f"mlflow: version {known.version} of {version.name} has no alias '{tag}'"
    client.set_registered_model_alias(version.name, tag, known.version)
    return f"mlflow: '{tag}' is an alias of version {known.version} of {version.name}"


def _find(client: Any, run: Any, version: Version) -> Any:
    """Return MLflow's version of the same name, run and digest, or None."""
    for known in client.search_model_versions(f"run_id='{run.info.run_id}'"):
        if known.name == version.name and known.tags.get("smalti.digest") == version.digest:
            return known
    return None


def _create(client: Any, name: str) -> None:
    from mlflow.exceptions import MlflowException

    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":  # by another process meanwhile
            raise


def _facts(version: Version) -> dict[str, str]:
    facts = {
        "version": version.number,
        "digest": version.digest,
        "kind": version.kind,
        "step": version.step,
        "weights": version.weights,
        "tokens": version.tokens,
        "data": version.data.get("digest"),
        "path": without_home(version.path),
        **{
            f"score.{suite}.{task.replace('/', '.')}.{score['metric']}": score["value"]
            for suite, tasks in version.scores.items()
            for task, score in tasks.items()
        },
    }
    return {
        f"smalti.{key}": (value if isinstance(value, str) else json.dumps(value))[:_TAG_CHARS]
        for key, value in facts.items()
        if value is not None
    }
