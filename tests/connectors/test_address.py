import pytest

from trivet.connectors.address import LONGEST_PATH_BYTES, LONGEST_SOCKET_PATH_BYTES, default_address, path_of


def test_an_address_is_unix_and_a_path():
    assert path_of("unix:/run/trivet/8101.sock") == "/run/trivet/8101.sock"


@pytest.mark.parametrize(
    "address",
    [
        "",
        "unix:",
        "unix:/",
        "unix:/run/",
        "unix:relative.sock",
        "unix:/a\0b",
        "unix:\0abstract",
        "UNIX:/a",
        "/run/a.sock",
        "tcp:1.2.3.4:5",
        "http://unix:/a",
        5,
        None,
        ["unix:/a"],
        b"unix:/a",
    ],
)
def test_what_is_none_is_told_with_the_form_that_one_has(address):
    with pytest.raises(ValueError, match="is no address: say unix:/PATH, as KV moves within one host") as error:
        path_of(address)
    assert repr(address) in str(error.value)
    assert "\n" not in str(error.value)


def test_the_longest_path_leaves_room_for_the_number_of_a_rank():
    fits = "unix:/" + "a" * (LONGEST_PATH_BYTES - 1)
    assert len(f"{path_of(fits)}.9999") == LONGEST_SOCKET_PATH_BYTES == 107
    with pytest.raises(ValueError, match=r"has 103 bytes; choose one of at most 102 .Unix sockets have 107"):
        path_of(fits + "a")


def test_a_paths_length_is_counted_in_bytes_as_the_kernel_does():
    with pytest.raises(ValueError, match="has 121 bytes"):
        path_of("unix:/" + "\u00e4" * 60)


@pytest.mark.parametrize("runtime", ["/run/user/" + "x" * 100, "relative", "/tmp"])
def test_an_engines_own_address_is_one(monkeypatch, runtime, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "relative").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", runtime)
    monkeypatch.setattr("tempfile.tempdir", "/" + "y" * 100)
    path_of(default_address("8101"))
