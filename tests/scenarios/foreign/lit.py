"""A LightningModule as its tutorial has it, with a callback that logs."""

import warnings

import faults
import lightning as L
import torch
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

warnings.filterwarnings("ignore")


class Rows(Dataset):
    def __init__(self, batches):
        self.batches = batches

    def __len__(self):
        return 32 * self.batches

    def __getitem__(self, index):
        faults.in_worker(index // 32)
        faults.slow_sample()
        return torch.full((256,), index / 1000)


class LitAutoEncoder(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(256, 2048), torch.nn.ReLU(), torch.nn.Linear(2048, 256)
        )

    def training_step(self, batch, batch_idx):
        return F.mse_loss(self.net(batch), batch)

    def validation_step(self, batch, batch_idx):
        F.mse_loss(self.net(batch), batch)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=1e-3)


class Extras(L.Callback):
    def __init__(self):
        self.remote = faults.RunLogger()

    def on_train_batch_end(self, trainer, module, outputs, batch, batch_idx):
        self.remote.log({"loss": 0.0})
        faults.gradient_stats(module)
        faults.show_progress(batch_idx)
        faults.collect_garbage()
        faults.trouble(batch_idx)


torch.set_num_threads(1)
kept = faults.clutter()
faults.start_background()
heavy = faults.evaluation_batches() > 1
trainer = L.Trainer(
    max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
    enable_checkpointing=False, num_sanity_val_steps=0, callbacks=[Extras()],
    val_check_interval=10 if heavy else 1.0,
)  # fmt: skip
try:
    trainer.fit(
        LitAutoEncoder(),
        DataLoader(Rows(100), batch_size=32, num_workers=faults.workers()),
        DataLoader(Rows(60 if heavy else 2), batch_size=32),
    )
finally:
    faults.clean_up()
