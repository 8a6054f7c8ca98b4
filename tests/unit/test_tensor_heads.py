"""Attention of separate layers, transposed layers and activations: what is recognised, and that the parts add up to the whole."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from hocket.errors import HocketError
from hocket.split import Axis
from hocket.split.inputs import Inputs
from hocket.split.tensor import explain_plan, find_plan, split_tensor
from hocket.split.tensor.graph import elementwise
from hocket.split.tensor.heads import find_heads


class Alone(Axis):
    """Sums over processes that are not there: each process's own part is left."""

    def all_reduce(self, values: Tensor) -> Tensor:
        return values


class Grouped(nn.Module):
    """Attention that takes as many heads as its layers give; pairs of queries share a key and a value."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        self.head_dim = 4
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(8, width, bias=False) for width in (32, 16, 16))
        self.o_proj = nn.Linear(32, 8, bias=False)
        if norm:
            self.q_norm = nn.LayerNorm(4)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, mask, enable_gqa=True).transpose(1, 2).flatten(-2))


class Conv1D(nn.Module):
    """As in transformers."""

    def __init__(self, outputs: int, inputs: int) -> None:
        super().__init__()
        self.nf, self.nx = outputs, inputs
        self.weight, self.bias = nn.Parameter(torch.randn(inputs, outputs)), nn.Parameter(torch.zeros(outputs))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + self.bias


class Gelu(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.04 * torch.pow(x, 3.0))))


class Soft(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.softmax(-1)


class Fused(nn.Module):
    """Query, key and value as the blocks of one transposed layer."""

    def __init__(self) -> None:
        super().__init__()
        self.split_size, self.head_dim = 8, 2
        self.c_attn, self.c_proj = Conv1D(24, 8), Conv1D(8, 8)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        parts = self.c_attn(x).split(self.split_size, -1)
        q, k, v = (part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in parts)
        return self.c_proj(F.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(-2))


def parts(model: nn.Module, size: int, plan: dict[str, str] | None, x: Inputs) -> tuple[list[nn.Module], list[Tensor]]:
    found = []
    for place in range(size):
        part = copy.deepcopy(model)
        split_tensor(part, Alone("tensor", tuple(range(size)), place), plan)
        found.append(part)
    return found, [part(x) for part in found]


@pytest.mark.parametrize("attention", [Grouped, Fused])
@pytest.mark.parametrize("size", [2, 4])
def test_the_heads_of_all_parts_add_up_to_the_whole(attention: type[nn.Module], size: int) -> None:
    model, x = nn.Sequential(attention()).double(), torch.randn(2, 5, 8, dtype=torch.float64, requires_grad=True)
    found, outputs = parts(model, size, {"0": "heads"}, x)
    whole = model(x)
    torch.testing.assert_close(sum(outputs), whole)
    (wanted,) = torch.autograd.grad(whole.sum(), x)
    grads = [torch.autograd.grad(output.sum(), x)[0] for output in outputs]
    torch.testing.assert_close(sum(grads), wanted)
    values = sum(p.numel() for part in found for n, p in part.named_parameters() if "c_proj.bias" not in n)
    assert values == sum(p.numel() for n, p in model.named_parameters() if "c_proj.bias" not in n)


def test_a_known_form_is_recognised_and_another_is_not() -> None:
    assert find_heads(Grouped()).groups == 4  # type: ignore[union-attr]
    assert find_heads(Fused()).groups == 4  # type: ignore[union-attr]
    assert find_heads(Grouped(norm=True)) is None  # its norm would see some of the heads, and its gradient would be a part
    other = Grouped()
    del other.head_dim
    assert find_heads(other) is None
    assert find_heads(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))) is None
    # Code that is not known to take any number of heads is gathered unless a plan says otherwise.
    assert set(find_plan(nn.Sequential(Grouped()), 2).values()) == {"gather"}
    with pytest.raises(HocketError, match="'0' has 4 heads of keys and values, which do not divide by 3 processes"):
        explain_plan(nn.Sequential(Grouped()), 3, {"0": "heads"})


def test_transposed_layers_and_own_activations_make_pairs() -> None:
    model, x = nn.Sequential(Conv1D(12, 8), Gelu(), Conv1D(8, 12)), torch.randn(3, 8)
    assert find_plan(model, 2) == {"0": "columns", "2": "rows"}
    assert find_plan(nn.Sequential(Conv1D(12, 8), Soft(), Conv1D(8, 12)), 2) == {"0": "gather", "2": "gather"}
    found, outputs = parts(model, 2, None, x)
    torch.testing.assert_close(sum(outputs) - model[2].bias, model(x))
    assert [tuple(p.shape) for p in found[0].parameters()] == [(8, 6), (6,), (6, 8), (8,)]


def test_an_activation_is_known_by_what_it_does() -> None:
    assert elementwise(Gelu())
    assert not elementwise(Soft())
    assert not elementwise(nn.Linear(8, 8))
    assert not elementwise(Grouped())


class Renamed(nn.Module):
    """A head whose bias has another name in the module around it."""

    def __init__(self) -> None:
        super().__init__()
        self.decoder = nn.Linear(8, 12)
        self.bias = self.decoder.bias

    def forward(self, x: Tensor, **others: object) -> Tensor:
        return self.decoder(x)


def test_a_parameter_with_another_name_around_its_layer_is_one_part() -> None:
    model = nn.Sequential(Renamed(), nn.ReLU())
    split_tensor(model, Alone("tensor", (0, 1), 1))
    assert model[0].bias is model[0].decoder.bias
    assert model[0].bias.shape == (6,)
