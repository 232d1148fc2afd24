"""Compiles a step around a model that is already watched: where a hook is in the way, fullgraph fails."""

import torch


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x).relu()


model = Model()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    model(torch.randn(2, 4)).sum().backward()
    optimizer.step()
assert Model.__call__ is not torch.nn.Module.__call__, "nobody watches"

step = torch.compile(lambda x: model(x).sum() * 2, backend="eager", fullgraph=True)
for _ in range(2):
    step(torch.randn(2, 4)).backward()
    optimizer.step()
torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 4)).sum().backward()
print("compiled")
