"""A loop whose step takes 20 ms and 2 ms for every sample; it never ends by itself."""

import argparse
import time

import torch

FIXED_S, PER_SAMPLE_S = 0.020, 0.002


def train(batch: int) -> None:
    weight = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    while True:
        time.sleep(FIXED_S + PER_SAMPLE_S * batch)
        weight.sum().backward()
        optimizer.step()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--batch-size", type=int)
    train(parser.parse_args().batch_size)
