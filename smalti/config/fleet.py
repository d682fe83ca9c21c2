"""``fleet.yaml`` in ``SMALTI_HOME``: who gets messages about incidents of the fleet."""

from typing import Literal, Self

from pydantic import model_validator

from smalti.config.launch import SecretName
from smalti.config.schema import Config, NotAllowed, Whole, placement

Priority = Literal["normal", "high", "critical"]
PRIORITIES: tuple[Priority, ...] = ("normal", "high", "critical")


class EmailConfig(Config):
    """A mail server, and who gets mail."""

    host: str = placement()
    """Its host name."""
    port: Whole = placement(587, ge=1, le=65535)
    """Its port."""
    encryption: Literal["starttls", "tls", "none"] = placement("starttls")
    """starttls: from the first command on; tls: from the start, mostly on port 465; none: on a private network."""
    user: str | None = placement(None)
    """Name of the login; absent: none."""
    password: SecretName | None = placement(None)
    """Name of the secret with the password (``smalti fleet secret set NAME``)."""
    sender: str = placement()
    """Address in From."""
    to: tuple[str, ...] = placement(min_length=1)
    """Addresses in To."""


class TargetConfig(Config):
    """One receiver of messages: a webhook or a mail server."""

    url: SecretName | None = placement(None)
    """Name of the secret with the URL of a webhook: such a URL is a password. Messages are sent with POST."""
    format: Literal["json", "slack"] = placement("json")
    """json: fields of the incident; slack: ``{"text": ...}``, which Slack, Mattermost and Teams' connectors take."""
    email: EmailConfig | None = placement(None)
    """Mail instead of a webhook."""
    at_least: Priority = placement("normal")
    """normal: all, also restarts that ``smalti train`` does by itself. high: also attempts that the queue repeats, and
    nodes that failed a check. critical: runs that have failed, and nodes that were cordoned."""

    @model_validator(mode="after")
    def _is_one_of_both(self) -> Self:
        if (self.url is None) == (self.email is None):
            raise NotAllowed("url and email", allowed="one of them", hint="url: SLACK_URL")
        if self.email is not None and (self.email.user is None) != (self.email.password is None):
            raise NotAllowed("email.user and email.password", allowed="both or none", hint="password: NAME_OF_A_SECRET")
        return self


class FleetConfig(Config):
    """Messages about the fleet."""

    messages: dict[str, TargetConfig] = placement({})
    """Receivers by name."""
