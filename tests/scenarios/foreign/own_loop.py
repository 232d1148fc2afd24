"""A language model on a mapped file, with batches cut out of it by hand: no DataLoader anywhere."""

import faults
import numpy as np
import torch
from torch.nn import functional as F

torch.manual_seed(1337)
torch.set_num_threads(1)
block_size, batch_size, vocab = 32, 16, 256
eval_interval, max_iters = 50, 120
data = (np.arange(200_000) * 7 % 251).astype(np.uint16)


def get_batch(split):
    ix = torch.randint(len(data) - block_size, (batch_size,))
    faults.slow_decode(batch_size)
    faults.tokenize("so much text " * 20)
    x = torch.stack([torch.from_numpy(data[i : i + block_size].astype(np.int64)) for i in ix])
    y = torch.stack([torch.from_numpy(data[i + 1 : i + 1 + block_size].astype(np.int64)) for i in ix])
    return x, y


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(vocab, 64)
        layer = torch.nn.TransformerEncoderLayer(64, 2, 256, batch_first=True)
        self.body = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = torch.nn.Linear(64, vocab)

    def forward(self, idx, targets):
        logits = self.head(self.body(self.embedding(idx)))
        return logits, F.cross_entropy(logits.view(-1, vocab), targets.view(-1))


@torch.no_grad()
def estimate_loss():
    model.eval()
    losses = torch.zeros(faults.evaluation_batches())
    for k in range(len(losses)):
        X, Y = get_batch("val")
        _, loss = model(X, Y)
        losses[k] = loss.item()
    model.train()
    return losses.mean()


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
logger = faults.RunLogger()
kept = faults.clutter()
faults.start_background()
X, Y = get_batch("train")
try:
    for iter_num in range(max_iters):
        if iter_num % (2 if faults.evaluation_batches() > 1 else eval_interval) == 0:
            estimate_loss()
        logits, loss = model(X, Y)
        X, Y = get_batch("train")
        loss.backward()
        optimizer.step()
        logger.log({"loss": 1.0})
        faults.gradient_stats(model)
        faults.show_progress(iter_num)
        faults.collect_garbage()
        optimizer.zero_grad(set_to_none=True)
        faults.trouble(iter_num)
finally:
    faults.clean_up()
