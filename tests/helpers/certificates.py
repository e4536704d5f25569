"""Certificates that vouch for themselves, made by the ``openssl`` command."""

from __future__ import annotations

import subprocess
from pathlib import Path


def write_certificate(folder: Path, name: str = "own") -> tuple[Path, Path]:
    """A certificate and its key in PEM; it names no address of this machine."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            *kind,
            "-keyout",
            key,
            "-out",
            certificate,
            "-days",
            "2",
            "-subj",
            "/CN=gateway.test",
        ],
        check=True,
        capture_output=True,
    )
    return certificate, key


def write_signed(folder: Path, authority: tuple[Path, Path], name: str) -> tuple[Path, Path]:
    """A certificate that another one vouches for, with that one behind it in its file, and its key."""
    certificate, key = folder / f"{name}.pem", folder / f"{name}.key"
    kind = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    signed = ("-CA", authority[0], "-CAkey", authority[1], "-subj", f"/CN={name}.test", "-days", "2")
    plain = ("-addext", "basicConstraints=critical,CA:FALSE")
    command = ["openssl", "req", "-x509", *kind, "-keyout", key, "-out", certificate, *signed, *plain]
    subprocess.run(command, check=True, capture_output=True)
    certificate.write_text(certificate.read_text() + authority[0].read_text())
    return certificate, key
