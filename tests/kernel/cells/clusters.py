"""Programs that test_clusters.py writes, each below a first line of its own; `asked` is a path that it gives srun."""

# %% srun
import os
import subprocess
import sys

options = [part for part in sys.argv[1:] if part.startswith("--")]
command = sys.argv[1 + len(options) :]
with open(asked, "w") as file:
    file.write(" ".join(options))
nodes = int(next(part for part in options if part.startswith("--nodes=")).partition("=")[2])
tasks = [
    subprocess.Popen(command, stdin=subprocess.PIPE, env={**os.environ, "SLURM_PROCID": str(number)})
    for number in range(nodes)
]
for line in sys.stdin.buffer:
    for task in tasks:
        try:
            task.stdin.write(line)
            task.stdin.flush()
        except OSError:
            pass
for task in tasks:
    task.stdin.close()
sys.exit(max(task.wait() for task in tasks))

# %% ssh
import os
import socket
import sys
import threading

arguments, forward = sys.argv[1:], ""
while arguments[0].startswith("-"):
    option = arguments.pop(0)
    if option in ("-o", "-p", "-i", "-L"):
        value = arguments.pop(0)
        forward = value if option == "-L" else forward
host = arguments.pop(0)
if not forward:
    os.environ["SSH_CONNECTION"] = "127.0.0.1 1 127.0.0.1 22"
    os.execvp("sh", ["sh", "-c", *arguments])


def pump(source, target):
    while data := source.recv(65536):
        target.sendall(data)
    target.shutdown(socket.SHUT_WR)


def end_with_input():
    sys.stdin.read()
    os._exit(0)


threading.Thread(target=end_with_input, daemon=True).start()
_, port, ip, there = forward.split(":")
server = socket.create_server(("127.0.0.1", int(port)))
while True:
    one, _ = server.accept()
    try:
        other = socket.create_connection((ip, int(there)))
    except OSError:
        one.close()
        continue
    for ends in ((one, other), (other, one)):
        threading.Thread(target=pump, args=ends, daemon=True).start()
