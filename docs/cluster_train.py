"""Train on one GPU or many, and resume after a kill at any moment.

    torchrun --standalone --nproc-per-node 8 cluster_train.py --out run --weights full.pt

If you start it again with the same ``--out``, it resumes from the last complete checkpoint,
on any number of ranks. Without a GPU it runs on the CPU.
"""

import argparse
import os
import signal
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

import torchlift
from torchlift.distributed import save_consolidated

# ---- your model and your data


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


def build(width, layers):
    """Build the model as on one machine, without ranks."""
    return nn.Sequential(*(Block(width) for _ in range(layers)))


def batch(step, size, width):
    """Return all samples of a step. They depend on the step only, so a resume skips none."""
    numbers = torch.Generator().manual_seed(step)
    inputs = torch.randn(size, width, generator=numbers)
    return inputs, inputs.sin().roll(1, dims=1)


class Batches(Dataset):
    """All samples, by step."""

    def __init__(self, size, width):
        self.size, self.width = size, width

    def __getitem__(self, step):
        return batch(step, self.size, self.width)


# ---- the run


def ignore_stops(worker):
    """Keep a worker alive: a scheduler sends its signal to it, too. Its rank needs its data."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def join():
    """Join the other ranks, and return the device of this rank."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device(accelerator.type, int(os.environ["LOCAL_RANK"]))
    torch.accelerator.set_device_index(device.index)
    # Tensors on a GPU use NCCL, or the backend of the device. Messages on the CPU use gloo.
    backend = dist.get_default_backend_for_device(device)
    dist.init_process_group(f"cpu:gloo,{device.type}:{backend}", device_id=device)
    return device


def main(args):
    device = join()
    rank, ranks = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh(device.type, (ranks,))

    # A skeleton takes no memory, so no rank ever holds the complete model.
    torch.manual_seed(0)
    model = torchlift.skeleton(build, args.width, args.layers)
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    with torchlift.Keeper(args.out / "kept", keep=2) as keeper:
        if args.weights and keeper.latest() is None:
            torchlift.load(model, args.weights, device=device)
        else:
            torchlift.materialize(model, device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, args.steps)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        step = keeper.resume(state) or 0
        if rank == 0:
            print(f"from step {step} on {ranks} x {device.type}", flush=True)

        loader = DataLoader(
            Batches(args.batch, args.width),
            batch_size=None,
            sampler=range(step, args.steps),
            num_workers=args.workers,
            worker_init_fn=ignore_stops,
        )
        batches = iter(loader)

        # A preemption sends SIGTERM. torchrun also sends it to its ranks.
        stop = keeper.should_stop()
        while step < args.steps and not stop:
            inputs, targets = next(batches)
            inputs = inputs.chunk(ranks)[rank].to(device)
            targets = targets.chunk(ranks)[rank].to(device)
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            if step % args.show == 0:
                mean = loss.detach() / ranks
                dist.all_reduce(mean)
                if rank == 0:
                    print(f"step {step} loss {mean.item()!r}", flush=True)
            # True on all ranks together, because the others would wait for a rank that stopped.
            stop = keeper.should_stop()
            if stop or step % args.every == 0:
                keeper.save(step, state)

    if step == args.steps:
        save_consolidated(model, args.out / "model.safetensors")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True, help="a folder that all nodes see")
    parser.add_argument("--weights", type=Path, help="a full checkpoint to start from")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--every", type=int, default=100, help="steps between checkpoints")
    parser.add_argument("--show", type=int, default=10, help="steps between printed losses")
    parser.add_argument("--batch", type=int, default=256, help="samples a step, of all ranks")
    parser.add_argument("--workers", type=int, default=0, help="processes of a rank for data")
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--layers", type=int, default=8)
    main(parser.parse_args())
