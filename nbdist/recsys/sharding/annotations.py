"""The annotations of TorchRec and FBGEMM for profilers: some twenty in a step, which take a twentieth of a small
training step even without a profiler."""

from __future__ import annotations

import sys

from torch.autograd.profiler import record_function

from ...system.annotations import annotated


def annotate_for_profilers_alone() -> None:
    """Make TorchRec and FBGEMM annotate only while a profiler runs, in this process."""
    for name, module in list(sys.modules.items()):
        # Not in others of theirs: those may be scripted, and TorchScript knows torch's own alone.
        theirs = name.startswith(("torchrec.distributed.", "fbgemm_gpu.split_table_batched_embeddings_ops_training"))
        if theirs and vars(module).get("record_function") is record_function:
            vars(module)["record_function"] = annotated
