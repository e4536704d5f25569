"""How far prefill's main thread may run ahead of its device."""

import pytest

from trivet.transfer.streams import Lead


class Event:
    def __init__(self, name, waited):
        self.name, self.waited = name, waited

    def synchronize(self):
        self.waited.append(self.name)


@pytest.mark.parametrize(
    ("most", "launched", "waited"),
    [
        (4, [1, 1, 1, 1], []),
        (4, [1] * 6, [0, 1]),
        (4, [2, 2, 2, 2], [0, 1]),
        (4, [3, 3, 3], [0, 1]),
        (4, [1, 4, 1], [0, 1]),
        (4, [9], []),  # a whole step in a CUDA graph: it is not waited for itself
        (4, [9, 9], [0]),
        (4, [1, 1, 9], [0, 1]),
        (0, [1, 1], [0]),
    ],
)
def test_no_more_than_so_many_layers_are_ahead(most, launched, waited):
    lead, found = Lead(most), []
    for name, layers in enumerate(launched):
        lead.launched(layers, Event(name, found))
        kept = launched[len(found) : name + 1]
        assert sum(kept) <= most or len(kept) == 1
    assert found == waited


def test_a_device_that_fails_is_waited_for_once():
    class Fails:
        def synchronize(self):
            raise RuntimeError("CUDA error: an illegal memory access")

    lead, found = Lead(1), []
    lead.launched(1, Fails())
    with pytest.raises(RuntimeError):
        lead.launched(1, Event("a", found))
    lead.launched(1, Event("b", found))
    assert found == ["a"]
