"""The Hugging Face Trainer with a small Llama, a callback, and a dataset that tokenises as it goes."""

import faults
import torch
from torch.utils.data import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

torch.set_num_threads(1)


class Text(Dataset):
    def __init__(self, rows):
        self.rows, self.drawn = rows, 0

    def __len__(self):
        return self.rows

    def __getitem__(self, index):
        self.drawn += 1  # the Trainer shuffles: an index says nothing of when
        faults.in_worker(self.drawn // 8)
        faults.slow_sample()
        ids = torch.tensor(faults.tokenize("some words of a page " * 4)[:32])
        return {"input_ids": ids, "labels": ids}


class Extras(TrainerCallback):
    def __init__(self):
        self.remote = faults.RunLogger()

    def on_step_end(self, args, state, control, model=None, **kwargs):
        self.remote.log({"step": state.global_step})
        faults.gradient_stats(model)
        faults.show_progress(state.global_step)
        faults.collect_garbage()
        faults.trouble(state.global_step)


config = LlamaConfig(
    vocab_size=256, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4
)
heavy = faults.evaluation_batches() > 1
arguments = TrainingArguments(
    output_dir="hf", per_device_train_batch_size=8, max_steps=80, eval_strategy="steps",
    eval_steps=8 if heavy else 60, save_strategy="no", logging_steps=20, report_to=[], use_cpu=True,
    disable_tqdm=True, dataloader_num_workers=faults.workers(),
)  # fmt: skip
kept = faults.clutter()
faults.start_background()
trainer = Trainer(
    LlamaForCausalLM(config), arguments, train_dataset=Text(8 * 100), eval_dataset=Text(160 if heavy else 16),
    callbacks=[Extras()],
)  # fmt: skip
try:
    trainer.train()
finally:
    faults.clean_up()
