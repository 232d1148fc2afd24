"""A language model trained by hand: the weights are moved by a loop over them, as in pytorch/examples."""

import faults
import torch
from torch import nn

torch.manual_seed(1111)
torch.set_num_threads(1)
bptt, batch_size, vocab, epochs = 24, 16, 200, 4
corpus = torch.randint(vocab, (batch_size, bptt * 31)).t().contiguous()


class RNNModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = nn.Embedding(vocab, 96)
        self.rnn = nn.LSTM(96, 96)
        self.decoder = nn.Linear(96, vocab)

    def forward(self, input, hidden):
        output, hidden = self.rnn(self.encoder(input), hidden)
        return self.decoder(output).view(-1, vocab), hidden


def get_batch(source, i):
    faults.slow_decode(batch_size)
    faults.tokenize("a line of the corpus " * 10)
    return source[i : i + bptt], source[i + 1 : i + 1 + bptt].reshape(-1)


def evaluate(data_source):
    model.eval()
    total_loss = 0.0
    hidden = None
    with torch.no_grad():
        for _ in range(faults.evaluation_batches()):
            data, targets = get_batch(data_source, 0)
            output, hidden = model(data, hidden)
            total_loss += criterion(output, targets).item()
    return total_loss


def train():
    model.train()
    hidden = None
    for batch, i in enumerate(range(0, corpus.size(0) - 1 - bptt, bptt)):
        data, targets = get_batch(corpus, i)
        model.zero_grad()
        hidden = None if hidden is None else tuple(h.detach() for h in hidden)
        output, hidden = model(data, hidden)
        loss = criterion(output, targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        for p in model.parameters():
            p.data.add_(p.grad, alpha=-faults.slow_update(lr) if p is last else -lr)
        faults.gradient_stats(model)
        logger.log({"loss": 0.0})
        faults.show_progress(batch)
        faults.collect_garbage()
        faults.trouble(epoch * 30 + batch)


lr = 20.0
model = RNNModel()
last = model.decoder.bias
criterion = nn.CrossEntropyLoss()
logger = faults.RunLogger()
kept = faults.clutter()
faults.start_background()
try:
    for epoch in range(epochs):  # noqa: B007  # train() reads it, as the original does
        train()
        for _ in range(20 if faults.evaluation_batches() > 1 else 1):
            evaluate(corpus)
finally:
    faults.clean_up()
