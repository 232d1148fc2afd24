"""Hugging Face's Trainer: it builds its DataLoader itself, by its arguments."""

import tempfile
import time

import torch
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments


class Far(Dataset):
    def __len__(self):
        return 4000

    def __getitem__(self, number):
        time.sleep(0.002)
        drawn = torch.Generator().manual_seed(number)
        return {"rows": torch.randn(32, generator=drawn), "labels": torch.tensor(float(number % 2))}


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.line = torch.nn.Linear(32, 1)

    def forward(self, rows, labels):
        time.sleep(0.004)  # stands for the card
        return {"loss": torch.nn.functional.mse_loss(self.line(rows)[:, 0], labels)}


if __name__ == "__main__":
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=8,
        num_train_epochs=100,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )
    Trainer(model=Model(), args=arguments, train_dataset=Far()).train()
