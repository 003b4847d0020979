"""The structs' defaults are sane together; single fields are held to their bounds in test_options."""

from __future__ import annotations

import dataclasses

import pytest

from evap.config import Config, opt


def test_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        Config().server.port = 1  # type: ignore[misc]


def test_a_mutable_default_is_refused() -> None:
    with pytest.raises(TypeError, match="immutable"):
        opt([], "help")


def test_defaults_fit_together() -> None:
    protocol = Config().protocol
    assert protocol.stream_window_bytes <= protocol.connection_window_bytes
    assert protocol.max_body_bytes <= protocol.max_buffered_body_bytes
    assert protocol.header_timeout_s <= protocol.body_timeout_s <= protocol.idle_timeout_s
