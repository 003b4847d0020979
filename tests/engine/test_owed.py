from __future__ import annotations

import numpy as np

from evap.engine.owed import SlotLedger
from evap.messages import META, NO_TOKEN, Finish, TokenBatch


def batch(*records: tuple[int, int, int, int]) -> TokenBatch:
    """(slot, generation, index, flags)"""
    columns = np.array(records, np.int32).T
    return TokenBatch(columns[0], columns[1], columns[0], columns[2], columns[3].astype(np.uint8))


def test_nothing_is_owed_at_first() -> None:
    assert SlotLedger().fail() is None


def test_what_was_opened_is_owed_until_its_final_record() -> None:
    ledger = SlotLedger()
    ledger.open(5, 2)
    ledger.open(6, 1)
    ledger.note(batch((5, 2, 0, META | NO_TOKEN), (5, 2, 0, 0), (6, 1, 0, Finish.STOP)))
    assert ledger.owes(5, 2)
    assert not ledger.owes(5, 1)
    assert not ledger.owes(6, 1)


def test_failing_settles_all_at_their_next_index_and_only_once() -> None:
    ledger = SlotLedger()
    for slot in (5, 6, 7):
        ledger.open(slot, 2)
    # Slot 5 has two records in one step; slot 6 none but META.
    ledger.note(batch((5, 2, 0, 0), (6, 2, 0, META | NO_TOKEN), (5, 2, 1, 0), (7, 2, 0, Finish.LENGTH)))
    failed = ledger.fail()
    assert failed is not None
    assert failed.slot.tolist() == [5, 6]
    assert failed.generation.tolist() == [2, 2]
    assert failed.index.tolist() == [2, 0]
    assert failed.flags.tolist() == [Finish.ERROR | NO_TOKEN] * 2
    assert ledger.fail() is None


def test_a_slot_starts_anew_with_its_next_generation() -> None:
    ledger = SlotLedger()
    ledger.open(5, 1)
    ledger.note(batch((5, 1, 8, Finish.STOP)))
    ledger.open(5, 2)
    failed = ledger.fail([5])
    assert failed is not None
    assert (failed.generation[0], failed.index[0]) == (2, 0)
