import json
import os
import ssl
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from helpers.certificates import write_certificate
from helpers.engines import nobody_listens
from trivet.routing.proofs import Proof

ENGINES = [
    {
        "name": "prefill-0",
        "tier": "prefill",
        "url": "http://127.0.0.1:8100",
        "state": "ready",
        "ready": True,
        "restarts": 0,
        "problem": None,
        "load": {"running": 2.0, "waiting": 0.0, "kv_usage": 0.256},
    },
    {
        "name": "decode-0",
        "tier": "decode",
        "url": "http://127.0.0.1:8101",
        "state": "failed",
        "ready": False,
        "restarts": 3,
        "problem": "was ended by signal [9]",
        "load": None,
    },
]
STATUS = {"engines": ENGINES, "generations_running": 2}


class Gateway(ThreadingHTTPServer):
    """Gives one answer to everything."""

    daemon_threads = True

    def __init__(self) -> None:
        gateway = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                gateway.asked.append((self.path, self.headers["Authorization"]))
                self.send_response(gateway.status)
                self.send_header("content-type", gateway.content_type)
                self.send_header("content-length", str(len(gateway.body)))
                self.end_headers()
                self.wfile.write(gateway.body)

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.status = 200
        self.content_type = "application/json"
        self.body = json.dumps(STATUS).encode()
        self.asked: list[tuple[str, str | None]] = []
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    with Gateway() as gateway:
        thread = threading.Thread(target=gateway.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield gateway
        gateway.shutdown()
        thread.join()


def test_the_status_is_a_table(trivet, gateway):
    done = trivet("status", "--url", gateway.url)
    assert (done.status, done.err) == (0, "")
    first, header, *rows, problem = done.out.splitlines()
    assert first == f"gateway {gateway.url}: 2 generation(s) running"
    assert header.split() == ["tier", "engine", "state", "running", "waiting", "KV", "used", "restarts", "address"]
    assert [row.split() for row in rows] == [
        ["prefill", "prefill-0", "ready", "2", "0", "26%", "0", "http://127.0.0.1:8100"],
        ["decode", "decode-0", "failed", "-", "-", "-", "3", "http://127.0.0.1:8101"],
    ]
    assert problem == "decode-0: was ended by signal [9]"
    assert gateway.asked == [("/trivet/status", None)]


def test_the_status_is_json_for_programs(trivet, gateway):
    done = trivet("status", "--url", f"{gateway.url}/", "--json")
    assert json.loads(done.out) == STATUS
    assert gateway.asked == [("/trivet/status", None)]


def test_the_service_that_was_started_last_is_asked(trivet, gateway):
    trivet.state.mkdir()
    (trivet.state / "last.json").write_text(json.dumps({"pid": os.getpid(), "url": gateway.url}))
    assert trivet("status").out.startswith(f"gateway {gateway.url}: ")


@pytest.fixture
def https(gateway, tmp_path):
    """The gateway over HTTPS, with a certificate that nobody vouches for."""
    certificate, key = write_certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)
    gateway.socket = context.wrap_socket(gateway.socket, server_side=True)
    gateway.url = gateway.url.replace("http:", "https:")
    return certificate


def test_the_last_services_own_certificate_is_trusted(trivet, gateway, https):
    """It need not name 127.0.0.1, and nobody need vouch for it."""
    trivet.state.mkdir()
    known = {"pid": os.getpid(), "url": gateway.url, "certificate": str(https)}
    (trivet.state / "last.json").write_text(json.dumps(known))
    assert trivet("status").out.startswith(f"gateway {gateway.url}: ")


def test_another_gateways_certificate_can_be_given(trivet, gateway, https, tmp_path):
    assert trivet("status", "--url", gateway.url, "--certificate", str(https)).status == 0
    for more in ((), ("--certificate", str(write_certificate(tmp_path, "other")[0]))):
        done = trivet("status", "--url", gateway.url, *more)
        assert (done.status, done.err.count("\n")) == (1, 1)
        assert "shows a certificate that is not trusted here" in done.err
        assert "--certificate FILE" in done.err
    done = trivet("status", "--url", gateway.url, "--certificate", "/none.pem")
    assert (done.status, done.err.count("\n"), "/none.pem is no certificate" in done.err) == (1, 1, True)


def test_where_no_service_runs_a_person_is_told(trivet):
    done = trivet("status")
    assert (done.status, done.out) == (1, "")
    assert done.err == "trivet: no service runs here -> start one with `trivet up`, or give --url\n"


def test_a_problem_that_is_over_is_told_with_its_time(trivet, gateway):
    past = {"last_problem": "was ended by signal 9", "last_problem_at": "2026-11-30T13:08:11Z"}
    engines = [{**ENGINES[0], **past}, {**ENGINES[1], **past}]
    gateway.body = json.dumps({**STATUS, "engines": engines}).encode()
    assert trivet("status", "--url", gateway.url).out.splitlines()[-2:] == [
        "prefill-0: was ended by signal 9 (2026-11-30T13:08:11Z; it is over)",
        "decode-0: was ended by signal [9]",
    ]


SERVERS = [
    {"url": "http://10.0.0.1:9000", "state": "up", "problem": None, "requests_running": 3},
    {"url": "http://10.0.0.2:9000", "state": "other_ids", "problem": "makes [other] ids", "requests_running": 0},
]


