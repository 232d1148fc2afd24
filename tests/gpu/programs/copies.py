"""Copies pinned batches on the computing stream, waits with .item(), compiles, captures a graph."""

import torch

device = torch.device("cuda")
model = torch.nn.Sequential(torch.nn.Linear(2048, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 1)).to(device)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
pinned = torch.randn(16384, 2048).pin_memory()  # 128 MiB
data = torch.utils.data.TensorDataset(torch.arange(60))
for (number,) in torch.utils.data.DataLoader(data, batch_size=1):
    batch = pinned.to(device, non_blocking=True)
    loss = model(batch).sum()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if number % 2:
        loss.item()

torch.cuda.set_sync_debug_mode("error")
for _ in torch.utils.data.DataLoader(data, batch_size=1):
    batch = pinned.to(device, non_blocking=True)
    model(batch).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
torch.cuda.set_sync_debug_mode("default")
print("no sync")

static = torch.zeros_like(pinned, device=device)
for _ in range(5):
    graph = torch.cuda.CUDAGraph()
    batch = pinned.to(device, non_blocking=True)  # whose end nobody has asked for when the capture begins
    with torch.cuda.graph(graph):
        static.copy_(pinned, non_blocking=True)
        doubled = static * 2
    graph.replay()
    assert torch.equal(doubled, batch * 2)
print("captured")

compiled = torch.compile(
    lambda x: model(x).sum() + x.to(torch.float32).mean(), backend="eager", fullgraph=True
)
compiled(pinned[:16].to(device)).backward()
print("compiled")
