import os
import stat

import pytest

from trivet.transfer.settings import MIB, Settings, runtime_directory


def refused(**options):
    with pytest.raises(ValueError, match="TrivetConnector") as error:
        Settings.of(options, "engine")
    assert "\n" not in str(error.value)
    return str(error.value)


def test_without_options_an_engine_has_its_own_socket_and_the_defaults(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/tmp")
    settings = Settings.of({}, "0123456789" * 5)
    assert settings == Settings(
        address=f"unix:/tmp/trivet/{('0123456789' * 5)[:36]}.sock",
        movers=(),
        staging_bytes=256 * MIB,
        piece_bytes=32 * MIB,
        lease_s=30,
        checksums=False,
    )


def test_every_option_is_taken():
    options = {
        "address": "unix:/run/a.sock",
        "movers": ["shm"],
        "staging_mib": 9,
        "piece_mib": 1.5,
        "lease_s": 0.5,
        "checksums": True,
    }
    assert Settings.of(options, "e") == Settings("unix:/run/a.sock", ("shm",), 9 * MIB, 3 * MIB // 2, 0.5, True)


def test_the_path_is_the_addresses_and_notices_have_their_own():
    settings = Settings.of({"address": "unix:/run/a.sock"}, "e")
    assert (settings.path, settings.notice_path) == ("/run/a.sock", "/run/a.sock.d")


def test_an_unknown_option_is_refused_with_those_there_are():
    told = refused(stagingmib=3, peace_mib=4)
    assert "peace_mib, stagingmib" in told
    assert "staging_mib" in told


@pytest.mark.parametrize("address", ["tcp:1.2.3.4:5", "/run/a.sock", 5, ["unix:/a"]])
def test_an_address_of_another_form_is_refused(address):
    told = refused(address=address)
    assert repr(address) in told
    assert "unix:PATH" in told


def test_an_address_without_a_path_is_refused():
    assert "unix:" in refused(address="unix:")


def test_the_longest_path_leaves_room_for_the_ranks_number():
    fits = "unix:/" + "a" * 89
    assert Settings.of({"address": fits}, "e").address == fits
    assert "90" in refused(address=fits + "a")


def test_a_paths_length_is_counted_in_bytes_as_the_kernel_does():
    assert "90" in refused(address="unix:/" + "ä" * 60)


@pytest.mark.parametrize("movers", ["shm", [1], {"shm": 1}, 3])
def test_movers_that_are_no_list_of_names_are_refused(movers):
    assert "movers" in refused(movers=movers)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("staging_mib", 7.9),
        ("staging_mib", "64"),
        ("staging_mib", None),
        ("piece_mib", 0.5),
        ("piece_mib", True),
        ("lease_s", 0),
        ("lease_s", -1),
        ("lease_s", "3"),
        ("lease_s", float("nan")),
        ("piece_mib", float("nan")),
        ("staging_mib", float("inf")),
    ],
)
def test_a_number_that_is_none_or_too_small_is_refused_by_its_name(name, value):
    assert name in refused(**{name: value})


def test_staging_that_holds_no_two_pieces_is_refused():
    told = refused(staging_mib=60, piece_mib=31)
    assert "staging_mib" in told
    assert "piece_mib" in told


@pytest.mark.parametrize("value", ["false", "no", 2])
def test_checksums_that_are_no_truth_value_are_refused(value):
    assert "checksums" in refused(checksums=value)


@pytest.mark.parametrize("lies_in", ["runtime", "temporary"])
def test_the_runtime_directory_is_made_for_its_user_only(monkeypatch, tmp_path, lies_in):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path) if lies_in == "runtime" else str(tmp_path / "none"))
    path = runtime_directory()
    assert path == tmp_path / ("trivet" if lies_in == "runtime" else f"trivet-{os.getuid()}")
    assert stat.S_IMODE(path.stat().st_mode) == 0o700
    assert runtime_directory() == path
