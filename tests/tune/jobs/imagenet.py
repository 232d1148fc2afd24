"""Short epochs as of torchvision's reference: a worker that is started anew for each, and an evaluation."""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Images(Dataset):
    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        time.sleep(0.001)
        drawn = torch.Generator().manual_seed(number)
        return torch.randn(3, 16, 16, generator=drawn), number % 10


def train(model, loader, optimizer):
    model.train()
    for images, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.004)  # stands for the card


def evaluate(model, loader):
    model.eval()
    with torch.no_grad():
        for images, _ in loader:
            model(images)


def main():
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.Flatten(), torch.nn.LazyLinear(10))
    model(torch.zeros(1, 3, 16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    train_loader = DataLoader(
        Images(128),
        batch_size=8,
        shuffle=True,
        num_workers=1,
    )
    val_loader = DataLoader(Images(8), batch_size=8)
    for _ in range(1000):
        train(model, train_loader, optimizer)
        evaluate(model, val_loader)


if __name__ == "__main__":
    main()
