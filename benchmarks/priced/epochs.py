"""Short epochs with many workers, as pytorch/examples' imagenet has them: they are started anew at each.

`PERSISTENT=1`: DataLoader(persistent_workers=True).
"""

import os

import torch
from parts import CUDA, DEVICE, Block, Clock, adamw, autocast
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

rows, side, patch, batches = (128, 64, 8, 40) if CUDA else (8, 32, 8, 8)
width, layers, workers = (768, 6, 16) if CUDA else (128, 3, 2)


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(Block(width, 8) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        return self.head(self.blocks(self.cut(images).flatten(2).transpose(1, 2)).mean(1))


def train(loader, model, optimizer, clock):
    model.train()
    for images, target in loader:
        images, target = images.to(DEVICE, non_blocking=True), target.to(DEVICE, non_blocking=True)
        with autocast():
            loss = F.cross_entropy(model(images), target)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        clock.step()
    print(f"loss {loss.item():.3f}")


def main():
    images = TensorDataset(
        torch.randn(rows * batches, 3, side, side), torch.randint(0, 10, (rows * batches,))
    )
    loader = DataLoader(
        images,
        batch_size=rows,
        shuffle=True,
        num_workers=workers,
        pin_memory=CUDA,
        persistent_workers=bool(os.environ.get("PERSISTENT")),
    )
    model = Classifier().to(DEVICE)
    optimizer = adamw(model)
    clock = Clock()
    while clock.running():
        train(loader, model, optimizer, clock)
    clock.close()


if __name__ == "__main__":
    main()
