"""Signals to a server of several processes: all of them drain, reload and end together."""

from __future__ import annotations

import signal
import ssl
from pathlib import Path

import psutil

from evap.metering import keys
from evap.protocol.tls import self_signed
from tests.clients.asking import eventually, said, text_of
from tests.listeners import tree
from tests.many import StartServer, ask, key_file, loops, numbers, records, streams
from tests.support import STOP_TIMEOUT_S, Server


def test_sigterm_with_fifty_streams_over_four_processes(start_server: StartServer) -> None:
    """Cases 90 and 75: all of them finish."""
    server = start_server("--workers", "4", "--synthetic-step-ms", "20")
    life = streams(server, 50, 80)
    next(life)
    server.process.send_signal(signal.SIGTERM)
    assert [text_of(answer) for answer in next(life)] == [said(f"s{n}", 80) for n in range(50)]
    assert server.process.wait(STOP_TIMEOUT_S) == 0


def test_at_the_deadline_all_get_an_error_event(start_server: StartServer) -> None:
    server = start_server("--workers", "3", "--synthetic-step-ms", "20", "--drain-timeout-s", "0.2")
    life = streams(server, 12, 100_000, ignore_eos=True)
    next(life)
    server.process.send_signal(signal.SIGTERM)
    for answer in next(life):
        assert b'"draining"' in answer
        assert answer.endswith(b"data: [DONE]\n\n")
    assert server.process.wait(STOP_TIMEOUT_S) == 0


def test_a_service_manager_that_signals_every_process_drains_like_any_other(start_server: StartServer) -> None:
    server = start_server("--workers", "2", "--synthetic-step-ms", "20")
    life = streams(server, 6, 40)
    next(life)
    for pid in tree(server.process.pid)[::-1]:
        psutil.Process(pid).send_signal(signal.SIGTERM)
    assert [text_of(answer) for answer in next(life)] == [said(f"s{n}", 40) for n in range(6)]
    assert server.process.wait(STOP_TIMEOUT_S) == 0


def test_a_second_signal_does_not_wait(start_server: StartServer) -> None:
    server = start_server("--workers", "2", "--synthetic-step-ms", "20", "--drain-timeout-s", str(10 * STOP_TIMEOUT_S))
    life = streams(server, 2, 100_000, ignore_eos=True)
    next(life)
    server.process.send_signal(signal.SIGTERM)
    server.wait_log("draining")
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(STOP_TIMEOUT_S) == 1
    next(life)


def test_sighup_reaches_all_and_drops_nothing(start_server: StartServer, tmp_path: Path) -> None:
    path, secret = key_file(tmp_path)
    server = start_server("--workers", "3", "--synthetic-step-ms", "20", "--api-keys", path)
    life = streams(server, 9, 60, secret)
    next(life)
    other = keys.create(Path(path), "bob", {"max_streams": 1})
    assert ask(server, "w", 1, other).status_code == 401
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: server.log.count("2 keys read from") == 3, "all have read the file")
    assert [ask(server, "w", 1, other).status_code for _ in range(9)] == [200] * 9
    assert [text_of(answer) for answer in next(life)] == [said(f"s{n}", 60) for n in range(9)]


def test_a_process_that_cannot_start_again_ends_nobody_else(start_server: StartServer, tmp_path: Path) -> None:
    """A key file that SIGHUP has refused meets a process that dies later: the others go on with what they know."""
    path, secret = key_file(tmp_path)
    server = start_server("--workers", "2", "--api-keys", path)
    good = Path(path).read_text()
    Path(path).write_text(good + "[keys.")
    loops(server)[0].kill()
    eventually(lambda: server.log.count("ended: exit status 2") > 0, "one has read the file")
    assert [ask(server, "w", 1, secret).status_code for _ in range(4)] == [200] * 4
    Path(path).write_text(good)
    eventually(lambda: numbers(server, secret)["evap_loop_processes"] == 2, "both are up again")
    assert server.process.poll() is None


def test_without_a_parent_they_end_and_hold_the_directory_until_then(start_server: StartServer, tmp_path: Path) -> None:
    """kill -9 of the parent: what runs is finished, nothing is left behind, and the next start waits its turn."""
    flags = ("--workers", "2", "--synthetic-step-ms", "20", "--data-dir", str(tmp_path))
    server = Server("--engine", "synthetic", "--port", "0", *flags)
    try:
        server.wait_ready()
        life = streams(server, 4, 100)
        next(life)
        left = tree(server.process.pid)[1:]
        server.process.kill()
        too_soon = Server("--engine", "synthetic", "--port", "0", *flags)
        assert too_soon.process.wait(STOP_TIMEOUT_S) == 2
        assert "another server uses" in too_soon.log
        too_soon.kill()
        assert [text_of(answer) for answer in next(life)] == [said(f"s{n}", 100) for n in range(4)]
        eventually(lambda: not any(psutil.pid_exists(pid) for pid in left), "all have ended", STOP_TIMEOUT_S)
    finally:
        server.kill()
    start_server(*flags)
    assert [(r.end, r.delivered) for r in records(tmp_path)] == [("length", 100)] * 4


def test_sighup_gives_every_process_the_new_certificate(start_server: StartServer, tmp_path: Path) -> None:
    certificate, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def renew() -> None:
        pem, private = self_signed("localhost")
        certificate.write_bytes(pem)
        key.write_bytes(private)

    def shown() -> set[str]:
        return {ssl.get_server_certificate(("127.0.0.1", server.port)) for _ in range(12)}

    renew()
    server = start_server("--workers", "2", "--tls-cert", str(certificate), "--tls-key", str(key))
    old = shown()
    renew()
    server.process.send_signal(signal.SIGHUP)
    eventually(lambda: server.log.count("certificate in force") == 2, "both have read it")
    new = shown()
    assert len(old) == len(new) == 1
    assert old != new
