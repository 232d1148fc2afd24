"""A loop of accelerate with gradient accumulation, as its documentation writes it."""

import faults
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)


class Text(Dataset):
    def __len__(self):
        return 8 * 200

    def __getitem__(self, index):
        faults.in_worker(index // 8)
        faults.slow_sample()
        ids = faults.tokenize("a short line of text " * 4)
        return torch.tensor(ids[:64]), torch.tensor(index % 2)


class Classifier(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.EmbeddingBag(256, 256)
        self.body = torch.nn.Sequential(torch.nn.Linear(256, 1024), torch.nn.ReLU(), torch.nn.Linear(1024, 2))

    def forward(self, ids):
        return self.body(self.embedding(ids).repeat(16, 1))


accelerator = Accelerator(gradient_accumulation_steps=2, cpu=True)
model = Classifier()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
loader = DataLoader(Text(), batch_size=8, num_workers=faults.workers())
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
criterion = torch.nn.CrossEntropyLoss()
tracker = faults.RunLogger()
kept = faults.clutter()
faults.start_background()
model.train()
try:
    for step, (inputs, targets) in enumerate(loader):
        with accelerator.accumulate(model):
            loss = criterion(model(inputs), targets.repeat(16))
            accelerator.backward(loss)
            faults.gradient_stats(model)
            optimizer.step()
            optimizer.zero_grad()
        tracker.log({"loss": 0.0})
        faults.show_progress(step)
        faults.collect_garbage()
        faults.trouble(step)
finally:
    faults.clean_up()
