"""A loop whose step takes 20 ms and 2 ms for every sample; it never ends by itself."""

import argparse
import time
from typing import Any

import torch

FIXED_S, PER_SAMPLE_S = 0.020, 0.002


class Idle(torch.optim.Optimizer):
    """Steps without a change. Torch's own way to add parameters imports its compiler: two seconds a run."""

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self.param_groups.append(param_group)

    def step(self, closure: Any = None) -> None:
        pass


def train(batch: int) -> None:
    optimizer = Idle([torch.nn.Parameter(torch.zeros(1))], {})
    while True:
        time.sleep(FIXED_S + PER_SAMPLE_S * batch)
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int)
    train(parser.parse_args().batch_size)
