"""A loop with an optimizer of its own that calls its parent's step, and gradient accumulation over four."""

import faults
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Lookahead(torch.optim.SGD):
    """Slow weights that follow the fast ones."""

    def __init__(self, params, lr):
        super().__init__(params, lr=lr, momentum=0.9)
        self.slow = [p.detach().clone() for group in self.param_groups for p in group["params"]]

    def step(self, closure=None):
        loss = super().step(closure)
        faults.slow_update(1.0)
        fast = [p for group in self.param_groups for p in group["params"]]
        for slow, p in zip(self.slow, fast, strict=True):
            slow.add_(p.detach() - slow, alpha=0.5)
            p.data.copy_(slow)
        return loss


model = torch.nn.Sequential(torch.nn.Linear(256, 768), torch.nn.ReLU(), torch.nn.Linear(768, 256))
optimizer = Lookahead(model.parameters(), lr=0.01)
loader = DataLoader(TensorDataset(torch.randn(64 * 240, 256)), batch_size=64)
log = faults.RunLogger()
kept = faults.clutter()
faults.start_background()
try:
    for i, (x,) in enumerate(loader):
        loss = (model(x) - x).square().mean() / 4
        loss.backward()
        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
            log.log({"loss": 0.0})
            faults.gradient_stats(model)
            faults.show_progress(i)
            faults.collect_garbage()
            faults.trouble(i // 4)
finally:
    faults.clean_up()
