from __future__ import annotations

import pytest
import torch

from scalewise.engine.sums.flat import CHUNK, FlatLayout, chunk_norms, in_memory_order, is_dense, sum_of_squares


def layout(processes: int = 1) -> FlatLayout:
    parameters = {
        "weight": torch.randn(300, 33),
        "image": torch.randn(8, 3, 5, 5).to(memory_format=torch.channels_last),
        "bias": torch.randn(7),
        "scalar": torch.randn(()),
    }
    return FlatLayout(parameters, {"mean": torch.randn(5)}, processes)


def test_views_are_shaped_and_strided_like_the_tensors():
    grid = layout()
    flat = grid.new()
    for view, tensor in zip(grid.views(flat), grid.tensors.values(), strict=True):
        assert view.stride() == tensor.stride()
        view.copy_(tensor)
        start = view.storage_offset()
        assert torch.equal(flat[start : start + tensor.numel()], in_memory_order(tensor))


def test_parameters_do_not_share_a_chunk_with_averages():
    grid = layout()
    assert grid.parameters_stop % CHUNK == 0
    assert grid.starts["mean"] == grid.parameters_stop


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 8])
def test_the_grid_does_not_depend_on_processes(processes):
    assert layout(processes).starts == layout().starts
    assert layout(processes).size % (CHUNK * processes) == 0


@pytest.mark.parametrize("processes", [1, 2, 3, 5, 8])
def test_shards_cover_everything_once(processes, monkeypatch):
    monkeypatch.setattr("scalewise.engine.sums.flat.BUCKET_BYTES", 16 * CHUNK)
    grid = layout(processes)
    seen = torch.zeros(grid.size)
    for bucket in grid.buckets():
        for process in range(processes):
            start, stop = bucket.shard_range(process)
            seen[start:stop] += 1
    assert torch.equal(seen, torch.ones(grid.size))
    pieces = [
        piece
        for process in range(processes)
        for piece in grid.pieces([bucket.shard_range(process) for bucket in grid.buckets()])
    ]
    for name, tensor in grid.tensors.items():
        held = sorted((piece.start, piece.stop) for piece in pieces if piece.name == name)
        assert held[0][0] == 0
        assert held[-1][1] == tensor.numel()
        assert all(left[1] == right[0] for left, right in zip(held, held[1:], strict=False))


@pytest.mark.parametrize("threads", [1, 2])
def test_chunk_norms_do_not_depend_on_where_the_vector_is_cut(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        flat = torch.randn(40 * CHUNK)
        whole = chunk_norms(flat)
        for start, stop in ((0, 1), (3, 4), (0, 7), (5, 29), (16, 40)):
            assert torch.equal(chunk_norms(flat[start * CHUNK : stop * CHUNK]), whole[start:stop])
        assert float(sum_of_squares(whole)) == pytest.approx(float((flat.double() ** 2).sum()), rel=1e-6)
    finally:
        torch.set_num_threads(before)


def test_dense():
    assert is_dense(torch.randn(4, 5).t())
    assert not is_dense(torch.randn(4, 5)[:, :3])
    assert not is_dense(torch.randn(1, 5).expand(4, 5))
