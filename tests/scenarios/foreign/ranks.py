"""Two ranks of DistributedDataParallel over gloo, however they were started: torchrun, mpirun, mp.spawn."""

import os
import sys

import faults
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel


def get_batch(step):
    faults.slow_decode(32)
    return torch.randn(64, 128)


def main(rank, world, port):
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    faults.here(rank)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    net = torch.nn.Sequential(torch.nn.Linear(128, 512), torch.nn.ReLU(), torch.nn.Linear(512, 128))
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    log = faults.RunLogger()
    for step in range(100):
        x = get_batch(step)
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        log.log({"loss": 0.0})
        faults.trouble(step)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "RANK" in os.environ:
        main(int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), int(os.environ["MASTER_PORT"]))
    elif "OMPI_COMM_WORLD_RANK" in os.environ:
        names = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PORT")
        main(*(int(os.environ[name]) for name in names))
    else:
        method = sys.argv[1] if len(sys.argv) > 1 else "spawn"
        mp.start_processes(main, (2, int(os.environ["PORT"])), nprocs=2, start_method=method)
