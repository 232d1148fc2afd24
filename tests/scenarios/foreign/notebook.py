"""A notebook: cells that are compiled and run one after another in one space of names."""

import linecache

CELLS = (
    """
import torch
from torch.nn import functional as F
import faults
torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(128, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 128))
opt = torch.optim.Adam(model.parameters())
log = faults.RunLogger()
kept = faults.clutter()
faults.start_background()
""",
    """
def next_batch():
    faults.slow_decode(32)
    faults.tokenize("cells of a table " * 10)
    return torch.randn(64, 128)
""",
    """
history = []
try:
    for step in range(120):
        xb = next_batch()
        loss = F.mse_loss(model(xb), xb)
        loss.backward()
        opt.step()
        opt.zero_grad()
        history.append(loss.item())
        log.log({"loss": history[-1]})
        faults.gradient_stats(model)
        faults.show_progress(step)
        faults.collect_garbage()
        faults.trouble(step)
finally:
    faults.clean_up()
""",
)
space = {"__name__": "__main__"}
for number, cell in enumerate(CELLS, 1):
    name = f"<ipython-input-{number}>"
    linecache.cache[name] = (len(cell), None, cell.splitlines(True), name)
    exec(compile(cell, name, "exec"), space)
