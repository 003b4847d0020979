from __future__ import annotations

from evap.engine.torch.records import Records


def test_columns_stay_of_one_length() -> None:
    records = Records()
    assert len(records) == 0
    records.add(1, 2, 3, 4, 5)
    records.add(6, 7, 8, 9, 10)
    assert len(records) == 2
    assert (records.slot, records.generation, records.token) == ([1, 6], [2, 7], [3, 8])
    assert (records.index, records.flags, records.logprobs) == ([4, 9], [5, 10], [])
