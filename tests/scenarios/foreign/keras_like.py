"""Keras on torch: `model.fit(generator)`, an optimizer that is none of torch's, callbacks."""

import faults
import torch
from torch.nn import functional as F

torch.set_num_threads(1)


class Optimizer:
    def __init__(self, variables, learning_rate):
        self.variables, self.learning_rate = variables, learning_rate

    def apply(self, gradients):
        rate = faults.slow_update(self.learning_rate)
        with torch.no_grad():
            for variable, gradient in zip(self.variables, gradients, strict=True):
                variable.sub_(gradient, alpha=rate)


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.dense = torch.nn.Sequential(
            torch.nn.Linear(128, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 128)
        )

    def forward(self, x):
        return self.dense(x)

    def compile(self, optimizer):
        self.optimizer = optimizer

    def train_step(self, data):
        x, y = data
        self.zero_grad()
        loss = F.mse_loss(self(x), y)
        loss.backward()
        self.optimizer.apply([v.grad for v in self.parameters()])
        return loss

    def fit(self, batches, callbacks):
        for step, data in enumerate(batches):
            self.train_step(data)
            for callback in callbacks:
                callback.on_train_batch_end(step, self)


class History:
    def __init__(self):
        self.tracker = faults.RunLogger()

    def on_train_batch_end(self, step, model):
        self.tracker.log({"step": step})
        faults.gradient_stats(model)
        faults.show_progress(step)
        faults.collect_garbage()
        faults.trouble(step)


def generator():
    for _ in range(130):
        faults.slow_decode(64)
        faults.tokenize("a row of text " * 10)
        x = torch.randn(64, 128)
        yield x, x


kept = faults.clutter()
faults.start_background()
model = Model()
model.compile(Optimizer(list(model.parameters()), 0.01))
try:
    model.fit(generator(), [History()])
finally:
    faults.clean_up()
