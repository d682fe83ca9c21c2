"""The chat page: one file that loads nothing, with a content security policy that allows this server only."""

import base64
import hashlib
import re
from pathlib import Path

from starlette.responses import HTMLResponse

_FILE = Path(__file__).with_name("page.html")


def page(status: int = 200) -> HTMLResponse:
    """Return the page. It is the same with the key and without (401): it holds no data, and asks for the key."""
    text = _FILE.read_text(encoding="utf-8")
    headers = {"Content-Security-Policy": _policy(text), "X-Frame-Options": "DENY"}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return HTMLResponse(text, status, headers=headers)


def _policy(text: str) -> str:
    """Allow only this script and style, requests to this server, no frames, forms or images."""
    scripts = _digests(r"<script>(.*?)</script>", text)
    styles = _digests(r"<style>(.*?)</style>", text)
    return (
        f"default-src 'none'; script-src {scripts}; style-src {styles}; connect-src 'self'; img-src data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _digests(pattern: str, text: str) -> str:
    digests = [hashlib.sha256(element.encode()).digest() for element in re.findall(pattern, text, re.DOTALL)]
    return " ".join(f"'sha256-{base64.b64encode(digest).decode()}'" for digest in digests)
