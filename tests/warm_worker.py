"""Ask the template of a raylet for one of its workers: `python -IS warm_worker.py ADDRESS SCRIPT ARGUMENT...`

The template (`warm.py`) forks the worker, which becomes a child of the raylet, and this program ends. A worker with a
runtime environment is started, as Ray does it: by a script that sets the environment up.
"""

import os
import pickle
import socket
import sys

address, *command = sys.argv[1:]
if any(part.startswith("--serialized-runtime-env-context=") for part in command):
    os.execv(sys.executable, [sys.executable, *command])
if os.path.basename(command[0]) == "setup_worker.py":  # which starts the worker without its own option
    command = [part for part in command[1:] if not part.startswith("--language=")]
request = {
    "command": [sys.executable, *command],
    "environ": dict(os.environ),
    "cwd": os.getcwd(),
    "fds": [0, 1, 2],
    "session": False,
    "kind": "program",
    "unbuffered": bool(os.environ.get("PYTHONUNBUFFERED")),
    "asker": os.getppid(),
    "group": os.getpgrp(),
}
joined, joins = os.pipe()
with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as asking:
    asking.connect(f"\0{address}")
    socket.send_fds(asking, [pickle.dumps(request)], [0, 1, 2, joins])
os.close(joins)
os.read(joined, 1)  # until the worker has joined the group of processes, which is there as long as this process
