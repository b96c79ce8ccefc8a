"""The %ddp and %%ddp magics."""
