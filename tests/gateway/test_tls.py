"""HTTPS: files that cannot be used are told in one line; those that can serve it."""

import asyncio
import contextlib
import socket
import ssl
import subprocess
from pathlib import Path

import aiohttp
import pytest
import uvicorn

from helpers.certificates import write_certificate, write_signed
from trivet.errors import TopologyError
from trivet.gateway.tls import TlsFiles, tls_files, trusting
from trivet.surface.http import answer
from trivet.topology import load_topology


@pytest.fixture(scope="module")
def files(tmp_path_factory) -> Path:
    """Certificates and keys, made by the ``openssl`` command."""
    folder = tmp_path_factory.mktemp("tls")

    for name in ("own", "other"):
        write_certificate(folder, name)
    lock = ("openssl", "ec", "-in", "own.key", "-aes256", "-passout", "pass:secret", "-out", "locked.key")
    subprocess.run(lock, cwd=folder, check=True, capture_output=True)
    (folder / "both.pem").write_text((folder / "own.pem").read_text() + (folder / "own.key").read_text())
    (folder / "words.pem").write_text("hello\n")
    (folder / "broken.pem").write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    return folder


def topology(folder: Path, **tls: str):
    path = folder / "trivet.yaml"
    lines = "".join(f"    {name}: {value}\n" for name, value in tls.items())
    path.write_text("tiers:\n  mixed:\ngateway:\n  port: 0\n" + (f"  tls:\n{lines}" if tls else ""))
    return load_topology(path)


def test_without_a_certificate_there_is_none(files):
    assert tls_files(topology(files)) is None


def test_files_lie_beside_the_topology(files):
    found = tls_files(topology(files, certificate="own.pem", key="own.key", client_ca="other.pem"))
    assert found == TlsFiles(str(files / "own.pem"), str(files / "own.key"), None, str(files / "other.pem"))


@pytest.mark.parametrize(
    "tls",
    [
        {"certificate": "both.pem"},
        {"certificate": "own.pem", "key": "locked.key", "key_password": "secret"},
    ],
)
def test_a_key_may_stand_with_the_certificate_or_be_locked(files, tls):
    assert tls_files(topology(files, **tls)) is not None


@pytest.mark.parametrize(
    ("tls", "problem"),
    [
        ({"certificate": "none.pem"}, "gateway.tls.certificate: {0}/none.pem: No such file or directory"),
        ({"certificate": "own.pem", "key": "none.key"}, "gateway.tls.key: {0}/none.key: No such file or directory"),
        ({"certificate": "."}, "gateway.tls.certificate: {0}: Is a directory"),
        ({"certificate": "words.pem", "key": "own.key"}, "{0}/words.pem is no certificate in PEM"),
        ({"certificate": "own.pem"}, "gateway.tls.certificate: {0}/own.pem has no private key in PEM"),
        ({"certificate": "own.pem", "key": "words.pem"}, "gateway.tls.key: {0}/words.pem has no private key in PEM"),
        ({"certificate": "own.pem", "key": "other.key"}, "{0}/other.key is not the key of {0}/own.pem"),
        ({"certificate": "own.pem", "key": "locked.key"}, "it does not open {0}/locked.key, which is encrypted"),
        (
            {"certificate": "own.pem", "key": "locked.key", "key_password": "other"},
            "gateway.tls.key_password: it does not open {0}/locked.key, which is encrypted",
        ),
        ({"certificate": "broken.pem", "key": "own.key"}, "{0}/broken.pem and its key cannot be used"),
        ({"certificate": "both.pem", "client_ca": "own.key"}, "gateway.tls.client_ca: {0}/own.key is no certificate"),
        ({"certificate": "both.pem", "client_ca": "broken.pem"}, "{0}/broken.pem has no certificate that can be read"),
    ],
)
def test_what_cannot_be_used_is_one_clear_line(files, tls, problem):
    with pytest.raises(TopologyError) as caught:
        tls_files(topology(files, **tls))
    assert problem.format(files) in caught.value.problem
    assert str(caught.value).startswith(f"{files}/trivet.yaml:")
    assert caught.value.mend
    assert "\n" not in str(caught.value)


@contextlib.asynccontextmanager
async def served(found: TlsFiles):
    """An application as a worker serves it."""

    async def app(scope, receive, send) -> None:
        await answer(send, 200, scope["scheme"].encode(), b"text/plain")

    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_level="critical", **found.for_uvicorn()))
        server.capture_signals = contextlib.nullcontext
        serving = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            assert not serving.done(), serving.exception()
            await asyncio.sleep(0.005)
        try:
            yield f"https://127.0.0.1:{listener.getsockname()[1]}/"
        finally:
            server.should_exit = True
            await serving


async def test_https_is_served_and_its_certificate_can_be_trusted_alone(files):
    found = tls_files(topology(files, certificate="own.pem", key="own.key"))
    async with served(found) as url, aiohttp.ClientSession() as client:
        async with client.get(url, ssl=trusting(files / "own.pem")) as reply:
            assert (reply.status, await reply.text()) == (200, "https")
        for context in (trusting(files / "other.pem"), ssl.create_default_context()):
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await client.get(url, ssl=context)


async def test_another_certificate_of_the_same_authority_is_not_trusted(tmp_path):
    authority = write_certificate(tmp_path, "authority")
    for name in ("mine", "others"):
        write_signed(tmp_path, authority, name)
    known = trusting(tmp_path / "mine.pem")
    async with aiohttp.ClientSession() as client:
        async with (
            served(tls_files(topology(tmp_path, certificate="mine.pem", key="mine.key"))) as url,
            client.get(url, ssl=known) as reply,
        ):
            assert reply.status == 200
        async with served(tls_files(topology(tmp_path, certificate="others.pem", key="others.key"))) as url:
            with pytest.raises(aiohttp.ClientConnectorCertificateError):
                await client.get(url, ssl=known)


@pytest.mark.parametrize("name", ["words.pem", "broken.pem", "none.pem", "own.key"])
def test_a_file_without_a_certificate_makes_nobody_trusted(files, name):
    with pytest.raises(OSError, match=r"\w"):
        trusting(files / name)


async def test_clients_may_have_to_show_a_certificate(files):
    found = tls_files(topology(files, certificate="own.pem", key="own.key", client_ca="other.pem"))
    async with served(found) as url, aiohttp.ClientSession() as client:
        with pytest.raises((aiohttp.ClientError, ssl.SSLError, OSError)):
            async with client.get(url, ssl=trusting(files / "own.pem")) as reply:
                await reply.read()
        known = trusting(files / "own.pem")
        known.load_cert_chain(files / "other.pem", files / "other.key")
        async with client.get(url, ssl=known) as reply:
            assert reply.status == 200
