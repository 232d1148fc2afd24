"""An image classifier as timm's train.py has it: functions for an epoch, a loader with workers, meters."""

import time

import faults
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class AverageMeter:
    def __init__(self):
        self.sum = self.count = 0

    def update(self, val, n=1):
        self.sum += val * n
        self.count += n


class Images(Dataset):
    def __len__(self):
        return 60 * 16

    def __getitem__(self, index):
        faults.in_worker(index // 16)
        faults.slow_sample()
        return torch.full((3, 16, 16), index / 960), index % 10


def train_one_epoch(epoch, model, loader, optimizer, loss_fn):
    losses_m = AverageMeter()
    model.train()
    for batch_idx, (input, target) in enumerate(loader):
        output = model(input)
        loss = loss_fn(output, target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses_m.update(loss.item(), input.size(0))
        faults.gradient_stats(model)
        logger.log({"loss": losses_m.sum})
        faults.show_progress(batch_idx)
        faults.collect_garbage()
        faults.trouble(epoch * 60 + batch_idx)


def validate(model, loader, loss_fn):
    model.eval()
    with torch.no_grad():
        for _ in range(faults.evaluation_batches()):
            for input, target in loader:
                loss_fn(model(input), target)


if __name__ == "__main__":
    torch.set_num_threads(1)
    # A step takes longer than the worker's batch of 16 images, or the healthy program would wait for it.
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1), nn.ReLU(), nn.Conv2d(32, 64, 3, padding=1), nn.Flatten(),
        nn.Linear(64 * 256, 10),
    )  # fmt: skip
    loader = DataLoader(Images(), batch_size=16, num_workers=1, persistent_workers=True)
    eval_loader = DataLoader(torch.utils.data.Subset(Images(), range(64)), batch_size=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    logger = faults.RunLogger()
    kept = faults.clutter()
    faults.start_background()
    start = time.time()
    try:
        for epoch in range(2):
            train_one_epoch(epoch, model, loader, optimizer, nn.CrossEntropyLoss())
            validate(model, eval_loader, nn.CrossEntropyLoss())
    finally:
        faults.clean_up()
