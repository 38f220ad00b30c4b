"""The row table and its two doors."""

import threading

import numpy as np
import pytest
import torch

from slipstream.contracts.request import EngineRequest
from slipstream.contracts.sampling_params import SamplingParams
from slipstream.contracts.step import Admission
from slipstream.kernels.scatter import CHUNK, Room
from slipstream.rows.columns import Column
from slipstream.rows.doors import InDoor, OutDoor, PackedWrites, Ring
from slipstream.rows.stream import CpuStream
from slipstream.rows.table import RowTable

SOME = Room(100, 10, 1000)
EXTRA = (Column("heat", "f32", default=0.5), Column("picks", width=6), Column("weights", "f32", width=3))


def make_table() -> RowTable:
    return RowTable(
        max_num_seqs=4,
        max_model_len=20,
        block_size=4,
        device=torch.device("cpu"),
        columns=EXTRA,
        features=("heat",),
    )


def make_admission(row: int, tokens: list[int], prompt_len: int, **params: object) -> Admission:
    request = EngineRequest(
        key=7,
        prompt_token_ids=np.array(tokens[:prompt_len], np.int32),
        params=SamplingParams(**params),
        seed=0xFEDCBA9876543210,
        end_token_ids=(2, 9),
        max_len=15,
    )
    return Admission(row, 3, request, np.array(tokens, np.int32), 4, np.array([5, 6], np.int32))


def test_admission_overwrites_every_scalar_that_the_last_owner_left():
    table = make_table()
    table.arena.fill_(123456)
    writer = table.admit(make_admission(2, [11, 12, 13, 14, 15], 5, min_tokens=3))
    writer.commit()
    table.flush().apply(table.arena)
    got = {name: view[2].item() for name, view in table.columns.items() if view.dim() == 1}
    assert got == {
        "alive": 1,
        "generation": 3,
        "length": 5,
        "num_computed": 4,
        "draft_count": 0,
        "prompt_len": 5,
        "min_len": 8,
        "max_len": 15,
        "seed_lo": 0x76543210,
        "seed_hi": 0xFEDCBA98 - (1 << 32),
        "features": 0,
        "heat": 0.5,
    }
    assert table.columns["tokens"][2, :5].tolist() == [11, 12, 13, 14, 15]
    assert table.columns["blocks"][2, :2].tolist() == [5, 6]
    assert table.columns["end_ids"][2].tolist() == [2, 9] + [-1] * 62


def test_a_write_to_one_row_leaves_all_other_rows_as_they_were():
    table = make_table()
    table.arena.copy_(torch.arange(len(table.arena), dtype=torch.int32))
    before = {name: view.clone() for name, view in table.columns.items()}
    writer = table.admit(make_admission(1, [3, 4], 2))
    writer.span("weights", np.array([0.25, -1.5], np.float32), start=1)
    writer.commit()
    table.flush().apply(table.arena)
    for name, view in table.columns.items():
        for row in (0, 2, 3, 4):
            assert torch.equal(view[row].view(torch.int32), before[name][row].view(torch.int32)), (name, row)
    assert table.columns["weights"][1, 1:].tolist() == [0.25, -1.5]


def test_columns_do_not_overlap():
    table = make_table()
    views = {**table.columns, **table.lanes}
    for number, view in enumerate(views.values()):
        view.view(torch.int32).fill_(number)
    for number, (name, view) in enumerate(views.items()):
        assert (view.view(torch.int32) == number).all(), name
    assert sum(view.numel() for view in views.values()) == table.arena.numel()


def test_grants_and_releases_are_single_words():
    table = make_table()
    table.columns["alive"].fill_(1)
    table.grant(np.array([0, 3], np.int32), np.array([1, 4], np.int32), np.array([8, 9], np.int32))
    table.release(np.array([3, 1], np.int32))
    table.flush().apply(table.arena)
    blocks = torch.zeros(5, 5, dtype=torch.int32)
    blocks[0, 1], blocks[3, 4] = 8, 9
    assert torch.equal(table.columns["blocks"], blocks)
    assert table.columns["alive"].tolist() == [1, 0, 1, 0, 1]


