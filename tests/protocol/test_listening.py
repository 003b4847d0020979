"""Where a server listens: files of UNIX sockets, and sockets that a service manager passes."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest

from evap.config import ServerConfig
from evap.errors import StartupError
from evap.protocol import listening


def test_a_unix_socket_has_its_mode_and_goes_at_the_end(tmp_path: Path) -> None:
    path = tmp_path / "evap.sock"
    made = listening.unix(str(path), "600")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert (made.unix, made.name) == (True, f"unix:{path}")
    made.close()
    assert not path.exists()


def test_a_file_that_is_not_ours_any_more_stays(tmp_path: Path) -> None:
    path = tmp_path / "evap.sock"
    first = listening.unix(str(path), "660")
    keep = tmp_path / "kept"
    path.rename(keep)  # so that its inode is not given out again
    second = listening.unix(str(path), "660")
    first.close()
    assert path.exists()
    second.close()
    assert not path.exists()


def test_the_socket_of_a_killed_server_is_replaced_and_a_live_one_is_not(tmp_path: Path) -> None:
    path = str(tmp_path / "evap.sock")
    with socket.socket(socket.AF_UNIX) as dead:
        dead.bind(path)
        dead.listen()
    made = listening.unix(path, "660")
    with pytest.raises(StartupError, match="another server listens on"):
        listening.unix(path, "660")
    made.close()


def test_a_file_that_is_no_socket_is_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes"
    path.write_text("mine")
    with pytest.raises(StartupError, match="is no socket"):
        listening.unix(str(path), "660")
    assert path.read_text() == "mine"


@pytest.mark.parametrize("mode", ["", "9", "888", "u=rw", "06600"])
def test_what_is_not_a_mode(mode: str, tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="is not a mode"):
        listening.unix(str(tmp_path / "s"), mode)


def test_a_path_that_cannot_be_bound(tmp_path: Path) -> None:
    with pytest.raises(StartupError, match="cannot listen on"):
        listening.unix(str(tmp_path / "missing" / "s"), "660")
    with pytest.raises(StartupError, match="cannot listen on"):
        listening.unix(str(tmp_path / ("long" * 40)), "660")


def test_both_at_once_tcp_first(tmp_path: Path) -> None:
    path = str(tmp_path / "s")
    made = listening.open_all(ServerConfig(port=0, uds=path))
    host, port, unix = listening.addresses(made)
    assert (host, unix) == ("127.0.0.1", (path,))
    assert made[0].name == f"127.0.0.1:{port}"
    listening.close_all(made)
    assert not os.path.exists(path)


def test_nothing_to_listen_on() -> None:
    with pytest.raises(StartupError, match="nothing to listen on"):
        listening.open_all(ServerConfig(host="none"))


def test_a_unix_socket_that_cannot_be_made_leaves_no_port_behind(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with pytest.raises(StartupError):
        listening.open_all(ServerConfig(port=port, uds=str(tmp_path)))
    again = listening.open_all(ServerConfig(port=port))
    listening.close_all(again)


# What a service manager passes; that it works as a whole is in tests/test_server.py


@pytest.mark.parametrize(
    "environ", [{}, {"LISTEN_FDS": "1"}, {"LISTEN_PID": "7", "LISTEN_FDS": "1"}, {"LISTEN_PID": "8", "LISTEN_FDS": "x"}]
)
def test_what_was_passed_to_somebody_else_is_not_taken(environ: dict[str, str]) -> None:
    assert listening.passed(environ, 8) == []
    assert environ == {}


def test_only_listening_stream_sockets_are_taken() -> None:
    with socket.socket() as deaf:
        fd = os.dup(deaf.fileno())
        with pytest.raises(StartupError, match="no listening stream socket"):
            listening.take(fd)
    reading, writing = os.pipe()
    with pytest.raises(StartupError, match="is no socket"):
        listening.take(reading)
    for end in (reading, writing):
        os.close(end)
