"""fastai's Learner: callbacks by name, an optimizer that is none of torch's, validation after every epoch."""

import faults
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

torch.set_num_threads(1)


class Optimizer:
    """fastcore's kind: steppers over parameters."""

    def __init__(self, params, lr):
        self.params, self.lr, self.state = list(params), lr, {}

    @torch.no_grad()
    def step(self):
        rate = faults.slow_update(self.lr)
        for p in self.params:
            average = self.state.setdefault(p, torch.zeros_like(p)).mul_(0.9).add_(p.grad)
            p.add_(average, alpha=-rate)

    def zero_grad(self):
        for p in self.params:
            p.grad = None


class Recorder:
    def __init__(self):
        self.log = faults.RunLogger()

    def after_batch(self, learn):
        if learn.training:
            self.log.log({"loss": 0.0})
            faults.gradient_stats(learn.model)
            faults.show_progress(learn.iter)
            faults.collect_garbage()
            faults.trouble(learn.iter)


class Learner:
    def __init__(self, dls, model, loss_func, opt_func, cbs):
        self.dls, self.model, self.loss_func, self.cbs = dls, model, loss_func, cbs
        self.opt, self.iter, self.training = opt_func(model.parameters(), lr=0.01), 0, True

    def __call__(self, name):
        for cb in self.cbs:
            getattr(cb, name, lambda learn: None)(self)

    def one_batch(self, xb, yb):
        self.pred = self.model(xb)
        self.loss = self.loss_func(self.pred, yb)
        if self.training:
            self.loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.iter += 1
        self("after_batch")

    def fit(self, epochs):
        for _ in range(epochs):
            self.training = True
            self.model.train()
            for xb, yb in self.dls[0]:
                self.one_batch(xb, yb)
            self.training = False
            self.model.eval()
            with torch.no_grad():
                for _ in range(faults.evaluation_batches()):
                    for xb, yb in self.dls[1]:
                        self.one_batch(xb, yb)


def samples(count):
    return TensorDataset(torch.randn(count, 256), torch.randint(0, 10, (count,)))


if __name__ == "__main__":
    net = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 10))
    dls = (
        DataLoader(samples(64 * 60), batch_size=64, num_workers=faults.workers()),
        DataLoader(samples(256), 64),
    )
    kept = faults.clutter()
    faults.start_background()
    try:
        Learner(dls, net, F.cross_entropy, Optimizer, [Recorder()]).fit(2)
    finally:
        faults.clean_up()
