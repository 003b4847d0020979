"""Names that nobody can choose or compute."""

from __future__ import annotations

from evap.identity import BATCH, Identity


def test_ids_are_never_the_same() -> None:
    one, other = Identity(), Identity()
    ids = [who.new_id() for who in (one, other) for _ in range(3 * BATCH)]
    assert len(set(ids)) == len(ids)
    assert {len(name) for name in ids} == {24}


def test_salts_are_a_keys_own_and_a_servers_own() -> None:
    one, other = Identity(), Identity()
    assert one.cache_salt("") == ""
    assert one.cache_salt("alice") == one.cache_salt("alice")
    assert len({one.cache_salt("alice"), one.cache_salt("bob"), other.cache_salt("alice")}) == 3
