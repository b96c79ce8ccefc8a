"""The notebook that this process is the kernel of, or looks like (a rank).

Differences between generations of IPython (7.34 on), ipykernel (6.17 on), ipywidgets (7.7 on) and `comm` (absent with
old ones) are known here and nowhere else. Nothing here imports IPython: where IPython is not loaded, there is no
notebook.
"""
