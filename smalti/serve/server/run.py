"""Runs the server: binds the port, loads the model, answers until a signal arrives.

On Ctrl-C or SIGTERM no new connection is accepted, running requests get ``finish_s`` seconds to finish, and a second
Ctrl-C ends them at once.
"""

import contextlib
import errno
import gc
import ipaddress
import socket
import sys
from dataclasses import dataclass

from smalti.base.errors import UserError, missing_extra
from smalti.serve.folders import ModelFolder

MIN_KEY_CHARACTERS = 16


@dataclass(frozen=True)
class Options:
    """Options of ``smalti serve``. Raises UserError for a value out of range."""

    host: str = "127.0.0.1"
    port: int = 8000
    key: str | None = None
    name: str | None = None
    dtype: str = "fp32"
    max_rows: int = 32
    max_waiting: int = 512
    max_body_bytes: int = 4 << 20
    max_connections: int = 1000
    finish_s: float = 30.0
    adapters: tuple[str, ...] = ()
    """``NAME=FOLDER`` of each adapter."""

    def __post_init__(self) -> None:
        bounds = (
            ("--port", self.port, 0 <= self.port <= 65535, "0 (any free port) to 65535"),
            ("--max-rows", self.max_rows, self.max_rows >= 1, "1 or more"),
            ("--max-waiting", self.max_waiting, self.max_waiting >= 0, "0 or more"),
            ("--max-body-mb", self.max_body_bytes / (1 << 20), self.max_body_bytes >= 1, "more than 0"),
            ("--max-connections", self.max_connections, self.max_connections >= 1, "1 or more"),
            ("--finish-s", self.finish_s, 0 <= self.finish_s <= 86400, "0 to 86400"),
        )
        for name, value, holds, allowed in bounds:
            if not holds:
                raise UserError(f"{name} {value:g}", allowed=allowed)
        if self.key is not None and (len(self.key) < MIN_KEY_CHARACTERS or not self.key.isascii()):
            raise UserError(
                f"the key has {len(self.key)} characters",
                allowed=f"{MIN_KEY_CHARACTERS} or more, all of them ASCII",
                hint="python -c 'import secrets; print(secrets.token_urlsafe(32))' > key.txt",
            )


def serve(model: ModelFolder, options: Options) -> int:
    """Serve until a signal arrives; returns the exit code.

    Raises UserError, before anything is loaded, where the port is taken or other machines are let in without a key.
    """
    try:
        import fastapi  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise missing_extra("fastapi", "serve", "smalti serve", error) from error
    from smalti.serve.server.connections import allow_files

    allow_files(options.max_connections)
    listening = listen(options)
    try:
        return _serve(model, options, listening)
    finally:
        listening.close()


def listen(options: Options) -> socket.socket:
    """Return the listening socket. Raises UserError where it cannot be bound, or would let others in without a key."""
    family, address = _resolve(options.host)
    if options.key is None and not ipaddress.ip_address(address).is_loopback:
        raise UserError(
            f"--host {options.host} lets other machines in, and no key is set",
            allowed="127.0.0.1, localhost or ::1 without a key",
            hint="--key-file FILE, or the key in the environment variable SMALTI_SERVE_KEY",
        )
    listening = socket.socket(family, socket.SOCK_STREAM)
    try:
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listening.bind((address, options.port))
        listening.listen(2048)
    except OSError as error:
        listening.close()
        raise _port_error(options, error) from error
    return listening


def _resolve(host: str) -> tuple[socket.AddressFamily, str]:
    try:
        family, _, _, _, address = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0]
    except (OSError, UnicodeError) as error:
        raise UserError(f"--host {host} cannot be resolved: {error}", hint="--host 127.0.0.1") from error
    return family, str(address[0])


def _port_error(options: Options, error: OSError) -> UserError:
    place = f"{options.host}:{options.port}"
    if error.errno == errno.EADDRINUSE:
        return UserError(f"{place} is in use by another program", hint="--port 0 takes any free port")
    if error.errno in (errno.EACCES, errno.EPERM):
        return UserError(f"{place} is not allowed for this user", allowed="ports from 1024 on", hint="--port 8000")
    if error.errno == errno.EADDRNOTAVAIL:
        return UserError(f"--host {options.host} is not an address of this machine", hint="--host 127.0.0.1")
    return UserError(f"{place} cannot be listened at: {error.strerror}", hint="--port 0 takes any free port")


def _serve(model: ModelFolder, options: Options, listening: socket.socket) -> int:
    from smalti.data.tokenizer.chat import load_chat
    from smalti.serve.adapters import load_chats
    from smalti.serve.adapters import parse as parse_adapters
    from smalti.serve.engine.engine import Engine
    from smalti.serve.engine.loop import EngineLoop
    from smalti.serve.engine.scheduler import Limits
    from smalti.serve.server.app import build
    from smalti.serve.server.metrics import Metrics
    from smalti.serve.server.process import run
    from smalti.serve.server.serving import Serving

    print(f"loading {model.folder} ({options.dtype})", file=sys.stderr, flush=True)
    chat = load_chat(model.folder)
    limits = Limits(max_rows=options.max_rows, max_waiting=options.max_waiting)
    adapters = parse_adapters(list(options.adapters), options.name or model.name)
    adapter_chats = load_chats(adapters, chat)
    engine = Engine.from_folder(model.folder, dtype=options.dtype, limits=limits, adapters=adapters)
    with contextlib.closing(EngineLoop(engine)) as loop:
        serving = Serving(
            engine,
            loop,
            chat,
            Metrics(loop.counts),
            options.name or model.name,
            adapter_chats,
        )
        app = build(serving, key=options.key, max_body_bytes=options.max_body_bytes)
        # The loaded objects stay: collecting garbage for a body of a million lists then takes 0.4 s instead of 1.8 s.
        gc.collect()
        gc.freeze()
        code = run(
            app,
            listening,
            name=", ".join((serving.name, *adapters)),
            finish_s=options.finish_s,
            max_connections=options.max_connections,
            failed=lambda: loop.error is not None,
        )
        if loop.error is not None:
            raise loop.error
    return code
