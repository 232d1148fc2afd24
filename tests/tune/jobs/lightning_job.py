"""Lightning: the loader is built in the program, and handed over."""

import time

import lightning
import torch
from torch.utils.data import DataLoader, Dataset


class Far(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, number):
        time.sleep(0.002)
        drawn = torch.Generator().manual_seed(number)
        return torch.randn(32, generator=drawn), torch.tensor(float(number % 2))


class Model(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(32, 1)

    def training_step(self, batch, number):
        rows, wanted = batch
        time.sleep(0.004)  # stands for the card
        return torch.nn.functional.mse_loss(self.line(rows)[:, 0], wanted)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.01)


if __name__ == "__main__":
    lightning.seed_everything(0)
    trainer = lightning.Trainer(
        max_epochs=100, accelerator="cpu", logger=False, enable_checkpointing=False, enable_progress_bar=False
    )
    trainer.fit(Model(), DataLoader(Far(), batch_size=8, shuffle=True))
