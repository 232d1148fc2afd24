"""More than two workers do not fit: as on a machine whose memory they fill."""

import time

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info


class Heavy(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, number):
        worker = get_worker_info()
        if worker is not None and worker.num_workers > 2:
            raise MemoryError(f"worker {worker.id} of {worker.num_workers} finds no room")
        time.sleep(0.002)
        drawn = torch.Generator().manual_seed(number)
        return torch.randn(32, generator=drawn), torch.tensor(float(number % 2))


if __name__ == "__main__":
    torch.manual_seed(0)
    model = torch.nn.Linear(32, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    for _ in range(100):
        for rows, wanted in DataLoader(Heavy(), batch_size=8):
            loss = torch.nn.functional.mse_loss(model(rows)[:, 0], wanted)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            time.sleep(0.004)  # stands for the card
