"""Four steps of Lightning, which runs forward and backward inside the optimizer's step, and a validation."""

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Lit(L.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def training_step(self, batch, _):
        return self.net(batch[0]).sum()

    def validation_step(self, batch, _):
        self.log("loss", self.net(batch[0]).sum())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


def loader() -> DataLoader:
    return DataLoader(TensorDataset(torch.randn(8, 8)), batch_size=2)


trainer = L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    num_sanity_val_steps=0,
)
trainer.fit(Lit(), loader(), loader())
