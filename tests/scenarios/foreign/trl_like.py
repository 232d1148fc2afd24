"""Reinforcement learning of a language model as trl has it: sample answers, score them, update on them."""

import faults
import torch
from torch.nn import functional as F

torch.set_num_threads(1)
PROMPTS = ["why is the sky blue", "name a colour", "what is two and two", "say hello"] * 4


class Policy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = torch.nn.Embedding(256, 128)
        self.body = torch.nn.GRU(128, 256, batch_first=True)
        self.head = torch.nn.Linear(256, 256)

    def forward(self, ids):
        return self.head(self.body(self.embed(ids))[0])


def collect(step):
    """A batch of prompts, tokenised."""
    faults.slow_decode(len(PROMPTS))
    rows = [faults.tokenize(text.ljust(24)[:24]) for text in PROMPTS]
    return torch.tensor(rows) % 256


@torch.no_grad()
def generate(policy, ids, tokens):
    for _ in range(tokens):
        logits = policy(ids[:, -8:])[:, -1]
        ids = torch.cat([ids, torch.multinomial(logits.softmax(-1), 1)], dim=1)
    return ids


def reward(ids):
    return (ids[:, 24:] == 32).float().mean(dim=1)


class PPOTrainer:
    def __init__(self, policy, optimizer):
        self.policy, self.optimizer, self.log = policy, optimizer, faults.RunLogger()

    def step(self, ids, rewards):
        advantage = rewards - rewards.mean()
        logits = self.policy(ids[:, :-1])
        chosen = -F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
        loss = -(chosen.view(len(ids), -1).mean(dim=1) * advantage).mean()
        self.optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), 1.0)
        self.optimizer.step()


if __name__ == "__main__":
    policy = Policy()
    trainer = PPOTrainer(policy, torch.optim.AdamW(policy.parameters(), lr=1e-4))
    kept = faults.clutter()
    faults.start_background()
    try:
        for step in range(100):
            query = collect(step)
            answers = generate(policy, query, 4)
            trainer.step(answers, reward(answers))
            trainer.log.log({"reward": 0.0})
            faults.gradient_stats(policy)
            faults.show_progress(step)
            faults.collect_garbage()
            faults.trouble(step)
    finally:
        faults.clean_up()
