"""The script that torchrun runs: one task of `tasks.py` in a process group made from torchrun's environment."""

import json
import sys

import torch.distributed as dist

from benchmarks.launch import tasks

if __name__ == "__main__":
    dist.init_process_group("gloo")
    try:
        getattr(tasks, sys.argv[1])(*json.loads(sys.argv[2]))
    finally:
        dist.destroy_process_group()
