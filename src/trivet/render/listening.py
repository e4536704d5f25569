"""How a render server listens: vLLM's flags for its own HTTP server, and which of them cannot be had."""

from __future__ import annotations

import contextlib
import ssl
from argparse import Namespace
from collections.abc import Iterator, Sequence
from os import environ
from pathlib import Path
from typing import Any

import uvicorn
from vllm import envs
from vllm.entrypoints.launchers.utils.constants import (
    H11_MAX_HEADER_COUNT_DEFAULT,
    H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT,
)
from vllm.entrypoints.launchers.utils.server_utils import get_uvicorn_log_config
from vllm.entrypoints.launchers.utils.ssl import SSLCertRefresher

from trivet.errors import TrivetError

DEFAULTS: Sequence[str] = ("--uvicorn-log-level", "warning")
"""Flags that hold unless others follow: vLLM logs each request."""
_KEEP_ALIVE = "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"
_KEEP_ALIVE_S = 75
"""Unless that is set. vLLM's 5 s are less than clients and proxies keep connections for."""
_LOGS_ACCESS = ("info", "debug", "trace")
_FILES = ("ssl_keyfile", "ssl_certfile", "ssl_ca_certs")


def refuse_others(args: Namespace) -> None:
    """Looks at the flags of a server that vLLM would start.

    Raises:
        TrivetError: one that cannot be had here, or files for TLS that cannot be used.
    """
    for is_given, flag, why, mend in (
        (args.uds, "--uds", "a render server listens on a port, and not on a Unix socket", "leave it out"),
        (args.headless, "--headless", "a render server has nobody else who listens", "leave it out"),
        (args.grpc, "--grpc", "a render server speaks HTTP", "leave it out"),
        (
            (args.api_server_count or 1) > 1,
            "--api-server-count",
            "a render server is one process",
            "start several, each with a --port of its own",
        ),
        *(
            (getattr(args, name) != default, f"--{name.replace('_', '-')}", _NO_H11, "leave it out")
            for name, default in (
                ("h11_max_incomplete_event_size", H11_MAX_INCOMPLETE_EVENT_SIZE_DEFAULT),
                ("h11_max_header_count", H11_MAX_HEADER_COUNT_DEFAULT),
            )
        ),
    ):
        if is_given:
            raise TrivetError(f"{flag}: {why}", mend=mend)
    _look_at_tls(args)


_NO_H11 = "requests are read by httptools here, not by h11 (and by vLLM's server too, where httptools is installed)"


def config_of(app: Any, args: Namespace) -> uvicorn.Config:
    """Of the server, loaded.

    Raises:
        TrivetError: settings that cannot be.
    """
    logs_access = args.uvicorn_log_level in _LOGS_ACCESS and not args.disable_uvicorn_access_log
    more: dict[str, Any] = {"ssl_ciphers": args.ssl_ciphers} if args.ssl_ciphers else {}
    if (logs := get_uvicorn_log_config(args)) is not None:
        more["log_config"] = logs
    try:
        config = uvicorn.Config(
            app,
            http="httptools",
            log_level=args.uvicorn_log_level,
            access_log=logs_access,
            proxy_headers=False,
            server_header=False,
            timeout_keep_alive=envs.VLLM_HTTP_TIMEOUT_KEEP_ALIVE if _KEEP_ALIVE in environ else _KEEP_ALIVE_S,
            ssl_keyfile=args.ssl_keyfile,
            ssl_certfile=args.ssl_certfile,
            ssl_ca_certs=args.ssl_ca_certs,
            ssl_cert_reqs=args.ssl_cert_reqs,
            **more,
        )
        config.load()
    except (OSError, ValueError) as error:
        raise TrivetError(
            f"the server cannot be set up: {error}",
            mend=f"look at {_KEEP_ALIVE}, the --ssl flags and --log-config-file",
        ) from error
    return config


@contextlib.contextmanager
def refreshed(config: uvicorn.Config, args: Namespace) -> Iterator[None]:
    """Inside, certificates are read again when their files change, if ``--enable-ssl-refresh`` is given."""
    if not args.enable_ssl_refresh or config.ssl is None:
        yield
        return
    refresher = SSLCertRefresher(config.ssl, config.ssl_keyfile, config.ssl_certfile, config.ssl_ca_certs)
    try:
        yield
    finally:
        refresher.stop()


def _look_at_tls(args: Namespace) -> None:
    certificate, key, authority = args.ssl_certfile, args.ssl_keyfile, args.ssl_ca_certs
    for name in _FILES:
        if file := getattr(args, name):
            _look_at_file(f"--{name.replace('_', '-')}", file)
    if not certificate:
        for flag, value in (
            ("--ssl-keyfile", key),
            ("--ssl-ca-certs", authority),
            ("--enable-ssl-refresh", args.enable_ssl_refresh),
        ):
            if value:
                raise TrivetError(f"{flag} means nothing without a certificate", mend="give one with --ssl-certfile")
        return
    if args.enable_ssl_refresh and not key:
        raise TrivetError(
            "--enable-ssl-refresh: vLLM watches a certificate and its key by both names",
            mend="give --ssl-keyfile too, be it the same file",
        )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        context.load_cert_chain(certificate, key, "")  # or OpenSSL would ask for a password on the terminal
    except (ssl.SSLError, OSError, ValueError) as error:
        raise _unusable(certificate, key or certificate, error) from None
    if authority:
        try:
            context.load_verify_locations(authority)
        except (ssl.SSLError, OSError) as error:
            raise TrivetError(
                f"--ssl-ca-certs: {authority} has no certificate that can be read ({_reason(error)})", mend=_PEM
            ) from None
    if args.ssl_ciphers:
        try:
            context.set_ciphers(args.ssl_ciphers)
        except ssl.SSLError as error:
            raise TrivetError(
                f"--ssl-ciphers: {args.ssl_ciphers}: {_reason(error)}", mend="`openssl ciphers` lists their names"
            ) from None


_PEM = "give a PEM file: it has a line -----BEGIN CERTIFICATE-----"


def _look_at_file(flag: str, file: str) -> None:
    try:
        Path(file).read_bytes()
    except OSError as error:
        raise TrivetError(f"{flag}: {file}: {error.strerror}", mend="give a PEM file that this user may read") from None


def _unusable(certificate: str, key: str, error: Exception) -> TrivetError:
    reason = _reason(error)
    if reason == "KEY_VALUES_MISMATCH":
        return TrivetError(
            f"--ssl-keyfile: {key} is not the key of {certificate}", mend="give the key that belongs to it"
        )
    if b"CERTIFICATE-----" not in Path(certificate).read_bytes():
        return TrivetError(f"--ssl-certfile: {certificate} is no certificate in PEM", mend=_PEM)
    held = Path(key).read_bytes()
    if b"ENCRYPTED" in held:
        return TrivetError(
            f"--ssl-keyfile: {key} is encrypted, and vLLM has no flag for its password",
            mend="give one that is not (openssl pkey -in KEY -out NEW)",
        )
    if b"PRIVATE KEY-----" not in held:
        return TrivetError(
            f"--ssl-keyfile: {key} has no private key in PEM",
            mend="give a PEM file: it has a line -----BEGIN PRIVATE KEY-----, or one like it",
        )
    return TrivetError(f"{certificate} and its key cannot be used by this OpenSSL ({reason})", mend="make them anew")


def _reason(error: Exception) -> str:
    return str(getattr(error, "reason", None) or getattr(error, "strerror", None) or error)
