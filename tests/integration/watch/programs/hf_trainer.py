"""Four steps of the Hugging Face Trainer with an evaluation and a save."""

import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments


class Text(Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.arange(16) + index
        return {"input_ids": ids, "labels": ids}


config = LlamaConfig(
    vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
)
arguments = TrainingArguments(
    output_dir="hf",
    per_device_train_batch_size=2,
    max_steps=4,
    eval_strategy="steps",
    eval_steps=2,
    save_steps=4,
    logging_steps=1,
    report_to=[],
    use_cpu=True,
    disable_tqdm=True,
)
Trainer(LlamaForCausalLM(config), arguments, train_dataset=Text(), eval_dataset=Text()).train()