def test_render_servers_are_a_table_of_their_own(trivet, gateway):
    gateway.body = json.dumps({**STATUS, "render_servers": SERVERS}).encode()
    done = trivet("status", "--url", gateway.url)
    assert (done.status, done.err) == (0, "")
    header, *rows = done.out.splitlines()[4:7]
    assert header.split("  ")[0].strip() == "render server"
    assert header.split()[-2:] == ["state", "running"]
    assert [row.split() for row in rows] == [
        ["http://10.0.0.1:9000", "up", "3"],
        ["http://10.0.0.2:9000", "other_ids", "0"],
    ]
    assert done.out.splitlines()[7:] == [
        "decode-0: was ended by signal [9]",
        "http://10.0.0.2:9000 makes [other] ids",
    ]


def test_of_several_workers_it_is_said_that_one_tells_what_runs_at_render_servers(trivet, gateway):
    workers = [{"worker": 0, "alive": True}, {"worker": 1, "alive": True}]
    gateway.body = json.dumps({**STATUS, "workers": workers, "render_servers": SERVERS}).encode()
    header = trivet("status", "--url", gateway.url).out.splitlines()[4]
    assert header.rstrip().endswith("running, of one worker")


def test_without_render_servers_nothing_is_said_of_them(trivet, gateway):
    assert "render" not in trivet("status", "--url", gateway.url).out


@pytest.mark.parametrize("proof", list(Proof), ids=lambda one: one.word)
def test_a_pair_that_is_not_used_is_told_with_the_cause(trivet, gateway, proof):
    pairs = [{"prefill": "prefill-0", "decode": "decode-0", "proof": proof.word}]
    gateway.body = json.dumps({**STATUS, "pairs": pairs}).encode()
    told = f"prefill-0 -> decode-0 is not used: its canary fails ({proof.word})"
    assert (told in trivet("status", "--url", gateway.url).out) is proof.is_bad


@pytest.mark.parametrize("how", ["option", "environment"])
def test_a_key_is_sent(trivet, gateway, monkeypatch, how):
    if how == "environment":
        monkeypatch.setenv("TRIVET_API_KEY", "secret")
        trivet("status", "--url", gateway.url)
    else:
        trivet("status", "--url", gateway.url, "--api-key", "secret")
    assert gateway.asked == [("/trivet/status", "Bearer secret")]


def refusal(trivet, url: str) -> str:
    done = trivet("status", "--url", url)
    assert (done.status, done.out) == (1, "")
    assert done.err.count("\n") == 1
    return done.err.rstrip("\n")


def test_a_key_that_is_missing_is_told(trivet, gateway):
    gateway.status = 401
    assert refusal(trivet, gateway.url) == f"trivet: {gateway.url} wants an API key -> --api-key KEY, or TRIVET_API_KEY"


@pytest.mark.parametrize("status", [404, 500])
def test_another_server_is_told(trivet, gateway, status):
    gateway.status = status
    assert refusal(trivet, gateway.url) == f"trivet: {gateway.url} answers HTTP {status} -> is it a Trivet gateway?"


@pytest.mark.parametrize("body", [b"[]", b"[1]", b"{}", b"null", b'"engines"'])
def test_a_server_that_answers_anything_is_told(trivet, gateway, body):
    gateway.body = body
    assert refusal(trivet, gateway.url) == (
        f"trivet: {gateway.url} answers with something else -> is it a Trivet gateway?"
    )


@pytest.mark.parametrize(("content_type", "body"), [("text/html", b"<h1>"), ("application/json", b"{")])
def test_a_server_that_speaks_no_json_is_told(trivet, gateway, content_type, body):
    gateway.content_type, gateway.body = content_type, body
    assert refusal(trivet, gateway.url).endswith("-> is `trivet up` running there?")


def test_an_address_where_nobody_answers_is_told(trivet):
    with nobody_listens() as url:
        assert refusal(trivet, url) == (
            f"trivet: {url} does not answer (ClientConnectorError) -> is `trivet up` running there?"
        )


@pytest.mark.parametrize("url", ["localhost:8000", "nonsense", "http://", "ftp://localhost", "http://a:99999"])
def test_what_is_no_url_is_told(trivet, url):
    assert refusal(trivet, url) == (
        f"trivet: {url!r} is no URL of a gateway -> write --url http://HOST:PORT, such as http://127.0.0.1:8000"
    )


def test_a_key_that_is_wrong_is_told(trivet, gateway):
    gateway.status = 401
    done = trivet("status", "--url", gateway.url, "--api-key", "wrong")
    assert (done.status, done.out) == (1, "")
    assert done.err == (
        f"trivet: {gateway.url} does not take this API key -> give one of its gateway.api_keys: --api-key KEY, or "
        "TRIVET_API_KEY\n"
    )


def test_lines_are_whole_where_nobody_looks_at_a_terminal(trivet, gateway):
    long = {**ENGINES[1], "name": "decode-" + "x" * 120, "url": "http://" + "y" * 120 + ":8101", "problem": "z " * 90}
    gateway.body = json.dumps({**STATUS, "engines": [ENGINES[0], long]}).encode()
    done = trivet.process("status", "--url", gateway.url, env={"COLUMNS": "40"})
    assert (done.status, done.err) == (0, "")
    lines = done.out.splitlines()
    assert len(lines) == 5
    assert lines[3].split() == ["decode", long["name"], "failed", "-", "-", "-", "3", long["url"]]
