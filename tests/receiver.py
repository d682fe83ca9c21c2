"""Receivers of messages for tests: a web server and a mail server that refuse some of them."""

import json
import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Receiver:
    """What was received. ``refuse`` are the answers to the next requests; 0 closes the connection without one."""

    def __init__(self) -> None:
        self.url = ""
        self.port = 0
        self.refuse: list[int] = []
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str] = []
        self.mails: list[str] = []
        self.requests = 0


@contextmanager
def webhook() -> Iterator[Receiver]:
    """A web server on a free port of this machine."""
    receiver = Receiver()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            receiver.requests += 1
            answer = receiver.refuse.pop(0) if receiver.refuse else 200
            if answer == 0:
                self.connection.close()
                return
            if answer == 200:
                receiver.keys.append(self.headers["Idempotency-Key"])
                receiver.bodies.append(json.loads(body))
            self.send_response(answer)
            if answer == 302:
                self.send_header("Location", "http://127.0.0.1:1/elsewhere")
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        receiver.port = server.server_address[1]
        receiver.url = f"http://127.0.0.1:{receiver.port}/hook/CANARY"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield receiver
        server.shutdown()


@contextmanager
def mail_server() -> Iterator[Receiver]:
    """A mail server without encryption; ``refuse`` are its answers to the text of the next mails."""
    receiver = Receiver()

    class Handler(socketserver.StreamRequestHandler):
        def say(self, text: str) -> None:
            self.wfile.write(f"{text}\r\n".encode())

        def handle(self) -> None:
            self.say("220 test")
            for line in self.rfile:
                word = line.split()[0].upper() if line.split() else b""
                if word == b"DATA":
                    self.say("354 text")
                    self.take()
                elif word == b"QUIT":
                    self.say("221 bye")
                    return
                else:
                    self.say("250 ok")

        def take(self) -> None:
            lines = []
            while (line := self.rfile.readline()) not in (b".\r\n", b""):
                lines.append(line.decode())
            receiver.requests += 1
            answer = receiver.refuse.pop(0) if receiver.refuse else 250
            if answer == 250:
                receiver.mails.append("".join(lines))
            self.say(f"{answer} text")

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as server:
        receiver.port = server.server_address[1]
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield receiver
        server.shutdown()
