"""HTTPS of the gateway: the files it needs, looked at before anything is started."""

from __future__ import annotations

import errno
import re
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trivet.errors import TopologyError
from trivet.topology.model import Topology


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """What a worker serves HTTPS with."""

    certificate: str
    key: str | None = None
    key_password: str | None = None
    client_ca: str | None = None

    def for_uvicorn(self) -> dict[str, Any]:
        """As options of uvicorn's configuration."""
        return {
            "ssl_certfile": self.certificate,
            "ssl_keyfile": self.key,
            "ssl_keyfile_password": self.key_password,
            "ssl_ca_certs": self.client_ca,
            "ssl_cert_reqs": ssl.CERT_NONE if self.client_ca is None else ssl.CERT_REQUIRED,
        }


def tls_files(topology: Topology) -> TlsFiles | None:
    """The files that ``gateway.tls`` names, as a worker opens them; None without it.

    Raises:
        TopologyError: one of them is not there, cannot be read, or is not what it should be.
    """
    tls = topology.gateway.tls
    if tls is None:
        return None
    folder = topology.folder or Path()
    found = {
        name: None if (value := getattr(tls, name)) is None else str((folder / Path(value).expanduser()).absolute())
        for name in ("certificate", "key", "client_ca")
    }
    texts = {name: _read(topology, name, path) for name, path in found.items() if path is not None}
    for name in ("certificate", "client_ca"):
        if name in texts and b"CERTIFICATE-----" not in texts[name]:
            raise _error(topology, name, f"{found[name]} is no certificate in PEM", _CERTIFICATE)
    holder = "key" if "key" in texts else "certificate"
    if b"PRIVATE KEY-----" not in texts[holder]:
        raise _error(topology, holder, f"{found[holder]} has no private key in PEM", _KEY)
    certificate, key = found["certificate"], found["key"]
    assert certificate is not None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # with a password of nothing where none is given, or OpenSSL would ask for it on the terminal
        context.load_cert_chain(certificate, key, tls.key_password or "")
    except (ssl.SSLError, OSError, ValueError) as error:
        raise _unusable(topology, error, certificate, key, is_encrypted=b"ENCRYPTED" in texts[holder]) from None
    if (authority := found["client_ca"]) is not None:
        try:
            context.load_verify_locations(authority)
        except (ssl.SSLError, OSError) as error:
            problem = f"{authority} has no certificate that can be read ({_reason(error)})"
            raise _error(topology, "client_ca", problem, _CERTIFICATE) from None
    return TlsFiles(certificate, key, tls.key_password, found["client_ca"])


def trusting(certificate: Path) -> ssl.SSLContext:
    """For a client that trusts this certificate, whoever vouches for it and whatever host it names.

    Of a file with several, it is the first, which is the server's own: those behind it vouch for others as well.

    Raises:
        OSError: it cannot be read any more.
    """
    first = _FIRST.search(certificate.read_bytes())
    if first is None:  # with nothing given, whatever the system's authorities vouch for would be trusted
        raise OSError(errno.EINVAL, "no certificate in PEM")
    context = ssl.create_default_context(cadata=first[0].decode("ascii"))
    context.check_hostname = False  # nobody else has its key; it may not name 127.0.0.1
    context.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
    return context


_FIRST = re.compile(rb"-----BEGIN CERTIFICATE-----[A-Za-z0-9+/=\s]+-----END CERTIFICATE-----")
_CERTIFICATE = "give a PEM file: it has a line -----BEGIN CERTIFICATE-----"
_KEY = "give a PEM file as gateway.tls.key: it has a line -----BEGIN PRIVATE KEY-----, or one like it"


def _read(topology: Topology, name: str, path: str) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        mend = "give a PEM file that this user may read; relative paths count from the topology's folder"
        raise _error(topology, name, f"{path}: {error.strerror or error}", mend) from None


def _unusable(
    topology: Topology, error: Exception, certificate: str, key: str | None, *, is_encrypted: bool
) -> TopologyError:
    reason, keys = _reason(error), key or certificate
    if reason == "KEY_VALUES_MISMATCH":
        return _error(topology, "key", f"{keys} is not the key of {certificate}", "give the key that belongs to it")
    if is_encrypted:
        return _error(topology, "key_password", f"it does not open {keys}, which is encrypted", "give its password")
    problem = f"{certificate} and its key cannot be used by this OpenSSL ({reason})"
    return _error(topology, "certificate", problem, "make them anew, with RSA 2048 or EC P-256")


def _error(topology: Topology, name: str, problem: str, mend: str) -> TopologyError:
    return TopologyError(f"{topology.where('gateway', 'tls', name)}: gateway.tls.{name}: {problem}", mend=mend)


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
