"""The address of a server as a person gives it, and what is said when nobody answers there.

Invariant: what comes back has a scheme that we speak and a host.
"""

from __future__ import annotations

from urllib.parse import SplitResult, urlsplit
from urllib.request import getproxies, proxy_bypass

from firstlight.base.environment import proxies
from firstlight.base.errors import ResourceError, UsageError
from firstlight.base.invocation import program


def server_address(url: str) -> SplitResult:
    """The parts of `url`; a `UsageError` if it is not the address of an HTTP server."""
    try:
        parts = urlsplit(url)
        reason = "" if parts.port is None or parts.port > 0 else "its port is 0"
    except ValueError as error:
        reason = str(error)
    else:
        if parts.scheme not in ("http", "https"):
            reason = "it does not begin with http:// or https://"
        elif not parts.hostname:
            reason = "it names no host"
    if reason:
        raise UsageError(
            f"--url {url} is not the address of a server: {reason}.",
            "Give one such as http://127.0.0.1:8000, as `firstlight serve` prints it.",
        )
    return parts


def proxy_of(parts: SplitResult) -> str | None:
    """The proxy that the environment names for an address, as curl reads it: the scheme's own variable before
    ALL_PROXY, and none for what NO_PROXY excepts."""
    if parts.hostname is None or proxy_bypass(parts.netloc.rpartition("@")[2]):
        return None
    named = getproxies()
    proxy = named.get(parts.scheme) or named.get("all")
    return proxy if proxy is None or "://" in proxy else f"http://{proxy}"


def proxy_error(url: str, error: Exception) -> UsageError:
    """What to say of a proxy in the environment that cannot be used. Its address, which may hold a password,
    is not shown."""
    schemes = {name: scheme for name, scheme in proxies().items() if scheme not in ("http", "https")}
    named = ", ".join(f"{name} ({scheme})" for name, scheme in (schemes or proxies()).items())
    reason = "" if schemes else f": {error}"
    return UsageError(
        f"{url} is not asked: the proxy named in {named or 'the environment'} cannot be used{reason}.",
        "Name an http:// or https:// proxy there, unset it, or put the host into NO_PROXY.",
    )


def no_answer(url: str, error: Exception) -> ResourceError:
    """What to say of a server that could not be reached."""
    reason = str(error) or type(error).__name__
    hint = f"Start a server with `{program()} serve`, or give the address of one with --url."
    if "CERTIFICATE_VERIFY_FAILED" in reason:
        hint = "Its certificate is not trusted here: if it is your own, set SSL_CERT_FILE to its file."
    return ResourceError(f"no answer from {url}: {reason}.", hint)
