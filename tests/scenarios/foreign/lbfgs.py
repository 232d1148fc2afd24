"""Fitting sines with LBFGS, as pytorch/examples time_sequence_prediction: a closure computes the loss."""

import faults
import torch
from torch import nn

torch.set_num_threads(1)


class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(1, 48, batch_first=True)
        self.linear = nn.Linear(48, 1)

    def forward(self, input):
        return self.linear(self.rnn(input.unsqueeze(-1))[0]).squeeze(-1)


def load_window(i):
    faults.slow_decode(8)
    faults.tokenize("12.5, 13.5, 14.5, " * 10)
    return torch.sin(torch.arange(40.0) / (i + 7)).repeat(16, 1)


seq = Sequence()
criterion = nn.MSELoss()
optimizer = torch.optim.LBFGS(seq.parameters(), lr=0.1, max_iter=3)
log = faults.RunLogger()
kept = faults.clutter()
faults.start_background()
try:
    for i in range(60):
        window = load_window(i)

        def closure():
            optimizer.zero_grad()
            loss = criterion(seq(window[:, :-1]), window[:, 1:])  # noqa: B023  # called at once
            loss.backward()
            return loss

        optimizer.step(closure)
        log.log({"loss": 0.0})
        faults.gradient_stats(seq)
        faults.show_progress(i)
        faults.collect_garbage()
        faults.trouble(i)
finally:
    faults.clean_up()
