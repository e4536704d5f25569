"""What each option may be is tested in tests/connectors/test_options.py: engines and the launcher read them alike."""

import pytest

from trivet.transfer.settings import MIB, Settings


def test_without_options_an_engine_has_its_own_socket_and_the_defaults(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert Settings.of({}, "0123456789" * 5) == Settings(
        address=f"unix:/tmp/trivet/{('0123456789' * 5)[:36]}.sock",
        movers=(),
        staging_bytes=256 * MIB,
        piece_bytes=32 * MIB,
        lease_s=30,
        checksums=False,
    )


def test_no_address_is_as_good_as_none(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert Settings.of({"address": None}, "e").address == "unix:/tmp/trivet/e.sock"


def test_an_engines_id_names_a_file_whatever_is_in_it(monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    assert Settings.of({}, "a/../b").address == "unix:/tmp/trivet/a_.._b.sock"


def test_every_option_is_taken():
    options = {
        "address": "unix:/run/a.sock",
        "movers": ["shm"],
        "staging_mib": 9,
        "piece_mib": 2,
        "lease_s": 0.5,
        "checksums": True,
    }
    assert Settings.of(options, "e") == Settings("unix:/run/a.sock", ("shm",), 9 * MIB, 2 * MIB, 0.5, True)


def test_reading_options_leaves_them_as_they_were():
    options = {"address": "unix:/run/a.sock", "lease_s": 5}
    Settings.of(options, "e")
    assert options == {"address": "unix:/run/a.sock", "lease_s": 5}


def test_the_path_is_the_addresses_and_notices_have_their_own():
    settings = Settings.of({"address": "unix:/run/a.sock"}, "e")
    assert (settings.path, settings.notice_path) == ("/run/a.sock", "/run/a.sock.d")


@pytest.mark.parametrize("address", ["tcp:1.2.3.4:5", "/run/a.sock", "unix:", "", 5, ["unix:/a"], "unix:/" + "a" * 200])
def test_an_address_that_is_none_is_refused_in_one_line(address):
    with pytest.raises(ValueError, match=r"^TrivetConnector: .*unix:/") as error:
        Settings.of({"address": address}, "e")
    assert repr(address) in str(error.value)
    assert "\n" not in str(error.value)


def test_reading_options_makes_no_folder(monkeypatch, tmp_path):
    """The listener does, and checks it."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    Settings.of({}, "e")
    assert list(tmp_path.iterdir()) == []
