import pytest
import torch

from consilience.optim._bits import keep_, put_back_
from consilience.optim._pieces import ROOM

VALUES = [0.0, -0.0, 1.5, -2.0, float("inf"), -float("inf"), float("nan"), 6e-8]


def bits_of(tensor):
    return tensor.view(torch.uint8).tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_every_bit_is_that_of_torch_where(dtype):
    new, old = torch.cartesian_prod(*(2 * [torch.tensor(VALUES, dtype=dtype)])).t().contiguous()
    mask = torch.rand(len(new), generator=torch.Generator().manual_seed(0)) < 0.5
    expected = torch.where(mask, old, new)
    assert bits_of(put_back_(new.clone(), mask, old.clone())) == bits_of(expected)
    expected = torch.where(mask, new, torch.zeros((), dtype=dtype))
    assert bits_of(keep_(new.clone(), mask)) == bits_of(expected)


@pytest.mark.parametrize("room", [1, 3, 64])
def test_pieces_change_nothing(monkeypatch, room):
    monkeypatch.setitem(ROOM, "cpu", room)
    new, old = torch.randn(2, 7, 3, generator=torch.Generator().manual_seed(0)).unbind()
    mask = new > old
    expected = torch.where(mask, old, new)
    assert torch.equal(put_back_(new, mask, old), expected)


def test_any_layout():
    generator = torch.Generator().manual_seed(0)
    new, old = torch.randn(2, 4, 3, 2, 5, generator=generator).unbind()
    mask = torch.rand(2, 3, 4, 5, generator=generator) < 0.5
    new, old = new.permute(2, 1, 0, 3), old.permute(2, 1, 0, 3)
    expected = torch.where(mask, old, new)
    assert torch.equal(put_back_(new, mask, old.contiguous()), expected)
    assert not new.is_contiguous()


def test_parameters_know_that_they_were_changed():
    weight = torch.nn.Parameter(torch.ones(2))
    loss = (weight**2).sum()
    with torch.no_grad():
        put_back_(weight, torch.tensor([True, False]), torch.zeros(2))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