def test_a_list_that_is_too_long_for_its_column_is_caught():
    writer = make_table().admit(make_admission(1, [3, 4], 2))
    with pytest.raises(AssertionError, match="picks"):
        writer.span("picks", np.arange(4), start=3)


@pytest.mark.parametrize("seed", range(5))
def test_scatter_puts_words_and_spans_in_their_places_and_nothing_else(seed):
    rng = np.random.default_rng(seed)
    size = 5 * CHUNK
    arena = torch.from_numpy(rng.integers(-9, 9, size).astype(np.int32))
    expected, writes = arena.numpy().copy(), PackedWrites(Room(300, 9, 3 * CHUNK), pinned=False)
    for spans in ((CHUNK + 7, 1, CHUNK), (), (3, 2 * CHUNK)):
        writes.clear()
        free = rng.permutation(np.arange(4 * CHUNK, size))
        start = 0
        for length in spans:
            values = rng.integers(100, 1000, length).astype(np.int32)
            assert writes.add_span(start, values)
            expected[start : start + length] = values
            start += length + 5
        for count in (40, 1, 17):
            places, free = free[:count], free[count:]
            values = rng.integers(100, 1000, count).astype(np.int32)
            assert writes.add_cells(places, values)
            expected[places] = values
        writes.seal()
        writes.scatter(arena)
        assert arena.tolist() == expected.tolist()


def test_a_packed_buffer_takes_what_fits_and_nothing_else():
    writes = PackedWrites(Room(3, 3, 2 * CHUNK), pinned=False)
    arena = torch.zeros(3 * CHUNK, dtype=torch.int32)

    def span(length, dst=0):
        return writes.add_span(dst, np.ones(length, np.int32))

    def cells(count):
        return writes.add_cells(np.arange(count), np.ones(count, np.int32))

    assert not span(2 * CHUNK + 1) and not cells(4)
    assert span(CHUNK + 1) and not span(CHUNK, 9), "there are words for less"
    assert span(1, CHUNK + 1) and not span(1, 9), "there are three chunks"
    assert cells(2) and not cells(2) and cells(1)
    writes.scatter(arena)
    assert not arena.any(), "not sealed"
    writes.seal()
    writes.scatter(arena)
    assert arena.tolist() == [1] * (CHUNK + 2) + [0] * (2 * CHUNK - 2)
    writes.clear()
    assert span(2 * CHUNK) and cells(3)


def test_a_staging_buffer_is_not_reused_before_its_last_reader_is_done():
    """The stream is held back while more flushes come than there are buffers; every one must arrive
    unharmed."""
    door, stream = InDoor(2, False, SOME), CpuStream()
    arena = torch.zeros(64, dtype=torch.int32)
    gate = threading.Event()
    stream.submit(gate.wait)
    seen, finished = [], threading.Event()

    def produce() -> None:
        for value in range(1, 9):
            door.span(0, np.full(64, value, np.int32))
            writes = door.flush()
            writes.done_by(stream.submit(lambda w=writes: (w.apply(arena), seen.append(arena.clone()))))
        finished.set()

    threading.Thread(target=produce, daemon=True).start()
    assert not finished.wait(0.2), "the third flush had no free buffer and must wait"
    gate.set()
    assert finished.wait(10)
    stream.close()
    assert [t.unique().tolist() for t in seen] == [[value] for value in range(1, 9)]


def test_what_a_buffer_cannot_hold_goes_into_another_for_once(monkeypatch):
    door, arena, made = InDoor(1, False, Room(2, 2, 8)), torch.zeros(100, dtype=torch.int32), []
    make = PackedWrites.__init__
    monkeypatch.setattr(PackedWrites, "__init__", lambda *args: (made.append(args[1]), make(*args))[1])
    for turn, many in enumerate((True, False, True)):
        base = 100 * turn
        door.span(10, np.arange(base, base + 3, dtype=np.int32))
        if many:
            door.span(13, np.arange(base + 3, base + 50, dtype=np.int32))
        door.cells(np.array([0, 99]), np.array([base, base + 8], np.int32))
        door.flush().apply(arena)
        length = 50 if many else 3
        assert arena[10 : 10 + length].tolist() == list(range(base, base + length))
        assert (arena[0], arena[99]) == (base, base + 8)
    assert made == [Room(2, 2, 47)] * 2, "and none for what fits"
    assert [len(buffers) for buffers in door._ring.items] == [2], "the last one's, until its slot is taken"


