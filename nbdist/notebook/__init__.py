"""The notebook of this process: the kernel runs it, and a rank imitates it.

Differences between versions of IPython (from 7.34), ipykernel (from 6.17), ipywidgets (from 7.7) and `comm` (absent in
old versions) are handled here and nowhere else. Nothing here imports IPython: if IPython is not loaded, there is no
notebook.
"""
