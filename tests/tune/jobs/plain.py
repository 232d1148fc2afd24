"""A plain loop whose samples take a while to come, without workers."""

import time

import torch
from torch.utils.data import DataLoader, Dataset


class Far(Dataset):
    """Each sample waits as one from a slow store does; what it holds depends on its number alone."""

    def __len__(self):
        return 4000

    def __getitem__(self, number):
        time.sleep(0.002)
        drawn = torch.Generator().manual_seed(number)
        return torch.randn(32, generator=drawn), torch.tensor(float(number % 2))


def main():
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = DataLoader(Far(), batch_size=8, shuffle=True)
    for _ in range(100):
        for rows, wanted in loader:
            loss = torch.nn.functional.mse_loss(model(rows)[:, 0], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.004)  # stands for the card


if __name__ == "__main__":
    main()