def test_a_write_that_finds_no_memory_leaves_the_door_as_it_was(monkeypatch):
    door, arena = InDoor(2, False, Room(2, 2, 8)), torch.zeros(100, dtype=torch.int32)
    door.span(0, np.array([1, 2], np.int32))

    def fail(*_):
        raise MemoryError("pinned memory")

    with monkeypatch.context() as patch:
        patch.setattr(PackedWrites, "__init__", fail)
        with pytest.raises(MemoryError):
            door.span(10, np.ones(50, np.int32))
    door.cells(np.array([5]), np.array([3], np.int32))
    door.flush().apply(arena)
    assert arena[:6].tolist() == [1, 2, 0, 0, 0, 3] and not arena[6:].any()


def test_writes_replay_what_was_captured_of_their_buffer():
    door, arena, replayed = InDoor(2, False, Room(4, 1, 4)), torch.zeros(20, dtype=torch.int32), []
    door.launch(arena)
    assert not arena.any()

    def capture(launch):
        number = len(captured)
        captured.append(launch)
        return lambda: (replayed.append(number), captured[number]())

    captured = []
    door.capture(arena, capture)
    for turn, values in enumerate(([1, 2], [3, 4, 5], [6], [7] * 9, [8], [9])):
        door.span(turn, np.array(values, np.int32))
        writes = door.flush()
        writes.apply(arena)
        assert arena[turn : turn + len(values)].tolist() == values
        # The fourth was too many for a buffer: nobody has captured the one beside it.
        assert writes.replay() is (turn != 3)
    assert replayed == [0, 0, 1, 1, 0, 0, 0, 0, 1, 1], "by apply and by the test"


def test_a_ring_hands_out_its_items_in_turn_after_their_tickets():
    ring = Ring(lambda: object(), 2)
    waited = []

    class Ticket:
        def __init__(self, name):
            self.name = name

        def wait(self):
            waited.append(self.name)

    first, _ = ring.take()
    ring.give_ticket(first, Ticket("first"))
    second, _ = ring.take()
    ring.give_ticket(second, Ticket("second"))
    assert waited == []
    ring.take()
    assert waited == ["first"]


def test_doors_begin_anew_after_a_step_that_failed():
    class Failed:
        def wait(self):
            raise MemoryError("a step of before")

    door = InDoor(3, False, SOME)
    with torch.inference_mode():  # as the runner is built
        out = OutDoor(2, 4, torch.device("cpu"))
    for _ in range(2):
        door.span(0, np.arange(3, dtype=np.int32))
        door.flush().done_by(Failed())
        out.ring.give_ticket(out.ring.take()[0], Failed())
    door.span(0, np.arange(3, dtype=np.int32))
    door.reset()
    out.reset()
    assert door.flush() is None, "what was staged for the rows of before"
    for slot in range(3):  # in turn from the first, and waiting for no step of before
        door.span(0, np.arange(3, dtype=np.int32))
        assert door.flush().slot == slot
    assert out.ring.take()[0] == 0


def test_the_cpu_stream_runs_in_order_and_carries_errors_to_the_waiter():
    stream, order = CpuStream(), []
    events = [stream.submit(lambda i=i: order.append(i) or i) for i in range(50)]
    failing = stream.submit(lambda: 1 / 0)
    after = stream.submit(lambda: "on")
    assert [e.wait() for e in events] == list(range(50)) == order
    with pytest.raises(ZeroDivisionError):
        failing.wait()
    assert after.wait() == "on"
    stream.close()
