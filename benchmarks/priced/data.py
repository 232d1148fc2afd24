"""Images classified by a transformer: a Dataset that decodes what it is asked for, and a DataLoader.

`DECODED=1`: the images were decoded before; without, each takes its time.
"""

import os
import time

import torch
from parts import CUDA, DEVICE, Block, Clock, Profiled, adamw, autocast
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

rows, side, patch = (128, 96, 8) if CUDA else (16, 32, 4)
width, layers, workers = (1024, 8, 4) if CUDA else (64, 3, 1)
decode_s = 0.0 if os.environ.get("DECODED") else (0.0015 if CUDA else 0.002)


class Images(Dataset):
    def __init__(self):
        self.kept = torch.randint(0, 256, (64, 3, side, side), dtype=torch.uint8)

    def __len__(self):
        return 10_000_000

    def __getitem__(self, index):
        if decode_s:
            time.sleep(decode_s)
        return self.kept[index % 64], index % 10


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.cut = nn.Conv2d(3, width, patch, patch)
        self.blocks = nn.Sequential(*(Block(width, 16) for _ in range(layers)))
        self.head = nn.Linear(width, 10)

    def forward(self, images):
        x = self.cut(images.float() / 255).flatten(2).transpose(1, 2)
        return self.head(self.blocks(x).mean(1))


def main():
    model = Classifier().to(DEVICE)
    optimizer = adamw(model)
    loader = DataLoader(Images(), batch_size=rows, num_workers=workers, pin_memory=CUDA)
    clock, profiled = Clock(), Profiled()
    for images, labels in loader:
        images, labels = images.to(DEVICE, non_blocking=True), labels.to(DEVICE, non_blocking=True)
        with autocast():
            loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        if len(clock.ends) % 20 == 0:
            print(f"step {len(clock.ends)} loss {loss.item():.3f}")
        clock.step()
        profiled.step()
        if not clock.running():
            break
    profiled.close()
    clock.close()


if __name__ == "__main__":
    main()
