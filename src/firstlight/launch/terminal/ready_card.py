"""The card at ready: what is served, where, and a request that runs as it is printed. Pure.

Invariant: the printed command works in the shell of the person who started the server, also with TLS, a Unix
socket or API keys, and it never shows a key.
"""

from __future__ import annotations

import json
import shlex

from firstlight.base.config import RunConfig, ServerSection
from firstlight.base.environment import API_KEY
from firstlight.base.loopback import reachable


def base_url(server: ServerSection) -> str:
    """The URL that clients on this machine use; of a Unix socket the one to send through it."""
    if server.uds is not None:
        return "http://localhost"
    host = reachable(server.host)
    scheme = "https" if server.tls_cert else "http"
    return f"{scheme}://{f'[{host}]' if ':' in host else host}:{server.port}"


def ready_card(config: RunConfig, took_s: float, *, has_keys: bool, program: str) -> str:
    """Several lines for a person, who calls `program` for this one."""
    name = config.model.served_names[0]
    url = base_url(config.server)
    place = f"{url}/v1" + (f" through {config.server.uds}" if config.server.uds else "")
    lines = [
        "",
        f"ready in {took_s:.1f} s: {name} at {place}",
        "",
        *_curl(config.server, url, name, has_keys),
        "",
        f"  {url}/docs shows the whole API; Ctrl-C stops the server.",
    ]
    if config.server.uds is None:
        address = "" if url == "http://127.0.0.1:8000" else f" --url {url}"
        lines.insert(-1, f"  {program} chat{address} talks to it in another terminal.")
    if has_keys:
        lines.insert(-1, f"  Requests need a key: put yours into {API_KEY}.")
    return "\n".join(lines)


def _curl(server: ServerSection, url: str, name: str, has_keys: bool) -> list[str]:
    # A question whose answer does not hang on how a layout rounds: the two likeliest tokens are far apart.
    message = {"role": "user", "content": "What is 2+2?"}
    body = json.dumps({"model": name, "temperature": 0, "messages": [message]})
    options = ""
    if server.uds is not None:
        options += f" --unix-socket {shlex.quote(server.uds)}"
    if server.tls_cert is not None:
        options += f" --cacert {shlex.quote(server.tls_cert)}"
    if has_keys:
        options += f' -H "Authorization: Bearer ${API_KEY}"'
    return [
        f"  curl{options} {url}/v1/chat/completions \\",
        "    -H 'Content-Type: application/json' \\",
        f"    -d {shlex.quote(body)}",
    ]
